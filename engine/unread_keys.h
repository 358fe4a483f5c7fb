#pragma once
#include <set>
#include <string>
#include <vector>

#include "engine/json.h"

namespace weir {

// The keys of a config.json that nothing asked for and that are not known to be without meaning for
// inference: misspelt ones, or those of another type of model. `asked` has the keys
// that were asked for, those of objects within as "attn.window_size". In the order of the names.
std::vector<std::string> unread_keys(const nlohmann::json& config,
                                     const std::set<std::string>& asked);

}  // namespace weir
