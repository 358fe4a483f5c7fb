#pragma once
#include <optional>

#include "server/parameters.h"
#include "server/served_model.h"
#include "weir/v1/generation.pb.h"

namespace weir {

// The unary methods, without their transport.
std::optional<Refusal> tokenize(const v1::TokenizeRequest& request, const ServedModel& model,
                                v1::TokenizeResponse& response);
std::optional<Refusal> detokenize(const v1::DetokenizeRequest& request, const ServedModel& model,
                                  v1::DetokenizeResponse& response);
std::optional<Refusal> describe(const v1::GetModelRequest& request, const ServedModel& model,
                                v1::GetModelResponse& response);

}  // namespace weir
