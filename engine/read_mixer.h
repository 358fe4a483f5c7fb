#pragma once
#include <cstdint>
#include <vector>

#include "engine/config_reader.h"
#include "engine/spec.h"

namespace weir {

// The parts of read_spec() that belong to one kind of mixer. Errors go to the reader's status.

inline constexpr int32_t kDimMax = 1 << 20;     // of any vector of a layer
inline constexpr int32_t kHeadDimMax = 1 << 10;
inline constexpr int32_t kLayersMax = 4096;

// model_type delta_net, gated_deltanet, and kda or gdn2, which share their keys.
DeltaMixer read_delta_net(ConfigReader& reader, int32_t dim);
DeltaMixer read_gated_deltanet(ConfigReader& reader);
DeltaMixer read_kda(ConfigReader& reader);
DeltaMixer read_gdn2(ConfigReader& reader);

MomMixer read_mom(ConfigReader& reader);
SwilaMixer read_swila(ConfigReader& reader);
GlaMixer read_gla(ConfigReader& reader, int32_t dim);
RetNetMixer read_retnet(ConfigReader& reader, int32_t dim);
Hgrn2Mixer read_hgrn2(ConfigReader& reader, int32_t dim);
LinearMixer read_linear_attn(ConfigReader& reader, int32_t dim);
GsaMixer read_gsa(ConfigReader& reader, int32_t dim);
Mamba2Mixer read_mamba2(ConfigReader& reader, int32_t dim);
Rwkv7Mixer read_rwkv7(ConfigReader& reader, int32_t dim);
CombaMixer read_comba(ConfigReader& reader);
Mixer read_gated_deltaproduct(ConfigReader& reader);  // a DeltaMixer when it updates once a token

// model_type weir: all layers, whose kinds may differ.
void read_weir_layers(ConfigReader& reader, ModelSpec& spec);

// model_type transformer.
AttentionMixer read_transformer(ConfigReader& reader, int32_t dim);
// model_type forgetting_transformer.
AttentionMixer read_forgetting(ConfigReader& reader, int32_t dim);
// The `attn` option of the others: overwrites the mixers of the layers that it names.
void read_attention_layers(ConfigReader& reader, int32_t dim, std::vector<LayerSpec>& layers);

}  // namespace weir
