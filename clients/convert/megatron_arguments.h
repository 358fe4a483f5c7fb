#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/convert/pickle.h"

namespace weir {

// What the tensors are to be read by, from the arguments that Megatron was started with.
struct MegatronArguments {
  int64_t layers = 0, hidden = 0, ffn_hidden = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;         // softmax layers
  double rope_theta = 500000, norm_eps = 1e-5;
  bool gain_plus_one = false;                            // norms store the gain minus one
  bool tied_embeddings = false;

  std::string mixer;                                     // delta, gdn, kda, gdn2, linear; "": none
  bool torch_variant = false;                            // a *_pytorch class: other L2 norm
  std::vector<bool> recurrent;                           // by layer; empty: the tensors tell
  int64_t key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_width = 4;

  struct Cler {
    std::string mode = "latest", gamma = "scalar", site = "value";
    bool dynamic = false, normalize = false;
    double eps = 1e-6;
  };
  struct Route {
    std::string signal;                                  // error, value, gated_value, both, self
    int64_t rank = 0;
    bool normalize = false;
  };
  bool has_cler = false, has_route = false;              // never both
  Cler cler;
  Route route;
  bool attention_residuals = false;                      // the tensors may tell where this does not
  double attention_residuals_eps = 1e-6;
};

// Refuses what Weir does not serve, by name: an argument that changes the mathematics and has
// another value, a combination that the training code ignores or forbids, and an argument of this
// family (cler_*, attn_res_*, linear_*, kda_*) that is set and not known, unless `ignored` has it.
absl::StatusOr<MegatronArguments> read_arguments(const Value* arguments, const std::string& path,
                                                 const std::set<std::string>& ignored);

}  // namespace weir
