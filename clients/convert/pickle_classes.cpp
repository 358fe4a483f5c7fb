#include "clients/convert/pickle_classes.h"

#include <algorithm>
#include <iterator>

namespace weir {
namespace {

struct TypeNames {
  std::string_view storage, dtype;
  TensorType type;
};
constexpr TypeNames kTypes[] = {
    {"torch.DoubleStorage", "torch.float64", TensorType::F64},
    {"torch.FloatStorage", "torch.float32", TensorType::F32},
    {"torch.HalfStorage", "torch.float16", TensorType::F16},
    {"torch.BFloat16Storage", "torch.bfloat16", TensorType::BF16},
    {"torch.LongStorage", "torch.int64", TensorType::I64},
    {"torch.IntStorage", "torch.int32", TensorType::I32},
    {"torch.ShortStorage", "torch.int16", TensorType::I16},
    {"torch.CharStorage", "torch.int8", TensorType::I8},
    {"torch.ByteStorage", "torch.uint8", TensorType::U8},
    {"torch.BoolStorage", "torch.bool", TensorType::BOOL},
};

struct NamedClass {
  std::string_view name;
  PickleClass meaning;
};
constexpr NamedClass kClasses[] = {
    {"collections.OrderedDict", PickleClass::Dict},
    {"torch.Size", PickleClass::Tuple},
    {"torch._utils._rebuild_tensor_v2", PickleClass::Tensor},
    {"torch._utils._rebuild_parameter", PickleClass::Parameter},
    {"torch._utils._rebuild_parameter_with_state", PickleClass::Parameter},
    {"argparse.Namespace", PickleClass::Opaque},
    {"types.SimpleNamespace", PickleClass::Opaque},
    {"collections.defaultdict", PickleClass::Opaque},
    {"collections.deque", PickleClass::Opaque},
    // Protocol 2 keeps bytes as text and says how to encode it.
    {"_codecs.encode", PickleClass::Opaque},
    {"_io.BytesIO", PickleClass::Opaque},
    {"datetime.timedelta", PickleClass::Opaque},
    {"pathlib.PosixPath", PickleClass::Opaque},
    {"signal.Signals", PickleClass::Opaque},
    {"torch.device", PickleClass::Opaque},
    {"torch.serialization._get_layout", PickleClass::Opaque},
    // A random generator's state.
    {"numpy.ndarray", PickleClass::Opaque},
    {"numpy.dtype", PickleClass::Opaque},
    {"numpy.core.multiarray._reconstruct", PickleClass::Opaque},
    {"numpy.core.multiarray.scalar", PickleClass::Opaque},
    {"numpy._core.multiarray._reconstruct", PickleClass::Opaque},
    {"numpy._core.multiarray.scalar", PickleClass::Opaque},
};

// Modules whose classes this program looks into by name (the first two, of .metadata as torch 2.0
// and later write it) or not at all: what Megatron keeps in its arguments and beside them.
constexpr std::string_view kOpaqueModules[] = {
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.sharded_tensor.metadata.",
    "megatron.",
    "transformer_engine.",
    "torch.nn.functional.",
    "torch._C._nn.",
};
// getattr is how Python 3.11 writes an enum's member: getattr(Class, "name").
constexpr std::string_view kBuiltins[] = {"bool", "bytearray", "bytes", "complex", "dict",
                                          "float", "frozenset", "getattr", "int", "list",
                                          "object", "set", "slice", "str", "tuple"};

template <class Range, class Predicate>
auto find_in(const Range& range, Predicate predicate) {
  const auto at = std::ranges::find_if(range, predicate);
  return at == std::end(range) ? nullptr : &*at;
}

}  // namespace

std::optional<PickleClass> pickle_class(std::string_view name) {
  if (const auto* known = find_in(kClasses, [&](const auto& row) { return row.name == name; })) {
    return known->meaning;
  }
  if (storage_type(name)) return PickleClass::Storage;
  if (dtype_type(name)) return PickleClass::Dtype;
  for (const std::string_view module : kOpaqueModules) {
    if (name.starts_with(module)) return PickleClass::Opaque;
  }
  for (const std::string_view module : {"builtins.", "__builtin__."}) {
    if (!name.starts_with(module)) continue;
    const std::string_view type = name.substr(module.size());
    if (find_in(kBuiltins, [&](std::string_view known) { return known == type; })) {
      return PickleClass::Opaque;
    }
  }
  return {};
}

std::optional<TensorType> storage_type(std::string_view class_name) {
  const auto* row = find_in(kTypes, [&](const auto& row) { return row.storage == class_name; });
  return row ? std::optional(row->type) : std::nullopt;
}

std::optional<TensorType> dtype_type(std::string_view name) {
  const auto* row = find_in(kTypes, [&](const auto& row) { return row.dtype == name; });
  return row ? std::optional(row->type) : std::nullopt;
}

}  // namespace weir
