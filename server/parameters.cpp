#include "server/parameters.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "engine/text_stream.h"

namespace weir {
namespace {

// Whole numbers in full, others to six digits.
std::string number(double value) {
  const bool whole = std::abs(value) < 1e15 && value == std::floor(value);
  return whole ? absl::StrCat(int64_t(value)) : absl::StrCat(value);
}

// An interval as the messages write it.
struct Range {
  double low = 0, high = 0;
  bool low_open = false;

  bool holds(double value) const {  // false for NaN
    return (low_open ? value > low : value >= low) && value <= high;
  }
  std::string text() const {
    return absl::StrCat(low_open ? "(" : "[", number(low), ", ", number(high), "]");
  }
};

// Reads one request. Every read_ function fills its part of `out_` and remembers the first
// problem; later ones are then of no interest.
class Reader {
 public:
  Reader(const v1::GenerateRequest& message, const ServedModel& model,
         const RequestDefaults& defaults)
      : message_(message), model_(model), defaults_(defaults) {}

  std::variant<GenerateParameters, Refusal> read() {
    read_whole();
    read_sampling();
    read_stop();
    read_output();
    if (ok()) read_input();
    if (ok()) read_length();
    if (!ok()) return refusal_;
    return std::move(out_);
  }

  v1::Effective read_defaults() {
    read_sampling();
    read_stop();
    read_length();
    out_.effective.mutable_sampling()->clear_seed();
    return out_.effective;
  }

 private:
  bool ok() const { return refusal_.field.empty(); }

  void refuse(const std::string& field, const std::string& problem) {
    if (ok()) refusal_ = {.field = field, .problem = problem};
  }

  void check(const char* field, double value, const Range& range) {
    if (!range.holds(value)) {
      refuse(field, absl::StrCat("expected ", range.text(), ", found ", number(value)));
    }
  }
  void check_count(const char* field, int64_t count, int64_t max) {
    if (count > max) refuse(field, absl::StrCat("expected at most ", max, ", found ", count));
  }
  void check_bytes(const char* field, const std::string& text, int64_t max) {
    if (int64_t(text.size()) > max) {
      refuse(field, absl::StrCat("expected at most ", max, " bytes, found ", text.size()));
    }
  }
  void check_token(const std::string& field, Token id) {
    if (std::string problem = token_problem(id, model_); !problem.empty()) refuse(field, problem);
  }

  void read_whole() {
    const v1::GenerateRequest& m = message_;
    if (m.has_model() && m.model() != model_.name) {
      refuse("model", absl::StrCat("expected \"", model_.name, "\", found \"",
                                   m.model().substr(0, kLabelBytesMax), "\""));
      refusal_.not_found = true;
    }
    if (m.has_session_id()) refuse("session_id", "sessions are not served yet");
    if (m.has_n() && m.n() != 1) {
      refuse("n", absl::StrCat("expected 1, the only number served yet, found ", m.n()));
    }
    check("priority", m.priority(), {-100, 100});
    check_bytes("request_id", m.request_id(), kLabelBytesMax);
    check_bytes("tenant", m.tenant(), kLabelBytesMax);
    out_.request.priority = m.priority();
    out_.tenant = m.tenant();
    out_.effective.set_request_id(m.has_request_id() ? m.request_id() : defaults_.request_id);
  }

  void read_sampling() {
    const v1::SamplingParameters& s = message_.sampling();
    Sampling& to = out_.request.sampling;
    to.temperature = s.has_temperature() ? s.temperature() : 1;
    to.top_p = s.has_top_p() ? s.top_p() : 1;
    to.min_p = s.min_p();
    to.typical_p = s.has_typical_p() ? s.typical_p() : 1;
    to.repetition_penalty = s.has_repetition_penalty() ? s.repetition_penalty() : 1;
    to.frequency_penalty = s.frequency_penalty();
    to.presence_penalty = s.presence_penalty();
    to.seed = s.has_seed() ? s.seed() : defaults_.seed;
    check("sampling.temperature", to.temperature, {0, 100});
    check("sampling.top_k", s.top_k(), {0, double(model_.spec.vocab)});
    check("sampling.top_p", to.top_p, {0, 1, true});
    check("sampling.min_p", to.min_p, {0, 1});
    check("sampling.typical_p", to.typical_p, {0, 1, true});
    check("sampling.repetition_penalty", to.repetition_penalty, {0, 100, true});
    check("sampling.frequency_penalty", to.frequency_penalty, {-100, 100});
    check("sampling.presence_penalty", to.presence_penalty, {-100, 100});
    to.top_k = ok() ? int32_t(s.top_k()) : 0;
    read_logit_bias(s);

    v1::SamplingParameters& effective = *out_.effective.mutable_sampling();
    effective.set_temperature(to.temperature);
    effective.set_top_k(uint32_t(to.top_k));
    effective.set_top_p(to.top_p);
    effective.set_min_p(to.min_p);
    effective.set_typical_p(to.typical_p);
    effective.set_repetition_penalty(to.repetition_penalty);
    effective.set_frequency_penalty(to.frequency_penalty);
    effective.set_presence_penalty(to.presence_penalty);
    effective.set_seed(to.seed);
    if (ok()) *effective.mutable_logit_bias() = s.logit_bias();
  }

  void read_logit_bias(const v1::SamplingParameters& s) {
    check_count("sampling.logit_bias", s.logit_bias_size(), kLogitBiasMax);
    if (!ok()) return;
    for (const auto& [id, bias] : s.logit_bias()) {
      check_token("sampling.logit_bias", id);
      const bool forbids = std::isinf(bias) && bias < 0;
      if (!std::isfinite(bias) && !forbids) {
        refuse(absl::StrCat("sampling.logit_bias[", id, "]"),
               absl::StrCat("expected a finite number or -inf, found ", bias));
      }
      out_.request.logit_bias.emplace_back(id, bias);
    }
    // A map has no order; the same request should be the same bytes to the engine.
    std::sort(out_.request.logit_bias.begin(), out_.request.logit_bias.end());
  }

  void read_stop() {
    const v1::StopParameters& s = message_.stop();
    check_count("stop.strings", s.strings_size(), kStopStringsMax);
    check_count("stop.token_ids", s.token_ids_size(), kStopTokenIdsMax);
    if (!ok()) return;
    for (int i = 0; i < s.strings_size(); ++i) {
      const size_t bytes = s.strings(i).size();
      if (bytes < 1 || bytes > size_t(kStopStringBytesMax)) {
        refuse(absl::StrCat("stop.strings[", i, "]"),
               absl::StrCat("expected 1..", kStopStringBytesMax, " bytes, found ", bytes));
      }
    }
    for (int i = 0; i < s.token_ids_size(); ++i) {
      check_token(absl::StrCat("stop.token_ids[", i, "]"), s.token_ids(i));
    }
    Request& to = out_.request;
    if (!s.ignore_eos()) to.stop = model_.spec.eos;
    to.stop.insert(to.stop.end(), s.token_ids().begin(), s.token_ids().end());
    out_.answer.stop_strings.assign(s.strings().begin(), s.strings().end());
    out_.answer.include_stop = s.include_stop();

    v1::StopParameters& effective = *out_.effective.mutable_stop();
    *effective.mutable_strings() = s.strings();
    *effective.mutable_token_ids() = s.token_ids();
    effective.set_include_stop(s.include_stop());
    effective.set_ignore_eos(s.ignore_eos());
  }

  void read_output() {
    const v1::OutputParameters& o = message_.output();
    check("output.top_logprobs", o.top_logprobs(), {0, double(Sample::kTop)});
    if (o.has_stream_chunk_tokens()) {
      check("output.stream_chunk_tokens", o.stream_chunk_tokens(), {1, double(kChunkTokensMax)});
    }
    if (!ok()) return;
    AnswerOptions& to = out_.answer;
    to.logprobs = o.logprobs() || o.top_logprobs() > 0;
    to.return_token_ids = !o.has_return_token_ids() || o.return_token_ids();
    to.chunk_tokens = o.has_stream_chunk_tokens() ? int32_t(o.stream_chunk_tokens()) : 1;
    out_.request.logprobs = to.logprobs;
    out_.request.top_logprobs = int32_t(o.top_logprobs());
    out_.request.prompt_logprobs = o.prompt_logprobs();
  }

  void read_input() {
    std::vector<Token>& prompt = out_.request.prompt;
    const char* field = "prompt";
    switch (message_.input_case()) {
      case v1::GenerateRequest::kPrompt:
        if (message_.prompt().empty()) {
          return refuse(field, "expected at least one byte of text, found none");
        }
        if (message_.has_add_bos() && message_.add_bos() && model_.spec.bos < 0) {
          return refuse("add_bos", "expected false, the model has no bos token, found true");
        }
        if (std::string problem = text_problem(message_.prompt(), model_); !problem.empty()) {
          return refuse(field, problem);
        }
        prompt = model_.tokenizer.encode(message_.prompt());
        if (model_.spec.bos >= 0 && (!message_.has_add_bos() || message_.add_bos())) {
          prompt.insert(prompt.begin(), model_.spec.bos);
        }
        break;
      case v1::GenerateRequest::kTokenIds:
        field = "token_ids";
        read_token_ids(prompt);
        break;
      case v1::GenerateRequest::INPUT_NOT_SET:
        return refuse("prompt", "expected prompt or token_ids, found neither");
    }
    if (prompt.empty()) refuse(field, "expected at least one token, found none");
    if (int64_t(prompt.size()) > model_.limits.prompt_tokens) {
      refuse(field, absl::StrCat("expected at most ", model_.limits.prompt_tokens,
                                 " tokens, found ", prompt.size()));
    }
    if (!ok()) return;
    out_.effective.set_prompt_tokens(uint32_t(prompt.size()));
    read_echo(prompt);
  }

  void read_token_ids(std::vector<Token>& prompt) {
    const auto& ids = message_.token_ids().ids();
    for (int i = 0; i < ids.size() && ok(); ++i) {
      if (std::string problem = token_problem(ids[i], model_); !problem.empty()) {
        refuse(absl::StrCat("token_ids.ids[", i, "]"), problem);
      }
    }
    if (message_.has_add_bos() && message_.add_bos()) {
      refuse("add_bos", "expected false beside token_ids, which are taken as they are, found true");
    }
    prompt.assign(ids.begin(), ids.end());
  }

  void read_echo(const std::vector<Token>& prompt) {
    out_.answer.first_in_text = std::all_of(prompt.begin(), prompt.end(), [this](Token id) {
      return model_.tokenizer.bytes(id, false).empty();
    });
    if (!message_.output().echo()) return;
    if (message_.has_prompt()) {
      out_.answer.echo = message_.prompt();
      return;
    }
    TextStream text;
    out_.answer.echo = text.push(model_.tokenizer.decode(prompt));
    out_.answer.echo += text.finish();
  }

  // No more than the KV pages hold beside the prompt, where there are pages.
  int32_t new_tokens_by_default() const {
    const Limits& limits = model_.limits;
    const int32_t usual = std::min(kNewTokensByDefault, limits.new_tokens);
    if (model_.state.kv_per_token == 0) return usual;
    const int64_t room = int64_t(limits.pages) * limits.page_tokens -
                         int64_t(out_.request.prompt.size()) + 1;
    return int32_t(std::clamp<int64_t>(room, 1, usual));
  }

  void read_length() {
    const v1::StopParameters& s = message_.stop();
    const Limits& limits = model_.limits;
    if (s.has_max_tokens()) {
      check("stop.max_tokens", s.max_tokens(), {1, double(limits.new_tokens)});
    }
    if (!ok()) return;
    Request& to = out_.request;
    to.new_tokens = s.has_max_tokens() ? int32_t(s.max_tokens())
                                       : new_tokens_by_default();
    check("stop.min_tokens", s.min_tokens(), {0, double(to.new_tokens)});
    to.min_tokens = ok() ? int32_t(s.min_tokens()) : 0;
    out_.effective.mutable_stop()->set_max_tokens(uint32_t(to.new_tokens));
    out_.effective.mutable_stop()->set_min_tokens(uint32_t(to.min_tokens));
  }

  const v1::GenerateRequest& message_;
  const ServedModel& model_;
  const RequestDefaults& defaults_;
  GenerateParameters out_;
  Refusal refusal_;
};

}  // namespace

std::variant<GenerateParameters, Refusal> read_parameters(const v1::GenerateRequest& message,
                                                          const ServedModel& model,
                                                          const RequestDefaults& defaults) {
  return Reader(message, model, defaults).read();
}

v1::Effective default_parameters(const ServedModel& model) {
  return Reader(v1::GenerateRequest::default_instance(), model, {}).read_defaults();
}

std::string text_problem(const std::string& text, const ServedModel& model) {
  if (text.size() <= model.text_bytes) return "";
  return absl::StrCat("expected at most ", model.text_bytes, " bytes, the most that ",
                      model.limits.prompt_tokens, " tokens can be, found ", text.size());
}

std::string token_problem(Token id, const ServedModel& model) {
  if (id >= 0 && id < model.token_ids()) return "";
  return absl::StrCat("expected 0..", model.token_ids() - 1, ", found ", id);
}

}  // namespace weir
