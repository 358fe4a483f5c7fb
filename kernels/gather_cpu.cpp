#include <cstring>

#include "kernels/cpu.h"

namespace weir::cpu {

void run(const Gather& op, const Context&) {
  for (int64_t i = 0; i < op.count; ++i) {
    std::memcpy(op.out.at(i), op.in.at(op.index[i]), size_t(op.dim) * sizeof(float));
  }
}

}  // namespace weir::cpu
