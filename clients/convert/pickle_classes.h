#pragma once
#include <optional>
#include <string_view>

#include "engine/safetensors.h"

namespace weir {

// What the pickle machine does with the instances of a class or the results of a function.
enum class PickleClass {
  Opaque,     // kept as an Object; for what this program does not look into
  Dict,       // collections.OrderedDict
  Tuple,      // torch.Size: its one argument
  Tensor,     // torch._utils._rebuild_tensor_v2
  Parameter,  // torch._utils._rebuild_parameter: its first argument
  Storage,    // torch.BFloat16Storage: only in a persistent id
  Dtype,      // torch.bfloat16: a value, not made of anything
};

// The classes and functions a checkpoint may name; nothing: it is refused. `name` is
// "module.name". They are names only: nothing is imported or called for any of them.
std::optional<PickleClass> pickle_class(std::string_view name);

// "torch.BFloat16Storage" to BF16, "torch.bfloat16" to BF16.
std::optional<TensorType> storage_type(std::string_view class_name);
std::optional<TensorType> dtype_type(std::string_view name);

}  // namespace weir
