#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/checkpoint_writer.h"

// Writes what pickle and torch.save write, opcode by opcode and record by record, independently of
// the reader.
namespace weir::test {

// --- pickle: each function gives the opcodes that leave one value on the stack ---
namespace pickled {

inline std::string none() { return "N"; }
inline std::string boolean(bool value) { return value ? "\x88" : "\x89"; }
inline std::string text(const std::string& value) {
  std::string out = "X";
  append_bytes(out, uint32_t(value.size()));
  return out + value;
}
inline std::string integer(int64_t value) {
  std::string out;
  if (value == int32_t(value)) {
    out = "J";
    append_bytes(out, int32_t(value));
  } else {
    out = "\x8a\x08";
    append_bytes(out, value);
  }
  return out;
}
inline std::string real(double value) {
  std::string bytes, out = "G";
  append_bytes(bytes, value);
  return out.append(bytes.rbegin(), bytes.rend());
}
inline std::string joined(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += item;
  return out;
}
inline std::string tuple(const std::vector<std::string>& items) {
  return "(" + joined(items) + "t";
}
inline std::string list(const std::vector<std::string>& items) {
  return "](" + joined(items) + "e";
}
using Pairs = std::vector<std::pair<std::string, std::string>>;  // text key, pickled value
inline std::string items(const Pairs& pairs) {
  std::string out = "(";
  for (const auto& [key, value] : pairs) out += text(key) + value;
  return out + "u";
}
inline std::string dict(const Pairs& pairs) { return "}" + items(pairs); }
inline std::string global(const std::string& module, const std::string& name) {
  return "c" + module + "\n" + name + "\n";
}
inline std::string call(const std::string& module, const std::string& name,
                        const std::vector<std::string>& arguments) {
  return global(module, name) + tuple(arguments) + "R";
}
inline std::string object(const std::string& module, const std::string& name,
                          const std::string& state) {
  return global(module, name) + ")\x81" + state + "b";
}
inline std::string ordered_dict(const Pairs& pairs) {
  return call("collections", "OrderedDict", {}) + items(pairs) + dict({{"_metadata", dict({})}}) +
         "b";
}
inline std::string shape(const std::vector<int64_t>& sizes) {
  std::vector<std::string> items;
  for (const int64_t size : sizes) items.push_back(integer(size));
  return tuple(items);
}
inline std::string torch_size(const std::vector<int64_t>& sizes) {
  return call("torch", "Size", {shape(sizes)});
}
inline std::string file(const std::string& value) { return "\x80\x02" + value + "."; }

}  // namespace pickled

// --- zip ---

inline uint32_t crc32_of(const std::string& bytes) {
  uint32_t crc = ~0u;
  for (const char c : bytes) {
    crc ^= uint8_t(c);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

struct ZipFile {
  std::string name, data;
};

// As torch.save's: stored, data at multiples of 64 bytes, sizes in the directory and after the data
// but zero in front of it. `zip64` puts every size and offset in zip64 fields, as beyond 4 GiB.
inline std::string zip_bytes(const std::vector<ZipFile>& files, bool zip64 = false) {
  std::string out, directory;
  for (const ZipFile& file : files) {
    const uint64_t offset = out.size(), size = file.data.size();
    const uint32_t crc = crc32_of(file.data);
    append_bytes(out, uint32_t(0x04034b50));
    append_bytes(out, uint16_t(0));
    append_bytes(out, uint16_t(0x0808));  // a descriptor follows the data; names are UTF-8
    out.append(20 - 2, '\0');
    append_bytes(out, uint16_t(file.name.size()));
    const size_t plain = out.size() + 2 + file.name.size() + 4;
    const size_t padding = (64 - plain % 64) % 64;
    append_bytes(out, uint16_t(4 + padding));
    out += file.name + "FB";
    append_bytes(out, uint16_t(padding));
    out.append(padding, 'Z');
    out += file.data;
    append_bytes(out, uint32_t(0x08074b50));
    append_bytes(out, crc);
    append_bytes(out, uint32_t(size));
    append_bytes(out, uint32_t(size));

    append_bytes(directory, uint32_t(0x02014b50));
    append_bytes(directory, uint32_t(0));
    append_bytes(directory, uint16_t(0x0808));
    directory.append(6, '\0');  // stored; no time
    append_bytes(directory, crc);
    append_bytes(directory, zip64 ? UINT32_MAX : uint32_t(size));
    append_bytes(directory, zip64 ? UINT32_MAX : uint32_t(size));
    append_bytes(directory, uint16_t(file.name.size()));
    append_bytes(directory, uint16_t(zip64 ? 28 : 0));
    directory.append(10, '\0');
    append_bytes(directory, zip64 ? UINT32_MAX : uint32_t(offset));
    directory += file.name;
    if (!zip64) continue;
    append_bytes(directory, uint16_t(1));
    append_bytes(directory, uint16_t(24));
    for (const uint64_t value : {size, size, offset}) append_bytes(directory, value);
  }
  const uint64_t offset = out.size();
  out += directory;
  if (zip64) {
    const uint64_t end64 = out.size();
    append_bytes(out, uint32_t(0x06064b50));
    append_bytes(out, uint64_t(44));
    out.append(12, '\0');
    append_bytes(out, uint64_t(files.size()));
    append_bytes(out, uint64_t(files.size()));
    append_bytes(out, uint64_t(directory.size()));
    append_bytes(out, offset);
    append_bytes(out, uint32_t(0x07064b50));
    append_bytes(out, uint32_t(0));
    append_bytes(out, end64);
    append_bytes(out, uint32_t(1));
  }
  append_bytes(out, uint32_t(0x06054b50));
  append_bytes(out, uint32_t(0));
  append_bytes(out, uint16_t(zip64 ? UINT16_MAX : files.size()));
  append_bytes(out, uint16_t(zip64 ? UINT16_MAX : files.size()));
  append_bytes(out, zip64 ? UINT32_MAX : uint32_t(directory.size()));
  append_bytes(out, zip64 ? UINT32_MAX : uint32_t(offset));
  append_bytes(out, uint16_t(0));
  return out;
}

// --- torch.save ---

inline std::string storage_class(TensorType type) {
  switch (type) {
    case TensorType::F64: return "DoubleStorage";
    case TensorType::F32: return "FloatStorage";
    case TensorType::F16: return "HalfStorage";
    case TensorType::BF16: return "BFloat16Storage";
    case TensorType::I64: return "LongStorage";
    case TensorType::I32: return "IntStorage";
    case TensorType::I16: return "ShortStorage";
    case TensorType::I8: return "CharStorage";
    case TensorType::U8: return "ByteStorage";
    case TensorType::BOOL: return "BoolStorage";
  }
  WEIR_UNREACHABLE("a tensor type");
}

inline std::string pickled_storage(const std::string& type, const std::string& key,
                                   int64_t elements) {
  using namespace pickled;
  return tuple({text("storage"), global("torch", type), text(key), text("cpu"),
                integer(elements)}) +
         "Q";
}

inline std::vector<int64_t> row_major(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

inline std::string pickled_tensor(const std::string& storage, int64_t offset,
                                  const std::vector<int64_t>& shape,
                                  const std::vector<int64_t>& strides) {
  using namespace pickled;
  return call("torch._utils", "_rebuild_tensor_v2",
              {storage, integer(offset), pickled::shape(shape), pickled::shape(strides),
               boolean(false), call("collections", "OrderedDict", {})});
}

// An archive under construction: tensors become storages "0", "1", ….
class TorchWriter {
 public:
  // The opcodes of a tensor whose storage this archive holds.
  std::string tensor(const TestTensor& tensor) {
    std::string data;
    for (const float value : tensor.values) append_value(data, tensor.type, value);
    const std::string key = std::to_string(storages_.size());
    storages_.push_back(data);
    const std::string storage =
        pickled_storage(storage_class(tensor.type), key, int64_t(tensor.values.size()));
    return pickled_tensor(storage, 0, tensor.shape, row_major(tensor.shape));
  }

  std::string bytes(const std::string& root, bool zip64 = false) const {
    std::vector<ZipFile> files = {{"archive/data.pkl", pickled::file(root)},
                                  {"archive/byteorder", "little"}};
    for (size_t i = 0; i < storages_.size(); ++i) {
      files.push_back({"archive/data/" + std::to_string(i), storages_[i]});
    }
    files.push_back({"archive/version", "3\n"});
    return zip_bytes(files, zip64);
  }

 private:
  std::vector<std::string> storages_;
};

}  // namespace weir::test
