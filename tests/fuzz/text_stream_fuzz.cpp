#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/unit/text_stream_model.h"

// Any bytes, cut anywhere, with any stop strings: the stream gives what decoding and searching the
// whole at once gives, in whole characters.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace weir::text_stream_model;
  const std::string flaw =
      disagreement(read_case({reinterpret_cast<const char*>(data), size}));
  if (!flaw.empty()) {
    std::fprintf(stderr, "%s\n", flaw.c_str());
    std::abort();
  }
  return 0;
}
