#include "kernels/check.h"

#include <cstdio>
#include <cstdlib>

namespace weir {

void die(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
  std::abort();
}

void give_up(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::_Exit(1);
}

}  // namespace weir
