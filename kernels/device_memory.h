#pragma once
#include <cstddef>
#include <string>

namespace weir::cuda {

// Memory of the current device, the caller's until cudaFree. Where it has no room the program ends
// with exit code 1, as a start that fails does, and says how much was asked for and what is free.
void* device_memory(size_t bytes);

// Ends the program so, for what takes memory of the device by itself.
[[noreturn]] void no_room(const std::string& what);

}  // namespace weir::cuda
