#include <cstdint>
#include <cstdio>
#include <string>

#include "engine/tokenizer_impl.h"
#include "kernels/check.h"

namespace {

std::string all_bytes() {
  std::string lines;
  for (int byte = 0; byte < 256; ++byte) {
    char line[32];
    std::snprintf(line, sizeof line, "%d b'\\x%02x' 1\n", byte + 1, unsigned(byte));
    lines += line;
  }
  return lines;
}

}  // namespace

// Any lines after those of the 256 bytes: refused, or a vocabulary that cuts and gives back all
// bytes there are, here the lines themselves.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string kBytes = all_bytes();
  const std::string lines(reinterpret_cast<const char*>(data), size);
  const auto vocabulary = weir::open_rwkv_vocabulary("fuzz", kBytes + lines);
  if (!vocabulary.ok()) {
    WEIR_CHECK(vocabulary.status().message().find("fuzz:") == 0);
    return 0;
  }
  std::string text;
  int64_t at = 0;
  for (const weir::Tokenizer::Impl::Span& span : (*vocabulary)->encode(lines)) {
    WEIR_CHECK(span.begin == at && span.end > at);
    at = span.end;
    text += (*vocabulary)->entries[size_t(span.id)].bytes;
  }
  WEIR_CHECK(text == lines);
  return 0;
}
