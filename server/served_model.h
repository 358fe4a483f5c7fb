#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "engine/limits.h"
#include "engine/spec.h"
#include "engine/tokenizer.h"

namespace weir {

// What is served, for whoever checks requests against it or describes it. Constant while the
// server runs; main owns what it refers to.
struct ServedModel {
  std::string name;
  const ModelSpec& spec;
  const Tokenizer& tokenizer;
  Limits limits;
  StateSize state;
  std::string weights_dtype;
  size_t weights_bytes = 0;
  std::string weights_fingerprint;
  std::string device;
  size_t receive_bytes = 0;  // largest request message
  size_t text_bytes = SIZE_MAX;  // longest text worth tokenizing: text_bytes_max()

  // Ids that stand for a piece of text. A vocabulary may be padded beyond them; clients may not
  // use the padding.
  int32_t token_ids() const { return std::min(spec.vocab, tokenizer.size()); }
};

// The bytes that a prompt of the longest length can have, were all its tokens the longest piece.
// What is longer is refused before the work of tokenizing it.
inline size_t text_bytes_max(const Tokenizer& tokenizer, const Limits& limits) {
  size_t longest = 1;
  for (Token id = 0; id < tokenizer.size(); ++id) {
    longest = std::max(longest, tokenizer.bytes(id, false).size());
  }
  return longest * size_t(limits.prompt_tokens);
}

// Bounds of a request that are not the engine's.
inline constexpr int32_t kStopStringsMax = 16;
inline constexpr int32_t kStopStringBytesMax = 256;
inline constexpr int32_t kStopTokenIdsMax = 64;
inline constexpr int32_t kLogitBiasMax = 1024;
inline constexpr int32_t kChunkTokensMax = 1024;
inline constexpr int32_t kLabelBytesMax = 256;  // request_id, tenant
inline constexpr int32_t kNewTokensByDefault = 256;

}  // namespace weir
