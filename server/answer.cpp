#include "server/answer.h"

#include <algorithm>

#include "kernels/check.h"

namespace weir {
namespace {

v1::FinishReason reason_of(Finish finish) {
  switch (finish) {
    case Finish::Stop: return v1::FINISH_REASON_STOP;
    case Finish::Length: return v1::FINISH_REASON_LENGTH;
    case Finish::Cancelled: return v1::FINISH_REASON_CANCELLED;
    case Finish::Deadline: return v1::FINISH_REASON_DEADLINE;
    case Finish::Error: return v1::FINISH_REASON_ERROR;
  }
  WEIR_UNREACHABLE("every Finish is listed");
}

void add_alternatives(const std::vector<TokenScore>& top, v1::TokenLogprob& to) {
  for (const TokenScore& score : top) {
    v1::TokenLogprob::Alternative& alternative = *to.add_top();
    alternative.set_token_id(score.token);
    alternative.set_logprob(score.logprob);
  }
}

// From one moment to another; 0 when either did not come.
double seconds(Nanoseconds from, Nanoseconds to) {
  if (from == kNever || to == kNever) return 0;
  return double(std::max<Nanoseconds>(to - from, 0)) * 1e-9;
}

}  // namespace

Answer::Answer(GenerateParameters parameters, const Tokenizer& tokenizer, Nanoseconds received)
    : parameters_(std::move(parameters)),
      tokenizer_(tokenizer),
      text_(parameters_.answer.stop_strings, parameters_.answer.include_stop),
      received_(received) {
  *message_.mutable_effective() = parameters_.effective;
  message_.set_text(parameters_.answer.echo);
}

void Answer::add(const TimedEmission& timed) {
  if (ended()) return;
  const Emission& emission = timed.emission;
  started_ = emission.started_at;
  for (const Emission::PromptScore& score : emission.prompt) {
    v1::TokenLogprob& logprob = *message_.add_prompt_logprobs();
    logprob.set_token_id(parameters_.request.prompt[size_t(score.position)]);
    logprob.set_logprob(score.logprob);
    add_alternatives(score.top, logprob);
  }
  if (emission.token) add_token(emission, timed.at);
  if (emission.finish && !ended()) end(reason_of(*emission.finish));
}

void Answer::add_token(const Emission& emission, Nanoseconds at) {
  const AnswerOptions& options = parameters_.answer;
  const Token token = *emission.token;
  if (generated_ == 0) first_token_ = at;
  last_token_ = at;
  ++generated_;
  ++message_tokens_;
  if (options.return_token_ids) message_.add_token_ids(token);
  if (options.logprobs) add_logprobs(emission);

  const bool stops = emission.finish == Finish::Stop;
  if (stops) matched_token_ = token;
  if (stops && !options.include_stop) return;  // of its text, nothing is part of the answer
  if (token >= tokenizer_.size()) return;      // padding of the vocabulary has no text
  const bool first = options.first_in_text && generated_ == 1;
  message_.mutable_text()->append(text_.push(tokenizer_.bytes(token, first)));
  if (text_.stopped()) end(v1::FINISH_REASON_STOP_STRING);
}

void Answer::add_logprobs(const Emission& emission) {
  v1::TokenLogprob& logprob = *message_.add_logprobs();
  logprob.set_token_id(*emission.token);
  logprob.set_logprob(emission.logprob.value_or(0));
  add_alternatives(emission.top, logprob);
}

bool Answer::worth_sending() const {
  return message_.token_ids_size() > 0 || !message_.text().empty() ||
         message_.logprobs_size() > 0 || message_.prompt_logprobs_size() > 0;
}

void Answer::clear() {
  message_.Clear();
  message_tokens_ = 0;
}

void Answer::finish_message() {
  WEIR_CHECK(ended());
  if (!text_.stopped()) message_.mutable_text()->append(text_.finish());
  message_.set_finish_reason(reason_);
  message_.set_unfinished_bytes(uint32_t(text_.unfinished_bytes()));
  if (text_.stopped()) message_.set_matched_stop(*text_.stopped());
  if (reason_ == v1::FINISH_REASON_STOP && matched_token_) {
    message_.set_matched_token(*matched_token_);
  }
  v1::Usage& usage = *message_.mutable_usage();
  usage.set_prompt_tokens(uint32_t(prompt_tokens()));
  usage.set_generated_tokens(uint32_t(generated_));
  v1::Timings& timings = *message_.mutable_timings();
  timings.set_queue_seconds(seconds(received_, started_));
  timings.set_prefill_seconds(seconds(started_, first_token_));
  timings.set_decode_seconds(seconds(first_token_, last_token_));
}

}  // namespace weir
