#include "kernels/cpu.h"

namespace weir::cpu {

void run(const Attention& op, const Context& context) { run_fast(op, context); }

}  // namespace weir::cpu
