#pragma once

namespace weir {

// Prints and aborts. For broken code or a broken device, never for a bad request or file.
[[noreturn]] void die(const char* file, int line, const char* what);
// Prints and ends the program with exit code 1, as a start that fails does: for what the machine
// does not have enough of.
[[noreturn]] void give_up(const char* what);

}  // namespace weir

#define WEIR_CHECK(condition)                                       \
  do {                                                              \
    if (!(condition)) ::weir::die(__FILE__, __LINE__, #condition);  \
  } while (0)
#define WEIR_UNREACHABLE(why) ::weir::die(__FILE__, __LINE__, why)
