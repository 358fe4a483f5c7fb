#include "kernels/check.h"

#include <cstdio>
#include <cstdlib>

namespace weir {

void die(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
  std::abort();
}

}  // namespace weir
