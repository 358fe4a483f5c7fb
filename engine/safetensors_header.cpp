#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/safetensors.h"
#include "nlohmann/json.hpp"

namespace weir {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

constexpr size_t kLengthBytes = 8;                // the header's length, before the header
constexpr uint64_t kHeaderBytesMax = 100'000'000;
constexpr size_t kDimensionsMax = 8;

struct TypeRow {
  TensorType type;
  const char* name;
  size_t bytes;
};
constexpr std::array<TypeRow, 10> kTypes = {{{TensorType::F64, "F64", 8},
                                             {TensorType::F32, "F32", 4},
                                             {TensorType::F16, "F16", 2},
                                             {TensorType::BF16, "BF16", 2},
                                             {TensorType::I64, "I64", 8},
                                             {TensorType::I32, "I32", 4},
                                             {TensorType::I16, "I16", 2},
                                             {TensorType::I8, "I8", 1},
                                             {TensorType::U8, "U8", 1},
                                             {TensorType::BOOL, "BOOL", 1}}};

// One entry of the header as it is written.
struct Entry {
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape, offsets;
};

// Reads {"__metadata__": {text: text}, NAME: {"dtype", "shape", "data_offsets"}, ...} and nothing
// else. No tree is built, so a hostile header costs no more memory than its own size suggests.
class HeaderReader final : public nlohmann::json_sax<json> {
 public:
  std::map<std::string, Entry>& entries() { return entries_; }
  const std::string& error() const { return error_; }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t value) override {
    return unexpected(absl::StrCat("the number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + text.substr(0, 40));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::Numbers) return unexpected(absl::StrCat("the number ", value));
    if (numbers().size() == kDimensionsMax) {
      return refuse(absl::StrCat("expected at most ", kDimensionsMax, " numbers in ", field_));
    }
    numbers().push_back(value);
    return true;
  }
  bool string(string_t& text) override {
    if (place_ == Place::Metadata) return true;
    if (place_ != Place::Field || field_ != "dtype") return unexpected("a string");
    entry_->dtype = text;
    place_ = Place::Tensor;
    return true;
  }
  bool start_object(size_t) override {
    switch (place_) {
      case Place::Start: place_ = Place::Top; return true;
      case Place::MetadataValue: place_ = Place::Metadata; return true;
      case Place::TensorValue: place_ = Place::Tensor; return true;
      default: return unexpected("an object");
    }
  }
  bool end_object() override {
    place_ = place_ == Place::Top ? Place::Start : Place::Top;
    return true;
  }
  bool start_array(size_t) override {
    if (place_ != Place::Field || field_ == "dtype") return unexpected("a list");
    place_ = Place::Numbers;
    return true;
  }
  bool end_array() override {
    place_ = Place::Tensor;
    return true;
  }
  bool key(string_t& name) override {
    if (place_ == Place::Top) return top_key(name);
    if (place_ == Place::Tensor) return tensor_key(name);
    return true;
  }
  bool parse_error(size_t position, const std::string&, const json::exception&) override {
    error_ = absl::StrCat("the header is not JSON at its byte ", position);
    return false;
  }

 private:
  // What has been read last; a value or a key is expected next.
  enum class Place : uint8_t {
    Start, Top, MetadataValue, Metadata, TensorValue, Tensor, Field, Numbers
  };

  bool top_key(const std::string& name) {
    if (name == "__metadata__") {
      if (std::exchange(has_metadata_, true)) return refuse("__metadata__ is there twice");
      name_.clear();
      place_ = Place::MetadataValue;
      return true;
    }
    name_ = name;
    const auto [at, fresh] = entries_.try_emplace(name);
    if (!fresh) return refuse("is there twice");
    entry_ = &at->second;
    place_ = Place::TensorValue;
    return true;
  }
  bool tensor_key(const std::string& name) {
    field_ = name;
    place_ = Place::Field;
    bool twice = false;
    if (name == "dtype") {
      twice = entry_->dtype.has_value();
    } else if (name == "shape") {
      twice = std::exchange(entry_->shape, std::vector<uint64_t>()).has_value();
    } else if (name == "data_offsets") {
      twice = std::exchange(entry_->offsets, std::vector<uint64_t>()).has_value();
    } else {
      return refuse(absl::StrCat("expected dtype, shape and data_offsets, found ", name));
    }
    return twice ? refuse(name + " is there twice") : true;
  }
  std::vector<uint64_t>& numbers() { return field_ == "shape" ? *entry_->shape : *entry_->offsets; }

  bool unexpected(const std::string& found) {
    switch (place_) {
      case Place::Start: return refuse("expected the header to be an object, found " + found);
      case Place::MetadataValue: return refuse("__metadata__: expected an object, found " + found);
      case Place::Metadata: return refuse("__metadata__: expected text only, found " + found);
      case Place::Numbers:
        return refuse(absl::StrCat(field_, ": expected whole numbers from 0 on, found ", found));
      case Place::Field:
        return refuse(absl::StrCat(field_, ": expected ",
                                   field_ == "dtype" ? "a string" : "a list", ", found ", found));
      default: return refuse("expected an object, found " + found);
    }
  }
  bool refuse(const std::string& message) {
    error_ = name_.empty() ? message : absl::StrCat("tensor ", name_, ": ", message);
    return false;
  }

  std::map<std::string, Entry> entries_;
  Entry* entry_ = nullptr;
  Place place_ = Place::Start;
  bool has_metadata_ = false;
  std::string name_, field_, error_;
};

struct Placed {
  uint64_t begin = 0, end = 0;
  const std::string* name = nullptr;
};

// One entry against the bytes it claims. `view.file` is set by the caller.
absl::Status check_entry(const Entry& entry, std::span<const std::byte> data, uint64_t data_offset,
                         TensorView& view) {
  const auto refuse = [](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (!entry.dtype || !entry.shape || !entry.offsets) {
    const char* missing = !entry.dtype ? "dtype" : !entry.shape ? "shape" : "data_offsets";
    return refuse(missing, " is missing");
  }
  const auto type = std::find_if(kTypes.begin(), kTypes.end(),
                                 [&](const TypeRow& row) { return *entry.dtype == row.name; });
  if (type == kTypes.end()) {
    return refuse("dtype: expected F64, F32, F16, BF16, I64, I32, I16, I8, U8 or BOOL, found ",
                  entry.dtype->substr(0, 40));
  }
  if (entry.offsets->size() != 2) {
    return refuse("data_offsets: expected 2 numbers, found ", entry.offsets->size());
  }
  const uint64_t begin = (*entry.offsets)[0], end = (*entry.offsets)[1];
  if (begin > end || end > data.size()) {
    return refuse("data_offsets: expected 0 <= begin <= end <= ", data.size(), ", found [", begin,
                  ", ", end, "]");
  }
  uint64_t bytes = type->bytes;
  bool overflow = false;
  for (const uint64_t dimension : *entry.shape) {
    overflow |= dimension > uint64_t(INT64_MAX);
    overflow |= __builtin_mul_overflow(bytes, dimension, &bytes) || bytes > uint64_t(INT64_MAX);
  }
  const std::string shape = absl::StrJoin(*entry.shape, ", ");
  if (overflow) return refuse("shape [", shape, "] is too large");
  if (bytes != end - begin) {
    return refuse("expected ", bytes, " bytes for ", type->name, " [", shape, "], found ",
                  end - begin);
  }
  if (bytes > 0 && (data_offset + begin) % type->bytes != 0) {
    return refuse("expected its data at a multiple of ", type->bytes, " bytes in the file, found ",
                  data_offset + begin);
  }
  view.type = type->type;
  view.shape.assign(entry.shape->begin(), entry.shape->end());
  view.data = data.subspan(begin, bytes);
  return absl::OkStatus();
}

// Every byte of the data belongs to one tensor.
std::string check_places(std::vector<Placed> places, uint64_t data_bytes) {
  std::sort(places.begin(), places.end(), [](const Placed& a, const Placed& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });
  uint64_t end = 0;
  for (const Placed& place : places) {
    if (place.begin != end) {
      return absl::StrCat("tensor ", *place.name, ": ",
                          place.begin < end ? "overlaps another" : "leaves a hole before it",
                          ": expected its data at ", end, ", found ", place.begin);
    }
    end = place.end;
  }
  if (end == data_bytes) return "";
  return absl::StrCat("expected ", end, " bytes of tensors, found ", data_bytes);
}

}  // namespace

const char* name(TensorType type) { return kTypes[size_t(type)].name; }
size_t size_of(TensorType type) { return kTypes[size_t(type)].bytes; }

int64_t TensorView::elements() const {
  int64_t count = 1;
  for (const int64_t dimension : shape) count *= dimension;
  return count;
}

absl::StatusOr<std::map<std::string, TensorView>> parse_safetensors(
    std::span<const std::byte> file, const std::string& path) {
  const auto refuse = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", parts...));
  };
  if (file.size() < kLengthBytes) {
    return refuse("expected at least ", kLengthBytes, " bytes, found ", file.size());
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > std::min<uint64_t>(file.size() - kLengthBytes, kHeaderBytesMax)) {
    return refuse("expected a header of at most ", kHeaderBytesMax, " bytes inside a file of ",
                  file.size(), ", found a header of ", header_bytes);
  }
  const char* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  HeaderReader header;
  if (!json::sax_parse(text, text + header_bytes, &header)) return refuse(header.error());

  const std::span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);
  std::map<std::string, TensorView> tensors;
  std::vector<Placed> places;
  for (const auto& [name, entry] : header.entries()) {
    TensorView view;
    view.file = &path;
    const absl::Status status = check_entry(entry, data, kLengthBytes + header_bytes, view);
    if (!status.ok()) return refuse("tensor ", name, ": ", std::string(status.message()));
    const auto at = tensors.emplace(name, std::move(view)).first;
    places.push_back({(*entry.offsets)[0], (*entry.offsets)[1], &at->first});
  }
  const std::string misplaced = check_places(std::move(places), data.size());
  if (!misplaced.empty()) return refuse(misplaced);
  return tensors;
}

}  // namespace weir
