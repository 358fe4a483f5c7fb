#pragma once
#include <cmath>
#include <cstdint>
#include <random>

#include "engine/request.h"

namespace weir {

// Seeded chance for simulations; the same on every machine, unlike std's distributions.
class Chance {
 public:
  explicit Chance(uint64_t seed) : random_(seed) {}
  uint64_t bits() { return random_(); }
  int32_t pick(int32_t low, int32_t high) {  // both ends included
    return low + int32_t(random_() % uint64_t(int64_t(high) - low + 1));
  }
  bool percent(int32_t chance) { return pick(1, 100) <= chance; }

 private:
  std::mt19937_64 random_;
};

inline void randomise_sampling(Chance& chance, int32_t vocab, Sampling& sampling) {
  sampling.seed = chance.bits() % 4;
  if (chance.percent(50)) sampling.temperature = float(chance.pick(1, 20)) / 10;
  if (chance.percent(20)) sampling.top_k = chance.pick(0, vocab);
  if (chance.percent(20)) sampling.top_p = float(chance.pick(1, 10)) / 10;
  if (chance.percent(20)) sampling.min_p = float(chance.pick(0, 10)) / 10;
  if (chance.percent(20)) sampling.typical_p = float(chance.pick(1, 10)) / 10;
  if (chance.percent(25)) sampling.repetition_penalty = 1.25f;
  if (chance.percent(25)) sampling.frequency_penalty = 0.5f;
  if (chance.percent(25)) sampling.presence_penalty = -0.5f;
}

// A request that check() accepts, but for its pages.
inline Request random_request(Chance& chance, const Limits& limits) {
  const auto token = [&] { return chance.pick(0, limits.vocab - 1); };
  Request request;
  request.prompt.resize(size_t(chance.pick(1, limits.prompt_tokens)));
  for (Token& id : request.prompt) id = token();
  request.new_tokens = chance.pick(1, limits.new_tokens);
  if (chance.percent(30)) request.min_tokens = chance.pick(0, request.new_tokens);
  for (int32_t i = chance.pick(-1, 2); i > 0; --i) request.stop.push_back(token());
  randomise_sampling(chance, limits.vocab, request.sampling);
  if (chance.percent(25)) {
    const Token biased = chance.pick(0, limits.vocab - 1);
    const float bias = chance.percent(50) ? -INFINITY : float(chance.pick(-5, 5));
    request.logit_bias.push_back({biased, bias});
    if (limits.vocab > 1) request.logit_bias.push_back({(biased + 1) % limits.vocab, 2.5f});
  }
  request.logprobs = chance.percent(50);
  if (chance.percent(30)) request.top_logprobs = chance.pick(1, 3);
  request.prompt_logprobs = chance.percent(30);
  if (chance.percent(30)) request.priority = chance.pick(-1, 1);
  return request;
}

}  // namespace weir
