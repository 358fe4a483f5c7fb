#pragma once
#include <cstddef>
#include <cstdint>

namespace weir {

using Token = int32_t;
using Slot = int32_t;

inline constexpr int32_t kPadding = -1;  // the slot of a row that no sequence fills

enum class DType : uint8_t { F32, BF16, F16 };
constexpr size_t size_of(DType dtype) { return dtype == DType::F32 ? 4 : 2; }

// Activations, float32, one vector a token: token t's begins at data + t * stride.
struct Acts {
  float* data = nullptr;
  int64_t stride = 0;

  float* at(int64_t token) const { return data + token * stride; }
  // The same vectors from a later column on. No vectors stay none: a step is also lowered without
  // memory, to measure it.
  Acts from(int64_t offset) const { return {data == nullptr ? nullptr : data + offset, stride}; }
  explicit operator bool() const { return data != nullptr; }
};

// A weight matrix as the checkpoint stores it, [rows, cols] row-major; y = W x.
struct Matrix {
  const void* data = nullptr;
  int32_t rows = 0, cols = 0;
  DType dtype = DType::F32;

  size_t bytes() const { return size_t(rows) * size_t(cols) * size_of(dtype); }
  explicit operator bool() const { return rows > 0; }  // also for a shape without data
};

// The rows of a step: each row is a run of consecutive tokens of one sequence. All tokens of a
// step lie end to end; row r owns tokens begin[r] .. begin[r + 1] - 1. Pointers are the device's.
struct Rows {
  int32_t count = 0;                // rows, padding rows included
  int32_t tokens = 0;               // tokens of all rows
  const int32_t* slot = nullptr;    // [count]; kPadding rows touch nothing
  const int32_t* first = nullptr;   // [count] position of the first token; 0: from a zero state
  const int32_t* begin = nullptr;   // [count + 1]
  const int32_t* written = nullptr; // [count], read by ops with pending updates (pending.h)
  bool computed = false;            // an op of the same step writes first and begin
  // What the host knows of the rows that sequences fill; -1: nothing.
  int32_t singles = -1;             // those of one token are among so many first ones
  int32_t longer = -1;              // so many have more than one token, at most
};

// Where one op's part of the slots lies: slot s's part begins at data + s * stride (floats).
struct SlotState {
  float* data = nullptr;
  int64_t stride = 0;

  float* at(Slot slot) const { return data + int64_t(slot) * stride; }
  SlotState from(int64_t offset) const {
    return {data == nullptr ? nullptr : data + offset, stride};
  }
};

// An elementwise function. EluPlusOne is elu(x) + 1; GeluTanh the tanh form of gelu.
enum class Activation : uint8_t {
  None, Silu, Sigmoid, Relu, EluPlusOne, LogSigmoid, ReluSquared, GeluTanh, Tanh
};

}  // namespace weir
