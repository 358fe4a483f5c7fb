#pragma once
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "kernels/types.h"
#include "nlohmann/json.hpp"

namespace weir::test {

// The 34 models of the Megatron family whose logits are known: their configurations, and what is
// fed to them.

// What the family's specification states of the last of 12 steps: the first logits, the largest
// one's place and the sum of squares.
struct Variant {
  const char* name;
  std::array<double, 4> logits;
  Token most_likely;
  double squares;
};
inline constexpr std::array kVariants = {
    Variant{"softmax",
            {-1.492285325, 0.790291858, -1.699748826, -1.221893273}, 62, 67.627862193},
    Variant{"delta-hybrid",
            {0.022578027, 0.722262880, -0.347488522, -0.287830748}, 33, 74.680619859},
    Variant{"delta-pure",
            {-1.737864606, 1.423118033, -0.775977509, 0.287407390}, 1, 47.989687008},
    Variant{"gdn-hybrid",
            {1.477941012, -1.687441102, -0.595492516, -1.094717550}, 35, 80.913081791},
    Variant{"gdn-pure",
            {-0.517908443, -0.145713067, 0.085789020, -1.047261891}, 35, 57.210307018},
    Variant{"kda-hybrid",
            {-0.670841468, 0.511854724, 1.040728741, 2.498167455}, 8, 81.889767175},
    Variant{"kda-pure",
            {0.181243754, 0.473129845, 0.172848552, -0.149187700}, 51, 63.485374045},
    Variant{"gdn2-hybrid",
            {0.344684435, 0.113104027, -0.164524881, 0.639568028}, 35, 69.257298400},
    Variant{"gdn2-pure",
            {-0.906975875, 1.120879768, -0.622051390, 0.604818572}, 18, 57.923491008},
    Variant{"gdn2-lowrank-hybrid",
            {2.304527846, -1.141225041, 1.265221230, 1.072911684}, 0, 69.113237500},
    Variant{"linear-hybrid",
            {-0.134092878, 0.430047694, 0.556460536, -0.165093060}, 21, 66.467683400},
    Variant{"gdn-clvr",
            {0.751624404, -0.850486432, 1.012397850, -0.341307839}, 35, 60.095428525},
    Variant{"gdn-cler-h",
            {1.445588573, -1.309088272, 0.531146337, -0.405779552}, 35, 62.468116504},
    Variant{"delta-clvr",
            {-0.450341861, 0.575260938, -0.818089051, 0.024749205}, 36, 61.149615265},
    Variant{"delta-cler-h",
            {-0.341740481, 0.973828859, -0.613734369, -0.274794998}, 36, 68.922056709},
    Variant{"gdn-clvr-r4",
            {0.734478545, -0.220250867, -1.509565413, -1.028010458}, 42, 89.750755910},
    Variant{"gdn-clvr-norm",
            {-0.022190853, -0.083052765, 0.432789511, 0.656747730}, 36, 57.739216401},
    Variant{"gdn-cler-g",
            {1.212154013, -1.136865263, 0.594376956, -0.835932324}, 35, 58.547206511},
    Variant{"gdn-cler-rv",
            {-0.207350823, 0.025808506, -0.092846359, 0.237568980}, 29, 79.754359771},
    Variant{"gdn-selftrans-r4",
            {-0.553856057, -1.747768041, 0.472453232, 0.794750863}, 24, 55.435759608},
    Variant{"gdn-attnres",
            {-1.218946267, 1.093259608, -1.388115957, -0.784997996}, 23, 69.529234717},
    Variant{"delta-attnres",
            {-0.404774428, 0.151163726, 0.407480288, -0.732711328}, 6, 68.060764248},
    Variant{"gdn-attnres-clvr",
            {-1.133687513, 1.003205257, -1.048520611, -1.880027925}, 20, 72.579780967},
    Variant{"gdn-attnres-cler-densesoftmax",
            {-0.140303527, 0.628164582, 0.580381523, -0.185636945}, 62, 68.368701401},
    Variant{"gdn-cler-scalar",
            {1.822754719, -1.561269696, -0.548415689, -1.045381425}, 35, 77.572539042},
    Variant{"delta-cler-scalar",
            {-0.007820651, 0.675091856, -0.316422357, -0.459116845}, 33, 71.451267085},
    Variant{"gdn-cler-head-norm",
            {1.708979390, -0.884340003, 0.140180202, -0.202758370}, 35, 54.525706591},
    Variant{"gdn-cler-channel",
            {2.054547471, -1.411305656, -0.409497394, -0.862487490}, 35, 71.336887854},
    Variant{"gdn-cler-output",
            {0.943226265, -0.332098878, -0.060322659, -0.927041104}, 35, 60.059330459},
    Variant{"gdn-cler-densemean",
            {1.795209595, -1.681481231, -0.082410214, -0.847703301}, 35, 69.092567849},
    Variant{"gdn-cler-densesoftmax",
            {1.777227026, -1.622550144, -0.080978713, -0.757806706}, 35, 66.662459158},
    Variant{"gdn-cler-dyngate",
            {1.708891533, -1.501654602, -0.221875439, -0.777652284}, 35, 66.644935295},
    Variant{"gdn-cler-attnres",
            {0.987486791, 0.431172403, 0.014641783, -0.533195085}, 35, 55.524019868},
    Variant{"gdn-cler-attnres-dyn",
            {1.350649541, 0.319193578, -0.260050897, -0.531508344}, 35, 57.393204845},
};

inline nlohmann::json routing_model(const std::string& kind, int stride = 3, int layers = 6) {
  nlohmann::json types = nlohmann::json::array();
  for (int i = 0; i < layers; ++i) types.push_back((i + 1) % stride == 0 ? "softmax" : kind);
  const bool few = kind == "delta" || kind == "linear";
  return {{"model_type", "weir"},
          {"hidden_size", 32},
          {"vocab_size", 64},
          {"num_hidden_layers", layers},
          {"intermediate_size", 48},
          {"layer_types", types},
          {"num_heads", 4},
          {"num_kv_heads", 2},
          {"head_dim", 8},
          {"attention_output_gate", kind == "gdn" || kind == "gdn2"},
          {"linear_num_key_heads", 2},
          {"linear_num_value_heads", few ? 2 : 4},
          {"linear_key_head_dim", 8},
          {"linear_value_head_dim", few ? 16 : 8},
          {"gdn2_low_rank", false}};
}

// A variant's config.json from its name: "gdn-cler-head-norm".
inline nlohmann::json config_of(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (name == "softmax") return routing_model("softmax", 1, 4);
  nlohmann::json config = routing_model(name.substr(0, name.find('-')), has("-pure") ? 100 : 3);
  config["gdn2_low_rank"] = has("-lowrank");
  const bool depth = has("-attnres") && !has("-cler-attnres");
  if (depth) config["attention_residuals"] = {{"eps", 1e-6}};
  const std::array<std::pair<const char*, const char*>, 5> signals = {
      {{"-clvr", "value"}, {"-cler-h", "error"}, {"-cler-g", "gated_value"}, {"-cler-rv", "both"},
       {"-selftrans", "self"}}};
  for (const auto& [part, signal] : signals) {
    const size_t at = name.find(part);
    const size_t end = at + std::string(part).size();
    if (at == std::string::npos || (end < name.size() && name[end] != '-')) continue;
    config["route"] = {
        {"signal", signal}, {"rank", has("-r4") ? 4 : 0}, {"normalize", has("-norm")}};
    return config;
  }
  if (!has("-cler-")) return config;
  nlohmann::json& cler = config["cler"];
  cler["mode"] = has("-cler-attnres")   ? "attnres"
                 : has("-densemean")    ? "dense_mean"
                 : has("-densesoftmax") ? "dense_softmax"
                                        : "latest";
  cler["gamma"] = has("-head") || has("-dense") ? "head" : has("-channel") ? "channel" : "scalar";
  cler["dynamic"] = has("-dyn");
  cler["normalize"] = has("-norm");
  cler["site"] = has("-output") ? "output" : "value";
  return config;
}

inline std::vector<Token> routing_prompt() {
  std::vector<Token> made;
  for (int i = 0; i < 12; ++i) made.push_back((7 * i + 3) % 64);
  return made;
}

}  // namespace weir::test
