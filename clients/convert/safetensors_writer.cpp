#include "clients/convert/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace weir {
namespace {

constexpr int64_t kBlockElements = 1 << 20;  // copied at a time

// A file that did not exist, written in order.
class NewFile {
 public:
  explicit NewFile(const std::string& path)
      : path_(path),
        descriptor_(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644)) {
    if (descriptor_ < 0) fail("create");
  }
  NewFile(const NewFile&) = delete;
  ~NewFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void write(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0 && status_.ok()) {
      const ssize_t count = ::write(descriptor_, at, bytes);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return fail("write");
      at += count;
      bytes -= size_t(count);
    }
  }
  absl::Status close() {
    if (status_.ok() && fsync(descriptor_) != 0) fail("write");
    if (descriptor_ >= 0 && ::close(descriptor_) != 0) fail("close");
    descriptor_ = -1;
    return status_;
  }
  const absl::Status& status() const { return status_; }

 private:
  void fail(const char* verb) {
    if (!status_.ok()) return;
    status_ = absl::UnavailableError(absl::StrCat(path_, ": cannot ", verb, ": ",
                                                  std::generic_category().message(errno)));
  }

  const std::string& path_;
  int descriptor_;
  absl::Status status_;
};

int64_t elements_of(const ServedTensor& tensor) {
  int64_t count = 0;
  for (const Extent& part : tensor.parts) count += part.count;
  return count;
}

std::string header_of(const std::vector<const ServedTensor*>& tensors) {
  nlohmann::json header = {{"__metadata__", {{"format", "pt"}}}};
  uint64_t begin = 0;
  for (const ServedTensor* tensor : tensors) {
    const uint64_t end = begin + uint64_t(elements_of(*tensor)) * size_of(tensor->type);
    header[tensor->name] = {{"dtype", name(tensor->type)},
                            {"shape", tensor->shape},
                            {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

float half_to_float(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  float size = 0;
  if (exponent == 31) {
    size = mantissa ? std::bit_cast<float>(0x7fc00000u) : std::bit_cast<float>(0x7f800000u);
  } else if (exponent == 0) {
    size = float(mantissa) * 0x1p-24f;
  } else {
    size = std::bit_cast<float>(uint32_t(exponent + 112) << 23 | uint32_t(mantissa) << 13);
  }
  return half >> 15 ? -size : size;
}

float float_of(TensorType type, const std::byte* data, int64_t index) {
  uint16_t half = 0;
  float value = 0;
  if (type == TensorType::F32) {
    std::memcpy(&value, data + index * 4, 4);
    return value;
  }
  std::memcpy(&half, data + index * 2, 2);
  return type == TensorType::F16 ? half_to_float(half)
                                 : std::bit_cast<float>(uint32_t(half) << 16);
}

void write_part(NewFile& file, const Extent& part, bool plus_one) {
  const TensorType type = part.source->type;
  std::vector<std::byte> block(size_t(std::min(kBlockElements, part.count)) * size_of(type));
  std::vector<float> sums;
  for (int64_t done = 0; done < part.count && file.status().ok();) {
    const int64_t count = std::min(kBlockElements, part.count - done);
    copy_elements(*part.source, part.first + done, count, block.data());
    if (plus_one) {
      sums.resize(size_t(count));
      for (int64_t i = 0; i < count; ++i) sums[size_t(i)] = 1 + float_of(type, block.data(), i);
      file.write(sums.data(), sums.size() * sizeof(float));
    } else {
      file.write(block.data(), size_t(count) * size_of(type));
    }
    done += count;
  }
}

}  // namespace

absl::Status write_safetensors(const std::string& path, const std::vector<ServedTensor>& tensors) {
  std::vector<const ServedTensor*> order;
  for (const ServedTensor& tensor : tensors) order.push_back(&tensor);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [](const ServedTensor* tensor) { return size_of(tensor->type); });
  NewFile file(path);
  const std::string header = header_of(order);
  const uint64_t header_bytes = header.size();
  file.write(&header_bytes, sizeof header_bytes);
  file.write(header.data(), header.size());
  for (const ServedTensor* tensor : order) {
    for (const Extent& part : tensor->parts) write_part(file, part, tensor->plus_one);
  }
  return file.close();
}

absl::Status write_new_file(const std::string& path, const std::string& text) {
  NewFile file(path);
  file.write(text.data(), text.size());
  return file.close();
}

}  // namespace weir
