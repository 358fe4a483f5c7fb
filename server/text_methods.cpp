#include "server/text_methods.h"

#include "absl/strings/str_cat.h"
#include "engine/text_stream.h"

namespace weir {

std::optional<Refusal> tokenize(const v1::TokenizeRequest& request, const ServedModel& model,
                                v1::TokenizeResponse& response) {
  if (request.add_bos()) {
    if (model.spec.bos < 0) {
      return Refusal{.field = "add_bos",
                     .problem = "expected false, the model has no bos token, found true"};
    }
    v1::TokenPiece& bos = *response.add_tokens();
    bos.set_id(model.spec.bos);
    if (model.spec.bos < model.tokenizer.size()) {
      bos.set_piece(model.tokenizer.piece(model.spec.bos));
    }
  }
  if (std::string problem = text_problem(request.text(), model); !problem.empty()) {
    return Refusal{.field = "text", .problem = problem};
  }
  for (Tokenizer::Piece& piece : model.tokenizer.encode_pieces(request.text())) {
    v1::TokenPiece& token = *response.add_tokens();
    token.set_id(piece.id);
    token.set_piece(std::move(piece.piece));
    token.set_begin(uint32_t(piece.begin));
    token.set_end(uint32_t(piece.end));
  }
  return std::nullopt;
}

std::optional<Refusal> detokenize(const v1::DetokenizeRequest& request, const ServedModel& model,
                                  v1::DetokenizeResponse& response) {
  const auto& ids = request.token_ids();
  for (int i = 0; i < ids.size(); ++i) {
    if (std::string problem = token_problem(ids[i], model); !problem.empty()) {
      return Refusal{.field = absl::StrCat("token_ids[", i, "]"), .problem = std::move(problem)};
    }
  }
  const std::vector<Token> tokens(ids.begin(), ids.end());
  TextStream text;
  std::string whole = text.push(model.tokenizer.decode(tokens));
  whole += text.finish();
  // Here nothing follows: an unfinished character is as wrong as any other bytes.
  if (text.unfinished_bytes() > 0) whole += "\uFFFD";
  response.set_text(std::move(whole));
  return std::nullopt;
}

std::optional<Refusal> describe(const v1::GetModelRequest&, const ServedModel& model,
                                v1::GetModelResponse& response) {
  const ModelSpec& spec = model.spec;
  response.set_name(model.name);
  response.set_model_type(spec.model_type);
  response.set_layers(uint32_t(spec.layers.size()));
  response.set_hidden_size(uint32_t(spec.dim));
  response.set_vocab_size(uint32_t(spec.vocab));
  if (spec.bos >= 0) response.set_bos_token_id(spec.bos);
  if (!spec.eos.empty()) response.set_eos_token_id(spec.eos.front());
  response.set_weights_dtype(model.weights_dtype);
  response.set_weights_bytes(model.weights_bytes);
  response.set_weights_fingerprint(model.weights_fingerprint);
  response.set_device(model.device);
  response.set_version(WEIR_VERSION);
  *response.mutable_defaults() = default_parameters(model);

  const Limits& limits = model.limits;
  v1::GetModelResponse::State& state = *response.mutable_state();
  state.set_recurrent_bytes(model.state.recurrent);
  state.set_conv_bytes(model.state.conv);
  state.set_window_bytes(model.state.ring);
  state.set_kv_bytes_per_token(model.state.kv_per_token);
  state.set_slots(uint32_t(limits.slots));
  state.set_kv_pages(uint32_t(limits.pages));
  state.set_kv_page_tokens(uint32_t(limits.page_tokens));

  v1::GetModelResponse::Limits& to = *response.mutable_limits();
  to.set_prompt_tokens(uint32_t(limits.prompt_tokens));
  to.set_new_tokens(uint32_t(limits.new_tokens));
  to.set_queued(uint32_t(limits.queued));
  to.set_step_tokens(uint32_t(limits.step_tokens));
  to.set_chunk_tokens(uint32_t(limits.chunk_tokens));
  to.set_stop_strings(kStopStringsMax);
  to.set_stop_string_bytes(kStopStringBytesMax);
  to.set_stop_token_ids(kStopTokenIdsMax);
  to.set_logit_bias(kLogitBiasMax);
  to.set_top_logprobs(Sample::kTop);
  to.set_receive_bytes(model.receive_bytes);
  return std::nullopt;
}

}  // namespace weir
