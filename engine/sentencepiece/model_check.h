#pragma once
#include <string>
#include <string_view>

namespace weir::sentencepiece_plugin {

// What is wrong with the bytes of a sentencepiece model that sentencepiece itself would follow
// out of bounds, or fail on only when a text comes; empty when nothing is.
std::string model_flaw(std::string_view bytes);

}  // namespace weir::sentencepiece_plugin
