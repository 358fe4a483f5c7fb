#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// One block draws one token. Sets of tokens (the k most likely, the smallest set with probability
// p) are never sorted: an order is a 64-bit key, larger first, no two tokens share one, and the
// set's last key is found by halving the range of keys, one pass over the logits each time.
//
// Floor, greedy: the logits read once, 4 * vocab bytes.
constexpr int kThreads = 1024, kWarps = kThreads / 32;

struct Scratch {
  double sum[kWarps];
  unsigned long long key[kWarps];
};

__device__ double block_sum(double value, Scratch& scratch) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  __syncthreads();  // the scratch of the last use has been read
  if (threadIdx.x % 32 == 0) scratch.sum[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's sum is there
  double all = 0;
  for (int w = 0; w < kWarps; ++w) all += scratch.sum[w];
  return all;
}

__device__ uint64_t block_max(uint64_t value, Scratch& scratch) {
  for (int step = 16; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(0xffffffffu, (unsigned long long)value, step);
    value = other > value ? other : value;
  }
  __syncthreads();  // the scratch of the last use has been read
  if (threadIdx.x % 32 == 0) scratch.key[threadIdx.x / 32] = value;
  __syncthreads();  // every warp's largest is there
  uint64_t most = 0;
  for (int w = 0; w < kWarps; ++w) most = scratch.key[w] > most ? scratch.key[w] : most;
  return most;
}

// Larger numbers have larger keys, equal ones are ordered by token, the smaller first. 0 is the
// key of no token.
__device__ uint64_t key_of(float value, int token) {
  const uint32_t bits = __float_as_uint(value == 0 ? 0.0f : value);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(ordered) << 32 | (0xffffffffu - uint32_t(token));
}
__device__ int token_of(uint64_t key) { return int(0xffffffffu - uint32_t(key)); }
__device__ float value_of(uint64_t key) {
  const auto ordered = uint32_t(key >> 32);
  return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// The key of the largest logit below `below`; 0 when there is none.
__device__ uint64_t largest_below(const float* logits, int vocab, uint64_t below,
                                  Scratch& scratch) {
  uint64_t most = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) {
    if (!isfinite(logits[i])) continue;
    const uint64_t key = key_of(logits[i], i);
    if (key < below && key > most) most = key;
  }
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

  __device__ float log_weight(int i) const { return (logits[i] - most) / temperature; }
  __device__ float weight(int i) const { return expf(log_weight(i)); }
  __device__ uint64_t key(int i) const { return key_of(logits[i], i); }
  __device__ uint64_t typical_key(int i) const {
    return key_of(-fabsf(log_total - log_weight(i) - entropy), i);
  }
  __device__ bool keeps(int i) const {
    return isfinite(logits[i]) && key(i) >= least &&
           (!typical || typical_key(i) >= least_typical) && weight(i) >= least_weight;
  }
};

// The largest key with which the sum of measure(i) over all kept tokens of this key or a larger
// one reaches the goal; 1 when it never does.
template <typename Key, typename Measure>
__device__ uint64_t reach(const Candidates& set, double goal, bool beyond, Scratch& scratch,
                          const Key& key, const Measure& measure) {
  uint64_t low = 1, high = ~uint64_t(0);
  while (low < high) {
    const uint64_t middle = high - (high - low) / 2;
    double sum = 0;
    for (int i = threadIdx.x; i < set.vocab; i += kThreads) {
      if (set.keeps(i) && key(i) >= middle) sum += measure(i);
    }
    sum = block_sum(sum, scratch);
    if (beyond ? sum > goal : sum >= goal) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename Measure>
__device__ double total(const Candidates& set, Scratch& scratch, const Measure& measure) {
  double sum = 0;
  for (int i = threadIdx.x; i < set.vocab; i += kThreads) {
    if (set.keeps(i)) sum += measure(i);
  }
  return block_sum(sum, scratch);
}

// Uniform in [0, 1): the number that the CPU draws.
__device__ double uniform(uint64_t seed, int32_t position) {
  const auto mix = [](uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  };
  const uint64_t bits = mix(mix(seed + 0x9E3779B97F4A7C15ull) +
                            uint64_t(uint32_t(position)) * 0xD1342543DE82EF95ull);
  return double(bits >> 11) * 0x1.0p-53;
}

__device__ void filter(Candidates& set, const Sampling& how, Scratch& scratch) {
  const auto key = [&](int i) { return set.key(i); };
  const auto weight = [&](int i) { return double(set.weight(i)); };
  if (how.top_k > 0 && how.top_k < set.vocab) {
    set.least = reach(set, how.top_k, false, scratch, key, [](int) { return 1.0; });
  }
  if (how.typical_p < 1) {
    const double all = total(set, scratch, weight);
    set.log_total = float(log(all));
    set.entropy = float(total(set, scratch, [&](int i) {
      return set.weight(i) / all * (set.log_total - set.log_weight(i));
    }));
    const uint64_t least = reach(
        set, how.typical_p * all, false, scratch, [&](int i) { return set.typical_key(i); },
        weight);
    set.least_typical = least;
    set.typical = true;
  }
  if (how.top_p < 1) {
    const double all = total(set, scratch, weight);
    set.least = reach(set, how.top_p * all, false, scratch, key, weight);
  }
  if (how.min_p > 0) {
    uint64_t most = 0;
    for (int i = threadIdx.x; i < set.vocab; i += kThreads) {
      if (set.keeps(i) && set.key(i) > most) most = set.key(i);
    }
    most = block_max(most, scratch);
    set.least_weight = how.min_p * expf((value_of(most) - set.most) / set.temperature);
  }
}

// `most`: the key of the largest logit.
__device__ int draw(const float* logits, int vocab, const Sampling& how, int32_t position,
                    uint64_t most, Scratch& scratch) {
  if (most == 0) return -1;
  if (how.temperature <= 0) return token_of(most);
  Candidates set{.logits = logits, .vocab = vocab, .most = value_of(most),
                 .temperature = how.temperature};
  filter(set, how, scratch);
  const auto weight = [&](int i) { return double(set.weight(i)); };
  const double goal = uniform(how.seed, position) * total(set, scratch, weight);
  // From the most likely one on where a filter has put them in order, else from the first.
  const bool ordered = how.top_k > 0 || how.typical_p < 1 || how.top_p < 1;
  const auto key = [&](int i) { return ordered ? set.key(i) : key_of(0, i); };
  return token_of(reach(set, goal, true, scratch, key, weight));
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

__global__ __launch_bounds__(kThreads) void sample_kernel(const __grid_constant__ Sample op) {
  let_successor_start();
  wait_for_predecessor();
  __shared__ Scratch scratch;
  __shared__ float raw;
  const int output = blockIdx.x, vocab = op.vocab;
  float* logits = at(op.logits, output);
  const Sampling how = op.sampling[output];

  const uint64_t most = largest_below(logits, vocab, ~uint64_t(0), scratch);
  const float largest = most == 0 ? 0.0f : value_of(most);
  double sum = 0;
  for (int i = threadIdx.x; i < vocab; i += kThreads) sum += expf(logits[i] - largest);
  sum = block_sum(sum, scratch);
  // A NaN or +inf among the logits shows in the sum: then this is no distribution.
  const bool usable = most != 0 && isfinite(sum);
  const auto logprob = [&](float logit) {
    return isfinite(logit) ? float(double(logit) - (double(largest) + log(sum))) : -INFINITY;
  };

  uint64_t below = usable ? ~uint64_t(0) : 0;
  for (int j = 0; j < Sample::kTop; ++j) {
    const bool wanted = j < op.top[output] && below != 0;
    if (wanted) below = largest_below(logits, vocab, below, scratch);
    if (threadIdx.x == 0) {
      const bool there = wanted && below != 0;
      op.top_token[output * Sample::kTop + j] = there ? token_of(below) : -1;
      op.top_logprob[output * Sample::kTop + j] = there ? logprob(value_of(below)) : -INFINITY;
    }
  }

  int token = op.target[output];
  if (!usable) {
    if (threadIdx.x == 0) {
      op.token[output] = -1;
      op.logprob[output] = 0;
    }
    return;
  }
  if (token >= 0) {
    if (threadIdx.x == 0) {
      op.token[output] = token;
      op.logprob[output] = logprob(logits[token]);
    }
    return;
  }
  const int begin = op.edit_begin[output], end = op.edit_begin[output + 1];
  __syncthreads();  // the model's own logits have been read
  for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
    const LogitEdit edit = op.edits[i];
    logits[edit.token] = edited(logits[edit.token], edit, how);
  }
  __syncthreads();  // the edits are made
  const uint64_t key =
      begin == end ? most : largest_below(logits, vocab, ~uint64_t(0), scratch);
  token = draw(logits, vocab, how, op.position[output], key, scratch);
  if (threadIdx.x == 0) raw = token >= 0 ? logits[token] : -INFINITY;
  __syncthreads();  // the drawn token's logit is there
  for (int i = begin + int(threadIdx.x); i < end; i += kThreads) {
    if (op.edits[i].token == token) raw = unedited(raw, op.edits[i], how);
  }
  __syncthreads();  // its edit is undone
  if (threadIdx.x == 0) {
    op.token[output] = token;
    op.logprob[output] = token >= 0 ? logprob(raw) : -INFINITY;
  }
}

}  // namespace

void run(const Sample& op, Context& context) {
  if (op.count == 0) return;
  launch(context, {.grid = dim3(op.count), .block = dim3(kThreads)}, sample_kernel, op);
}

}  // namespace weir::cuda
