#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "clients/convert/pickle.h"
#include "clients/convert/pickle_classes.h"

namespace weir {
namespace {

constexpr size_t kDescriptionMax = 80;

std::string printable(std::string_view text) {
  const std::string start(text.substr(0, kDescriptionMax));
  return absl::StrCat(absl::Utf8SafeCHexEscape(start), start.size() < text.size() ? "…" : "");
}

}  // namespace

std::span<const Value* const> items_of(const Value* value) {
  if (const Tuple* tuple = as<Tuple>(value)) return tuple->items;
  if (const List* list = as<List>(value)) return list->items;
  return {};
}

const Value* find(const Value* value, std::string_view key) {
  if (const Object* object = as<Object>(value)) value = object->state;
  const Dict* dict = as<Dict>(value);
  if (dict == nullptr) return nullptr;
  for (auto entry = dict->items.rbegin(); entry != dict->items.rend(); ++entry) {
    const Text* text = as<Text>(entry->first);
    if (text != nullptr && text->bytes == key) return entry->second;
  }
  return nullptr;
}

bool as_shape(const Value* value, std::vector<int64_t>& shape) {
  if (!as<Tuple>(value) && !as<List>(value)) return false;
  shape.clear();
  for (const Value* item : items_of(value)) {
    const int64_t* size = as<int64_t>(item);
    if (size == nullptr || *size < 0) return false;
    shape.push_back(*size);
  }
  return true;
}

bool as_dtype(const Value* value, TensorType& type) {
  const ClassName* name = as<ClassName>(value);
  const auto known = name ? dtype_type(name->name) : std::nullopt;
  if (known) type = *known;
  return known.has_value();
}

std::string describe(const Value* value) {
  if (value == nullptr) return "nothing";
  struct Description {
    std::string operator()(const None&) const { return "None"; }
    std::string operator()(bool truth) const { return truth ? "True" : "False"; }
    std::string operator()(int64_t number) const { return absl::StrCat(number); }
    std::string operator()(double number) const { return absl::StrCat(number); }
    std::string operator()(const LongInteger&) const { return "an integer beyond 64 bits"; }
    std::string operator()(const Text& text) const {
      return absl::StrCat("the text \"", printable(text.bytes), "\"");
    }
    std::string operator()(const Bytes& bytes) const {
      return absl::StrCat(bytes.bytes.size(), " bytes");
    }
    std::string operator()(const ClassName& name) const {
      return absl::StrCat("the class ", printable(name.name));
    }
    std::string operator()(const Tuple&) const { return "a tuple"; }
    std::string operator()(const List&) const { return "a list"; }
    std::string operator()(const Set&) const { return "a set"; }
    std::string operator()(const Dict&) const { return "a dict"; }
    std::string operator()(const Object& object) const {
      return absl::StrCat("an object of ", printable(object.class_name));
    }
    std::string operator()(const StorageReference&) const { return "a storage"; }
    std::string operator()(const TensorReference&) const { return "a tensor"; }
  };
  return std::visit(Description(), value->data);
}

}  // namespace weir
