#include <cfloat>

#include "kernels/sample_held_cuda.cuh"

namespace weir::cuda {
namespace {

using namespace sample;

// One block draws one token. Sets of tokens (the k most likely, the smallest set with probability
// p) are never sorted: an order is a 64-bit key, larger first, no two tokens share one, and the
// set's last key is found through a histogram of the keys' values; see reach().
//
// Floor, greedy: the logits read once, 4 * vocab bytes. A filter reads them three times more, from
// cache.

// Calls use(i, logits[i]) for i = first, first + step .. below end, with eight loads on their way
// at a time: one after the other each would wait for the cache. All lanes of a warp, whose firsts
// are neighbours, come along to the end: beyond it the logit is -infinity, which is never kept.
template <int step, typename Use>
__device__ void each_logit(const float* logits, int first, int end, const Use& use) {
  constexpr int kLoads = 8;
  const int lane = threadIdx.x % 32;
  for (int base = first; base - lane < end; base += kLoads * step) {
    float logit[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      logit[j] = base + j * step < end ? logits[base + j * step] : -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) use(base + j * step, logit[j]);
  }
}

// The key of the largest logit below `below`; 0 when there is none.
__device__ uint64_t largest_below(const float* logits, int vocab, uint64_t below,
                                  Scratch& scratch) {
  uint64_t most = 0;
  each_logit<kThreads>(logits, threadIdx.x, vocab, [&](int i, float logit) {
    if (!isfinite(logit)) return;
    const uint64_t key = key_of(logit, i);
    if (key < below && key > most) most = key;
  });
  return block_max(most, scratch);
}

// The distribution that is drawn from, and who is left in it.
struct Candidates {
  const float* logits;
  int vocab;
  float most, temperature;              // the largest logit
  uint64_t least = 1;                   // key of the least likely one kept
  bool typical = false;
  float entropy = 0, log_total = 0;     // of the set before the typical filter
  uint64_t least_typical = 0;
  float least_weight = 0;

  __device__ float log_weight(float logit) const { return (logit - most) / temperature; }
  __device__ float weight(float logit) const { return expf(log_weight(logit)); }
  // The weight as a whole number: what is below 2^-40 of the largest logit's is never drawn.
  __device__ Units units(float logit) const { return __float2ull_rz(weight(logit) * 0x1p40f); }
  __device__ float typicality(float logit) const {
    return fmaxf(-fabsf(log_total - log_weight(logit) - entropy), -FLT_MAX);
  }
  __device__ bool keeps(int i, float logit) const {
    return isfinite(logit) && key_of(logit, i) >= least &&
           (!typical || key_of(typicality(logit), i) >= least_typical) &&
           (least_weight <= 0 || weight(logit) >= least_weight);
  }
};

// The part of an order that still holds the key looked for: values from high down to low.
struct Span {
  float low, high;
  int vocab;
  double bins;  // for each unit of value

  __device__ Span(float low, float high, int vocab)
      : low(low), high(high), vocab(vocab), bins(kBins / (double(high) - double(low))) {}
  // Its bins, from the larger values on; of equal values, from the smaller tokens on, whole warps
  // of tokens to a bin.
  __device__ bool by_token() const { return low == high; }
  __device__ int bin(float value, int token) const {
    if (by_token()) return token / (32 * ((vocab - 1) / (32 * kBins) + 1));
    return min(kBins - 1, int((double(high) - double(value)) * bins));
  }
  __device__ bool holds(float value) const { return value >= low && value <= high; }
};

// Inclusive sums of the bins take their place; the sum of all is returned.
__device__ Units add_up(Scratch& scratch) {
  const int i = 2 * threadIdx.x;
  const Units first = scratch.bin[i], both = first + scratch.bin[i + 1];
  const Units up_to = sum_up_to(both);
  const WarpSums warps = sum_warps(__shfl_sync(0xffffffffu, up_to, 31), scratch);
  scratch.bin[i] = warps.before + up_to - both + first;
  scratch.bin[i + 1] = warps.before + up_to;
  __syncthreads();  // all sums are there
  return warps.all;
}

// The largest key with which the sum of units(logit) over all kept tokens of this key or a larger
// one reaches (beyond: exceeds) goal(sum over all kept); 0 when it never does.
//
// A histogram over the values finds the bin that the goal lies in. A bin of up to kCandidates
// tokens is resolved at once, a larger one is a smaller span for the next histogram: with bins as
// wide as the values are spread a second one is rare.
template <typename Goal, typename Value, typename Measure>
__device__ uint64_t reach(const Candidates& set, bool beyond, Scratch& scratch, const Goal& goal,
                          const Value& value, const Measure& units) {
  // Calls use(i, value, units) with each thread's tokens of the span, and with no units for the
  // others, so that all lanes of a warp come along.
  const auto each = [&](const Span& span, const auto& use) {
    each_logit<kThreads>(set.logits, threadIdx.x, set.vocab, [&](int i, float logit) {
      const float mine = value(logit);
      const bool here = set.keeps(i, logit) && span.holds(mine);
      use(i, mine, here ? units(logit) : Units(0));
    });
  };
  // The least and the largest value of what each() finds, where wanted.
  const auto measure = [&](const Span& span, const auto& wanted) {
    uint64_t low = 0, high = 0;
    each(span, [&](int i, float mine, Units there) {
      if (there == 0 || !wanted(i, mine, there)) return;
      const uint32_t bits = ordered(mine);
      low = max(low, uint64_t(~bits));
      high = max(high, uint64_t(bits));
    });
    low = block_max(low, scratch);
    high = block_max(high, scratch);
    return Span(unordered(~uint32_t(low)), unordered(uint32_t(high)), set.vocab);
  };
  Span span(-INFINITY, INFINITY, set.vocab);
  span = measure(span, [](int, float, Units) { return true; });
  Units before = 0;  // of larger keys than the span's
  double enough = 0;
  const auto reached = [&](Units sum) {
    return beyond ? double(sum) > enough : double(sum) >= enough;
  };
  for (bool first = true;; first = false) {
    scratch.bin[threadIdx.x] = scratch.bin[threadIdx.x + kThreads] = 0;
    if (threadIdx.x == 0) scratch.found = -1, scratch.count = 0;
    __syncthreads();  // the bins are empty
    each(span, [&](int i, float mine, Units there) {
      if (!span.by_token()) {
        if (there > 0) atomicAdd(&scratch.bin[span.bin(mine, i)], there);
        return;
      }
      there = combine_lanes(there, [](Units a, Units b) { return a + b; });
      if (there > 0 && threadIdx.x % 32 == 0) atomicAdd(&scratch.bin[span.bin(0, i)], there);
    });
    __syncthreads();  // all is counted
    const Units all = add_up(scratch);
    if (first) enough = beyond ? goal(double(all)) : fmax(goal(double(all)), 1.0);
    for (int b = threadIdx.x; b < kBins; b += kThreads) {
      const Units lower = before + (b == 0 ? 0 : scratch.bin[b - 1]);
      if (reached(lower) || !reached(before + scratch.bin[b])) continue;
      scratch.found = b;  // in one thread of all: sums grow
      scratch.before = lower;
    }
    __syncthreads();  // the bin is found
    const int found = scratch.found;
    if (found < 0) return 0;
    before = scratch.before;
    span = measure(span, [&](int i, float mine, Units there) {
      if (span.bin(mine, i) != found) return false;
      const int at = atomicAdd(&scratch.count, 1);
      if (at < kCandidates) {
        scratch.candidate[at] = key_of(mine, i);
        scratch.units[at] = there;
      }
      return true;
    });
    const int count = scratch.count;
    if (count > kCandidates) {
      __syncthreads();  // the count has been read
      continue;
    }
    uint64_t last = 0;
    if (int(threadIdx.x) < count) {
      const Units mine = scratch.candidate[threadIdx.x];
      Units sum = before;
      for (int j = 0; j < count; ++j) sum += scratch.candidate[j] >= mine ? scratch.units[j] : 0;
      if (reached(sum)) last = mine;
    }
    return block_max(last, scratch);
  }
}

template <typename Measure>
__device__ double total(const Candidates& set, Scratch& scratch, const Measure& measure) {
  double sum = 0;
  each_logit<kThreads>(set.logits, threadIdx.x, set.vocab, [&](int i, float logit) {
    if (set.keeps(i, logit)) sum += measure(logit);
  });
  return block_sum(sum, scratch);
}

__device__ void filter(Candidates& set, const Sampling& how, Scratch& scratch) {
  const auto itself = [](float logit) { return logit; };
  const auto weight = [&](float logit) { return set.units(logit); };
  if (how.top_k > 0 && how.top_k < set.vocab) {
    set.least = reach(set, false, scratch, [&](double) { return double(how.top_k); }, itself,
                      [](float) { return Units(1); });
  }
  if (how.typical_p < 1) {
    const double all = total(set, scratch, [&](float logit) { return double(set.weight(logit)); });
    set.log_total = float(log(all));
    set.entropy = float(total(set, scratch, [&](float logit) {
      const double p = set.weight(logit) / all;
      return p > 0 ? p * (set.log_total - set.log_weight(logit)) : 0.0;
    }));
    const uint64_t least =
        reach(set, false, scratch, [&](double sum) { return how.typical_p * sum; },
              [&](float logit) { return set.typicality(logit); }, weight);
    set.least_typical = least;
    set.typical = true;
  }
  if (how.top_p < 1) {
    set.least = max(set.least, reach(set, false, scratch,
                                     [&](double sum) { return how.top_p * sum; }, itself, weight));
  }
  if (how.min_p > 0) {
    uint64_t most = 0;
    each_logit<kThreads>(set.logits, threadIdx.x, set.vocab, [&](int i, float logit) {
      if (set.keeps(i, logit)) most = max(most, key_of(logit, i));
    });
    most = block_max(most, scratch);
    set.least_weight = how.min_p * expf((value_of(most) - set.most) / set.temperature);
  }
}

// For one warp: the first token of [begin, end) with which the units exceed the goal, `before` of
// them being those of earlier tokens.
template <typename Measure>
__device__ int first_beyond(const Candidates& set, const Measure& units, int begin, int end,
                            Units before, double goal) {
  constexpr int kGroups = 8;  // of 32 tokens, whose loads are on their way together
  const int lane = threadIdx.x % 32;
  for (int base = begin; base < end; base += 32 * kGroups) {
    Units up_to[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int i = base + 32 * g + lane;
      up_to[g] = units(i < end ? set.logits[i] : -INFINITY);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) up_to[g] = sum_up_to(up_to[g]);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const unsigned beyond = __ballot_sync(0xffffffffu, double(before + up_to[g]) > goal);
      if (beyond != 0) return base + 32 * g + __ffs(int(beyond)) - 1;
      before += __shfl_sync(0xffffffffu, up_to[g], 31);
    }
  }
  return -1;
}

// The first token, by id, with which the units of all up to it exceed share * (those of all
// tokens); -1: none, as rounding left the goal at the sum. For sets that only min_p has cut.
__device__ int first_beyond(const Candidates& set, double share, Scratch& scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int run = ((set.vocab - 1) / kThreads + 1) * 32;  // tokens of a warp
  const int begin = min(warp * run, set.vocab), end = min(begin + run, set.vocab);
  const auto units = [&](float logit) {
    const bool kept = isfinite(logit) && set.weight(logit) >= set.least_weight;
    return kept ? set.units(logit) : Units(0);
  };
  Units sum = 0;
  each_logit<32>(set.logits, begin + lane, end, [&](int, float logit) { sum += units(logit); });
  sum = combine_lanes(sum, [](Units a, Units b) { return a + b; });
  const WarpSums warps = sum_warps(sum, scratch);
  if (threadIdx.x == 0) scratch.found = -1;
  __syncthreads();  // no token is found
  const double goal = share * double(warps.all);
  if (double(warps.before) <= goal && double(warps.before + sum) > goal) {  // in one warp at most
    const int token = first_beyond(set, units, begin, end, warps.before, goal);
    if (lane == 0) scratch.found = token;
  }
  __syncthreads();  // the token is found
  return scratch.found;
}

// `most`: the key of the largest logit.
__device__ int draw(const float* logits, int vocab, const Sampling& how, int32_t position,
                    uint64_t most, Scratch& scratch) {
  if (most == 0) return -1;
  if (how.temperature <= 0) return token_of(most);
  Candidates set{.logits = logits, .vocab = vocab, .most = value_of(most),
                 .temperature = how.temperature};
  filter(set, how, scratch);
  const double share = uniform(how.seed, position);
  // From the most likely one on where a filter has put them in order, else from the first.
  if (how.top_k == 0 && how.typical_p >= 1 && how.top_p >= 1) {
    const int token = first_beyond(set, share, scratch);
    return token >= 0 ? token : token_of(most);
  }
  const uint64_t key =
      reach(set, true, scratch, [&](double sum) { return share * sum; },
            [](float logit) { return logit; }, [&](float logit) { return set.units(logit); });
  return token_of(key != 0 ? key : most);  // rounding left the goal at the sum
}

__device__ float edited(float logit, const LogitEdit& edit, const Sampling& how) {
  if (edit.seen) {
    logit = logit > 0 ? logit / how.repetition_penalty : logit * how.repetition_penalty;
  }
  logit -= how.frequency_penalty * float(edit.generated);
  if (edit.generated > 0) logit -= how.presence_penalty;
  return logit + edit.bias;
}

// The logit before its edit: what a log-probability is taken of.
__device__ float unedited(float logit, const LogitEdit& edit, const Sampling& how) {
  logit -= edit.bias;
  if (edit.generated > 0) logit += how.presence_penalty;
  logit += how.frequency_penalty * float(edit.generated);
  if (edit.seen) {
    logit = logit > 0 ? logit * how.repetition_penalty : logit / how.repetition_penalty;
  }
  return logit;
}

// A row's edits, and the last token where they do not know it yet.
struct Edits {
  const LogitEdit* list;
  int begin, end;
  Token last = -1;

  __device__ Edits(const Sample& op, int row)
      : list(op.edits), begin(op.edit_begin[row]), end(op.edit_begin[row + 1]) {
    const int at = op.counts == nullptr ? -1 : op.counts[row];
    if (at >= 0) last = op.read[at];
  }
  __device__ LogitEdit at(int i) const {
    LogitEdit edit = list[i];
    if (edit.token == last) {
      ++edit.generated;
      edit.seen = true;
    }
    return edit;
  }
  __device__ LogitEdit of_last() const { return {.token = last, .generated = 1, .seen = true}; }
};

// The most likely tokens of the model's own distribution. `below`: 0 when it has none.
template <typename Logprob>
__device__ void report_top(const Sample& op, int row, uint64_t below, Scratch& scratch,
                           const Logprob& logprob) {
  Token* token = op.top_token + row * Sample::kTop;
  float* score = op.top_logprob + row * Sample::kTop;
  if (threadIdx.x < Sample::kTop) {
    token[threadIdx.x] = -1;
    score[threadIdx.x] = -INFINITY;
  }
  for (int j = 0; j < op.top[row] && below != 0; ++j) {
    below = largest_below(at(op.logits, row), op.vocab, below, scratch);
    if (threadIdx.x != 0 || below == 0) continue;
    token[j] = token_of(below);
    score[j] = logprob(value_of(below));
  }
}

// Draws from the edited logits, of which `most` was the largest key before. `raw` becomes the drawn
// token's logit as it was.
__device__ int draw_edited(const Sample& op, int row, const Sampling& how, uint64_t most,
                           float& raw, Scratch& scratch) {
  __shared__ bool listed;
  float* logits = at(op.logits, row);
  const Edits edits(op, row);
  if (threadIdx.x == 0) listed = edits.last < 0;
  __syncthreads();  // the model's own logits have been read
  for (int i = edits.begin + int(threadIdx.x); i < edits.end; i += kThreads) {
    const LogitEdit edit = edits.at(i);
    logits[edit.token] = edited(logits[edit.token], edit, how);
    if (edit.token == edits.last) listed = true;
  }
  __syncthreads();  // the edits are made
  const bool adds = !listed;
  if (adds && threadIdx.x == 0) {
    logits[edits.last] = edited(logits[edits.last], edits.of_last(), how);
  }
  __syncthreads();  // that of the last token, too
  if (edits.begin != edits.end || adds) {
    most = largest_below(logits, op.vocab, ~uint64_t(0), scratch);
  }
  const int token = draw(logits, op.vocab, how, op.position[row], most, scratch);
  if (threadIdx.x == 0) raw = token >= 0 ? logits[token] : -INFINITY;
  __syncthreads();  // the drawn token's logit is there
  for (int i = edits.begin + int(threadIdx.x); i < edits.end; i += kThreads) {
    if (edits.at(i).token == token) raw = unedited(raw, edits.at(i), how);
  }
  if (adds && token == edits.last && threadIdx.x == 0) raw = unedited(raw, edits.of_last(), how);
  __syncthreads();  // its edit is undone
  return token;
}

// Any row. Apart, so that its registers are none of held rows'.
__device__ __forceinline__ void draw_any(const Sample& op, int row, Scratch& scratch) {
  __shared__ float raw;
  const float* logits = at(op.logits, row);
  const Sampling how = op.sampling[row];
  const uint64_t most = largest_below(logits, op.vocab, ~uint64_t(0), scratch);
  const float largest = most == 0 ? 0.0f : value_of(most);
  double sum = 0;
  each_logit<kThreads>(logits, threadIdx.x, op.vocab,
                       [&](int, float logit) { sum += expf(logit - largest); });
  sum = block_sum(sum, scratch);
  // A NaN or +inf among the logits shows in the sum: then this is no distribution.
  const bool usable = most != 0 && isfinite(sum);
  const auto logprob = [&](float logit) {
    return isfinite(logit) ? float(double(logit) - (double(largest) + log(sum))) : -INFINITY;
  };
  report_top(op, row, usable ? ~uint64_t(0) : 0, scratch, logprob);

  int token = -1;
  float score = 0;
  if (usable) {
    const Token target = op.target[row];
    token = target >= 0 ? target : draw_edited(op, row, how, most, raw, scratch);
    score = target >= 0 ? logprob(logits[target]) : token >= 0 ? logprob(raw) : -INFINITY;
  }
  if (threadIdx.x == 0) {
    op.token[row] = token;
    op.logprob[row] = score;
  }
}

__global__ __launch_bounds__(kThreads) void sample_kernel(const __grid_constant__ Sample op) {
  let_successor_start();
  __shared__ Scratch scratch;
  const int row = blockIdx.x;
  const bool held = held_row(op, row);
  wait_for_predecessor();
  if (held) {
    draw_held(op, row, scratch);
  } else {
    draw_any(op, row, scratch);
  }
}

}  // namespace

void run(const Sample& op, Context& context) {
  if (op.count == 0) return;
  launch(context, {.grid = dim3(op.count), .block = dim3(kThreads)}, sample_kernel, op);
}

}  // namespace weir::cuda
