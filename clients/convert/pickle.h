#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace weir {

// What a pickle describes, as data: nothing of it is ever called or imported. Values refer to each
// other as the pickle's memo makes them, also in cycles; whoever walks them must expect that.
struct Value;

struct None {};
struct Text { std::string_view bytes; };    // UTF-8 as written, unchecked
struct Bytes { std::string_view bytes; };
struct LongInteger {};                      // beyond 64 bits: its value is not kept
struct ClassName { std::string name; };     // "module.name" of a class, function or dtype
struct Tuple { std::vector<const Value*> items; };
struct List { std::vector<const Value*> items; };
struct Set { std::vector<const Value*> items; };
struct Dict { std::vector<std::pair<const Value*, const Value*>> items; };  // in the order written

// An instance of a class that is known by name: made from `arguments`, then given `state`.
struct Object {
  std::string_view class_name;              // of the ClassName value it was made from
  const Value* arguments = nullptr;         // a Tuple
  const Value* state = nullptr;             // null: none was given
  Dict entries;                             // of a mapping
  List items;                               // of a sequence
};

// torch.storage: the elements that tensors are views of, by the name of the archive's entry.
struct StorageReference {
  TensorType type = TensorType::U8;
  std::string_view key;
  int64_t elements = 0;
};
struct TensorReference {
  const StorageReference* storage = nullptr;
  int64_t offset = 0;                       // elements
  std::vector<int64_t> shape, stride;       // elements; as many of the one as of the other
};

struct Value {
  std::variant<None, bool, int64_t, double, LongInteger, Text, Bytes, ClassName, Tuple, List, Set,
               Dict, Object, StorageReference, TensorReference>
      data;
};

// Values live as long as the Pickle and the bytes it was read from.
struct Pickle {
  std::deque<Value> values;                 // never moved: they refer to each other
  const Value* root = nullptr;
};

// Interprets the opcodes that pickle's protocols 2 to 5 and torch.save write; any other opcode, a
// class that a checkpoint has no use for, a persistent id that is no storage, and counts beyond
// the limits are refused, naming `path`, the byte and what was found. Borrows `bytes`.
absl::StatusOr<Pickle> read_pickle(std::span<const std::byte> bytes, const std::string& path);

// --- reading values; all accept null and then find nothing ---

template <class T>
const T* as(const Value* value) {
  return value ? std::get_if<T>(&value->data) : nullptr;
}
// The items of a tuple or a list, and none for anything else.
std::span<const Value* const> items_of(const Value* value);
// The value at a text key: of a dict, or of an object's state that is a dict. The last one counts.
const Value* find(const Value* value, std::string_view key);
// Every item an integer that is not negative: a shape.
bool as_shape(const Value* value, std::vector<int64_t>& shape);
// The element type of a dtype's name, "torch.bfloat16"; false: not one that safetensors has.
bool as_dtype(const Value* value, TensorType& type);
// For messages: "the text \"x\"", "an object of argparse.Namespace", "None".
std::string describe(const Value* value);

}  // namespace weir
