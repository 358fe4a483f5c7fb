#include "clients/convert/pickle.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "clients/convert/pickle_classes.h"

namespace weir {
namespace {

// A checkpoint's arguments and tensor list are a few hundred KiB, a distributed checkpoint's
// metadata some MiB. A value takes about 100 bytes of memory, a byte of a pickle makes at most one.
constexpr size_t kPickleBytesMax = 256 << 20, kValuesMax = 1 << 23;
// Python's own pickler stops at nesting of about this depth.
constexpr size_t kMarksMax = 1024;
constexpr size_t kDimensionsMax = 8;

// Opcodes and their operands: Python's pickletools.py. Each handler finds its operand at at_.
class PickleMachine {
 public:
  PickleMachine(std::span<const std::byte> bytes, const std::string& path)
      : bytes_(reinterpret_cast<const char*>(bytes.data()), bytes.size()), path_(path) {}

  absl::StatusOr<Pickle> run() {
    if (bytes_.size() > kPickleBytesMax) {
      refuse(absl::StrCat("expected at most ", kPickleBytesMax, " bytes, found ", bytes_.size()));
    }
    const std::array<Handler, 256> handlers = opcode_handlers();
    while (error_.empty() && pickle_.root == nullptr) {
      opcode_at_ = at_;
      const auto opcode = uint8_t(take<char>());
      if (!error_.empty()) break;
      const Handler handler = handlers[opcode];
      if (handler == nullptr) {
        refuse(absl::StrCat("the opcode 0x", absl::Hex(opcode, absl::kZeroPad2),
                            " is not one that torch writes"));
        break;
      }
      (this->*handler)();
    }
    if (!error_.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": pickle, byte ", opcode_at_, ": ", error_));
    }
    return std::move(pickle_);
  }

 private:
  using Handler = void (PickleMachine::*)();
  using Items = std::vector<const Value*>;

  static std::array<Handler, 256> opcode_handlers();

  void refuse(const std::string& why) {
    if (error_.empty()) error_ = why;
  }

  // --- operands; after the end they are zero or empty, and the pickle is refused ---
  std::string_view take_bytes(uint64_t count) {
    if (count > bytes_.size() - at_) {
      refuse(absl::StrCat("cut short: expected ", count, " bytes more, found ",
                          bytes_.size() - at_));
      return {};
    }
    const std::string_view taken = bytes_.substr(at_, size_t(count));
    at_ += size_t(count);
    return taken;
  }
  template <class T>
  T take() {
    T value{};
    const std::string_view taken = take_bytes(sizeof value);
    if (!taken.empty()) std::memcpy(&value, taken.data(), sizeof value);
    return value;
  }
  std::string_view take_line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) {
      refuse("cut short: expected a line");
      return {};
    }
    const std::string_view line = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return line;
  }

  // --- the stack ---
  template <class T>
  Value* make(T data) {
    if (pickle_.values.size() >= kValuesMax) {
      refuse(absl::StrCat("more than ", kValuesMax, " values"));
      return &none_;
    }
    return &pickle_.values.emplace_back(Value{std::move(data)});
  }
  void push(Value* value) { stack_.push_back(value); }
  template <class T>
  void push_new(T data) { push(make(std::move(data))); }

  // How many values stand above the last mark.
  size_t height() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  Value* top() {
    if (height() > 0) return stack_.back();
    refuse("the stack is empty");
    return &none_;
  }
  Value* pop() {
    Value* value = top();
    if (height() > 0) stack_.pop_back();
    return value;
  }
  Items pop_items(size_t count) {
    if (height() < count) {
      refuse("the stack is empty");
      return {};
    }
    Items items(stack_.end() - ptrdiff_t(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return items;
  }
  Items pop_to_mark() {
    if (marks_.empty()) {
      refuse("there is no mark");
      return {};
    }
    Items items = pop_items(height());
    marks_.pop_back();
    return items;
  }

  // --- one handler an opcode, or a group that differs in its operand ---
  void protocol() {
    const auto version = take<uint8_t>();
    if (version < 2 || version > 5) {
      refuse(absl::StrCat("expected protocol 2 to 5, found ", int(version)));
    }
  }
  void frame() { take<uint64_t>(); }  // how much to read ahead: nothing for a file in memory
  void stop() {
    const Value* value = pop();
    if (!stack_.empty() || !marks_.empty()) refuse("values are left over at the end");
    if (at_ != bytes_.size()) refuse("expected to end here");
    pickle_.root = value;
  }
  void mark() {
    if (marks_.size() >= kMarksMax) {
      return refuse(absl::StrCat("nested deeper than ", kMarksMax, " levels"));
    }
    marks_.push_back(stack_.size());
  }
  void pop_one() { pop(); }
  void pop_mark() { pop_to_mark(); }

  void none() { push_new(None{}); }
  void yes() { push_new(true); }
  void no() { push_new(false); }
  template <class T>
  void integer() { push_new(int64_t(take<T>())); }
  template <class Length>
  void long_integer() {  // two's complement, the lowest byte first
    const std::string_view digits = take_bytes(take<Length>());
    if (digits.size() > 8) return push_new(LongInteger{});
    uint64_t value = !digits.empty() && int8_t(digits.back()) < 0 ? UINT64_MAX : 0;
    if (!digits.empty()) std::memcpy(&value, digits.data(), digits.size());
    push_new(int64_t(value));
  }
  void real() {  // the highest byte first
    const auto bits = __builtin_bswap64(take<uint64_t>());
    push_new(std::bit_cast<double>(bits));
  }
  template <class Length>
  void text() { push_new(Text{take_bytes(take<Length>())}); }
  template <class Length>
  void byte_string() { push_new(Bytes{take_bytes(take<Length>())}); }

  template <class Container>
  void empty() { push_new(Container{}); }
  template <size_t kCount>
  void tuple() { push_new(Tuple{pop_items(kCount)}); }
  void tuple_to_mark() { push_new(Tuple{pop_to_mark()}); }
  void frozen_set() { push_new(Set{pop_to_mark()}); }

  void append() { append_all(pop_items(1)); }
  void appends() { append_all(pop_to_mark()); }
  void append_all(const Items& items) {
    Value* target = top();
    auto* list = std::get_if<List>(&target->data);
    if (auto* object = std::get_if<Object>(&target->data)) list = &object->items;
    if (list == nullptr) return refuse("a list's items are given to " + describe(target));
    list->items.insert(list->items.end(), items.begin(), items.end());
  }
  void add_items() {
    const Items items = pop_to_mark();
    Value* target = top();
    auto* set = std::get_if<Set>(&target->data);
    if (set == nullptr) return refuse("a set's items are given to " + describe(target));
    set->items.insert(set->items.end(), items.begin(), items.end());
  }
  void set_item() { set_all(pop_items(2)); }
  void set_items() { set_all(pop_to_mark()); }
  void set_all(const Items& items) {
    Value* target = top();
    auto* dict = std::get_if<Dict>(&target->data);
    if (auto* object = std::get_if<Object>(&target->data)) dict = &object->entries;
    if (dict == nullptr) return refuse("a dict's items are given to " + describe(target));
    if (items.size() % 2 != 0) return refuse("a dict's key without a value");
    for (size_t i = 0; i < items.size(); i += 2) dict->items.emplace_back(items[i], items[i + 1]);
  }

  template <class Index>
  void put() { memo_[take<Index>()] = top(); }
  void memoize() { memo_[uint32_t(memo_.size())] = top(); }
  template <class Index>
  void get() {
    const auto at = memo_.find(take<Index>());
    if (at == memo_.end()) return refuse("the memo has no such value");
    push(at->second);
  }

  void global() {
    const std::string_view module = take_line(), name = take_line();
    push_class(module, name);
  }
  void stack_global() {
    const Value* name = pop();
    const Value* module = pop();
    if (!as<Text>(name) || !as<Text>(module)) return refuse("a class's name is not a text");
    push_class(as<Text>(module)->bytes, as<Text>(name)->bytes);
  }
  void push_class(std::string_view module, std::string_view name) {
    Value* value = make(ClassName{std::string(module) + "." + std::string(name)});
    const ClassName* class_name = as<ClassName>(value);
    if (class_name != nullptr && !pickle_class(class_name->name)) {
      refuse(describe(value) + " is not one that a checkpoint may name; nothing was executed");
    }
    push(value);
  }

  void persistent() {
    const std::span<const Value* const> id = items_of(pop());
    const Text* kind = id.size() == 5 ? as<Text>(id[0]) : nullptr;
    if (kind == nullptr || kind->bytes != "storage") return refuse("expected a storage's id");
    const ClassName* type = as<ClassName>(id[1]);
    const Text* key = as<Text>(id[2]);
    const int64_t* elements = as<int64_t>(id[4]);
    const auto dtype = type ? storage_type(type->name) : std::nullopt;
    if (!dtype) return refuse("a storage's type: expected a storage class, found " +
                              describe(id[1]));
    if (key == nullptr || elements == nullptr || *elements < 0) {
      return refuse("a storage's id: expected a name and a count");
    }
    push_new(StorageReference{.type = *dtype, .key = key->bytes, .elements = *elements});
  }

  void new_object() {
    const Value* arguments = pop();
    construct(pop(), arguments);
  }
  void new_object_with_keywords() {
    const Value* keywords = pop();
    const Dict* dict = as<Dict>(keywords);
    if (dict == nullptr || !dict->items.empty()) refuse("expected no keyword arguments");
    new_object();
  }
  void construct(const Value* callable, const Value* arguments);
  void make_tensor(std::span<const Value* const> arguments);

  void build() {
    const Value* state = pop();
    Value* target = top();
    if (auto* object = std::get_if<Object>(&target->data)) {
      object->state = state;
    } else if (!as<Dict>(target)) {  // an OrderedDict's attributes mean nothing here
      refuse("a state is given to " + describe(target));
    }
  }

  std::string_view bytes_;
  const std::string& path_;
  size_t at_ = 0, opcode_at_ = 0;
  Pickle pickle_;
  std::vector<Value*> stack_;
  std::vector<size_t> marks_;               // the stack's height at each mark
  std::unordered_map<uint32_t, Value*> memo_;
  Value none_{None{}};                      // stands for what is missing, once refused
  std::string error_;
};

void PickleMachine::construct(const Value* callable, const Value* arguments) {
  const ClassName* name = as<ClassName>(callable);
  if (name == nullptr) return refuse("expected a class to make a value of, found " +
                                     describe(callable));
  if (!as<Tuple>(arguments)) return refuse("expected a tuple of arguments, found " +
                                           describe(arguments));
  const std::span<const Value* const> items = items_of(arguments);
  switch (*pickle_class(name->name)) {
    case PickleClass::Opaque:
      return push_new(Object{.class_name = name->name, .arguments = arguments});
    case PickleClass::Dict:
      return items.empty() ? push_new(Dict{}) : refuse("an OrderedDict: expected no arguments");
    case PickleClass::Tuple: {
      const Tuple* sizes = items.size() == 1 ? as<Tuple>(items[0]) : nullptr;
      return sizes ? push_new(Tuple(*sizes)) : refuse("a torch.Size: expected a tuple");
    }
    case PickleClass::Tensor: return make_tensor(items);
    case PickleClass::Parameter: {
      const auto* tensor = items.empty() ? nullptr : as<TensorReference>(items[0]);
      return tensor ? push_new(TensorReference(*tensor)) : refuse("a parameter: expected a tensor");
    }
    case PickleClass::Storage:
    case PickleClass::Dtype: return refuse("expected a class to make a value of, found " +
                                           describe(callable));
  }
}

// _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])
void PickleMachine::make_tensor(std::span<const Value* const> arguments) {
  TensorReference tensor;
  const int64_t* offset = arguments.size() >= 6 ? as<int64_t>(arguments[1]) : nullptr;
  if (offset == nullptr || *offset < 0) return refuse("a tensor: expected a storage and an offset");
  tensor.storage = as<StorageReference>(arguments[0]);
  if (tensor.storage == nullptr) {
    return refuse("a tensor: expected a storage, found " + describe(arguments[0]));
  }
  tensor.offset = *offset;
  if (!as_shape(arguments[2], tensor.shape) || !as_shape(arguments[3], tensor.stride) ||
      tensor.shape.size() != tensor.stride.size() || tensor.shape.size() > kDimensionsMax) {
    return refuse(absl::StrCat("a tensor: expected a size and a stride of at most ",
                               kDimensionsMax, " dimensions"));
  }
  push_new(std::move(tensor));
}

std::array<PickleMachine::Handler, 256> PickleMachine::opcode_handlers() {
  using M = PickleMachine;
  struct Opcode {
    uint8_t code;
    Handler handler;
  };
  const Opcode opcodes[] = {
      {0x80, &M::protocol}, {0x95, &M::frame}, {'.', &M::stop},
      {'(', &M::mark}, {'0', &M::pop_one}, {'1', &M::pop_mark},
      {'N', &M::none}, {0x88, &M::yes}, {0x89, &M::no},
      {'J', &M::integer<int32_t>}, {'K', &M::integer<uint8_t>}, {'M', &M::integer<uint16_t>},
      {0x8a, &M::long_integer<uint8_t>}, {0x8b, &M::long_integer<uint32_t>}, {'G', &M::real},
      {0x8c, &M::text<uint8_t>}, {'X', &M::text<uint32_t>}, {0x8d, &M::text<uint64_t>},
      {'C', &M::byte_string<uint8_t>}, {'B', &M::byte_string<uint32_t>},
      {0x8e, &M::byte_string<uint64_t>}, {0x96, &M::byte_string<uint64_t>},
      {']', &M::empty<List>}, {')', &M::empty<Tuple>}, {'}', &M::empty<Dict>},
      {0x8f, &M::empty<Set>}, {0x85, &M::tuple<1>}, {0x86, &M::tuple<2>}, {0x87, &M::tuple<3>},
      {'t', &M::tuple_to_mark}, {0x91, &M::frozen_set},
      {'a', &M::append}, {'e', &M::appends}, {0x90, &M::add_items},
      {'s', &M::set_item}, {'u', &M::set_items},
      {'q', &M::put<uint8_t>}, {'r', &M::put<uint32_t>}, {0x94, &M::memoize},
      {'h', &M::get<uint8_t>}, {'j', &M::get<uint32_t>},
      {'c', &M::global}, {0x93, &M::stack_global}, {'Q', &M::persistent},
      {'R', &M::new_object}, {0x81, &M::new_object}, {0x92, &M::new_object_with_keywords},
      {'b', &M::build},
  };
  std::array<Handler, 256> handlers{};
  for (const Opcode& opcode : opcodes) handlers[opcode.code] = opcode.handler;
  return handlers;
}

}  // namespace

absl::StatusOr<Pickle> read_pickle(std::span<const std::byte> bytes, const std::string& path) {
  return PickleMachine(bytes, path).run();
}

}  // namespace weir
