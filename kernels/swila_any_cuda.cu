#include "kernels/swila_mix_cuda.cuh"

namespace weir::cuda::swila {
namespace {

// Any number of mixtures, dim and width of the convolution: one block a head, the state stays where
// it is, a warp takes one value dim after the other.
//
// Floor, one token a row: as swila_mix_cuda.cuh says; moved twice, from cache where it fits.
constexpr int kThreads = 256;

// Where the block is.
struct Head {
  int head, begin, first;  // the row's first token and its position
  Slot slot;

  __device__ bool fresh() const { return first == 0; }
};

struct Vectors {
  float *q, *k, *v, *out;       // [dim]
  float *decay, *key, *query;   // [mixtures, dim]: exp(g); prior, then posterior; rho
  float* delta;                 // [mixtures, dim]

  static size_t bytes(const SwilaMix& op) {
    return size_t(4 * op.dim) * size_t(1 + op.mixtures) * sizeof(float);
  }
  __device__ Vectors(const SwilaMix& op, float* s)
      : q(s), k(q + op.dim), v(k + op.dim), out(v + op.dim), decay(out + op.dim),
        key(decay + op.mixtures * op.dim), query(key + op.mixtures * op.dim),
        delta(query + op.mixtures * op.dim) {}
};

// Of the row's token t, which may be before it.
__device__ float* kept_at(const SwilaMix& op, const Head& place, int group, int t,
                          int64_t column) {
  const int64_t all = int64_t(op.heads) * op.dim;
  const int row = ring_row(place.first + t, op.conv_width - 1);
  return at(op.history, place.slot) + (row * 3 * all + group * all + column);
}
__device__ float input(const SwilaMix& op, const Head& place, const Acts& in, int group, int t,
                       int64_t column) {
  if (t >= 0) return at(in, place.begin + t)[column];
  return place.fresh() ? 0.0f : *kept_at(op, place, group, t, column);
}

// Thread i owns the channels i, i + kThreads, ... of q, k and v, also in remember_any().
template <typename Work>
__device__ void each_channel(const SwilaMix& op, const Head& place, const Work& work) {
  for (int i = threadIdx.x; i < 3 * op.dim; i += kThreads) {
    const int group = i / op.dim, c = i % op.dim;
    const Acts in = group == 0 ? op.q : group == 1 ? op.k : op.v;
    work(i, group, in, int64_t(place.head) * op.dim + c);
  }
}

__device__ void prepare_any(const SwilaMix& op, const Head& place, int t, const Vectors& s) {
  each_channel(op, place, [&](int i, int group, const Acts& in, int64_t column) {
    const float* taps = group == 0 ? op.conv_q : group == 1 ? op.conv_k : op.conv_v;
    float sum = 0;
    for (int j = 0; j < op.conv_width; ++j) {
      sum += taps[column * op.conv_width + j] *
             input(op, place, in, group, t - (op.conv_width - 1) + j, column);
    }
    s.q[i] = sum * sigmoid(sum);  // k and v follow q
  });
  const int64_t token = place.begin + t, head = int64_t(place.head) * op.dim;
  const auto mix = [&](const Acts& router, const Acts& gate, const SlotState& kept, float* last,
                       int d) {
    const float* logits = at(router, token) + head * op.mixtures + d;
    float largest = logits[0], sum = 0;
    for (int j = 1; j < op.mixtures; ++j) largest = fmaxf(largest, logits[j * op.dim]);
    for (int j = 0; j < op.mixtures; ++j) sum += expf(logits[j * op.dim] - largest);
    const float g = gate.data == nullptr ? 1.0f : sigmoid(at(gate, token)[head + d]);
    for (int j = 0; j < op.mixtures; ++j) {
      float p = expf(logits[j * op.dim] - largest) / sum;
      if (gate.data != nullptr) {
        float before = last[j * op.dim + d];
        if (t == 0) {
          before = place.fresh() ? 1.0f / float(op.mixtures)
                               : at(kept, place.slot)[(head * op.mixtures) + j * op.dim + d];
        }
        p = (1.0f - g) * before + g * p;
      }
      last[j * op.dim + d] = p;
    }
  };
  for (int d = threadIdx.x; d < op.dim; d += kThreads) {
    mix(op.key_router, op.key_mix, op.posterior, s.key, d);
    mix(op.query_router, op.query_mix, op.prior, s.query, d);
  }
  for (int i = threadIdx.x; i < op.mixtures * op.dim; i += kThreads) {
    float decay = 1;
    if (op.gated) {
      const int64_t in = head * op.mixtures + i;
      const float a = op.decay_a[place.head * op.mixtures + i / op.dim];
      decay = expf(-a * softplus(at(op.decay_in, token)[in] + op.dt_bias[in]));
    }
    s.decay[i] = decay;
  }
}

__device__ float l2_scale_any(const float* x, int dim) {
  float sum = 0;
  for (int i = threadIdx.x % 32; i < dim; i += 32) sum += x[i] * x[i];
  return 1.0f / sqrtf(sum_over_lanes(sum) + 1e-6f);
}

// One value dim d of one token, by one warp: `state` of the head, `beta` its logits.
__device__ float step_any(const SwilaMix& op, const float* beta, float* state, bool zero, int d,
                          float k_scale, float q_scale, const Vectors& s) {
  const int D = op.dim, lane = threadIdx.x % 32;
  float largest = -INFINITY;
  for (int j = 0; j < op.mixtures; ++j) {
    const float* row = state + (int64_t(j) * D + d) * D;
    float recalled = 0;
    for (int e = lane; e < D && !zero; e += 32) recalled += row[e] * s.decay[j * D + e] * s.k[e];
    const float delta = s.v[d] - sum_over_lanes(recalled) * k_scale;
    const float logit = logf(s.key[j * D + d]) - delta * delta / 2;
    largest = fmaxf(largest, logit);
    __syncwarp();  // every lane has read the prior
    if (lane == 0) {
      s.delta[j * D + d] = delta;
      s.key[j * D + d] = logit;
    }
  }
  __syncwarp();  // all logits are there
  float sum = 0, answer = 0;
  for (int j = 0; j < op.mixtures; ++j) sum += expf(s.key[j * D + d] - largest);
  for (int j = 0; j < op.mixtures; ++j) {
    float* row = state + (int64_t(j) * D + d) * D;
    const float posterior = expf(s.key[j * D + d] - largest) / sum;
    const float u = sigmoid(beta[j * D + d]) * posterior * s.delta[j * D + d] * k_scale;
    float part = 0;
    for (int e = lane; e < D; e += 32) {
      row[e] = (zero ? 0.0f : row[e] * s.decay[j * D + e]) + u * s.k[e];
      part += row[e] * s.q[e];
    }
    answer += s.query[j * D + d] * part;
    __syncwarp();  // every lane has read the logit
    if (lane == 0) s.key[j * D + d] = posterior;
  }
  return sum_over_lanes(answer) * q_scale;
}

// The last inputs join the history, conv_width - 1 at most. The temporal layers' distributions are
// kept too.
__device__ void remember_any(const SwilaMix& op, const Head& place, int tokens,
                             const Vectors& s) {
  each_channel(op, place, [&](int, int group, const Acts& in, int64_t column) {
    for (int t = tokens - (op.conv_width - 1); t < tokens; ++t) {
      if (t < 0 && !place.fresh()) continue;  // it is there
      *kept_at(op, place, group, t, column) = input(op, place, in, group, t, column);
    }
  });
  if (op.key_mix.data == nullptr) return;
  const int64_t mixed = int64_t(place.head) * op.mixtures * op.dim;
  for (int i = threadIdx.x; i < op.mixtures * op.dim; i += kThreads) {
    at(op.posterior, place.slot)[mixed + i] = s.key[i];
    at(op.prior, place.slot)[mixed + i] = s.query[i];
  }
}

__global__ __launch_bounds__(kThreads) void swila_mix_any_kernel(
    const __grid_constant__ SwilaMix op) {
  extern __shared__ float space[];
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int tokens = op.rows.begin[row + 1] - begin;
  const Slot slot = op.rows.slot[row];
  if (slot == kPadding || tokens == 0) return;
  const Head place{.head = int(blockIdx.x), .begin = begin, .first = op.rows.first[row],
                   .slot = slot};
  const Vectors s(op, space);
  const int D = op.dim, warp = threadIdx.x / 32;
  const int64_t head = int64_t(place.head) * D;
  for (int t = 0; t < tokens; ++t) {
    prepare_any(op, place, t, s);
    __syncthreads();  // the token's vectors are there
    const float k_scale = l2_scale_any(s.k, D), q_scale = l2_scale_any(s.q, D);
    for (int d = warp; d < D; d += kThreads / 32) {
      const float answer =
          step_any(op, at(op.beta, begin + t) + head * op.mixtures,
                   at(op.state, slot) + head * op.mixtures * D, place.fresh() && t == 0, d, k_scale,
                   q_scale, s);
      if (threadIdx.x % 32 == 0) s.out[d] = answer;
    }
    __syncthreads();  // all outputs are there
    float squares = 0;
    for (int i = threadIdx.x % 32; i < D; i += 32) squares += s.out[i] * s.out[i];
    const float scale = 1.0f / sqrtf(sum_over_lanes(squares) / float(D) + op.norm_eps);
    for (int d = threadIdx.x; d < D; d += kThreads) {
      at(op.out, begin + t)[head + d] = s.out[d] * scale * op.norm_weight[d];
    }
  }
  remember_any(op, place, tokens, s);
}

}  // namespace

void run_any(const SwilaMix& op, Context& context) {
  WEIR_CHECK(refusal(op) == nullptr);
  const size_t shared = Vectors::bytes(op);
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(
      swila_mix_any_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  launch(context,
         {.grid = dim3(op.heads, op.rows.count), .block = dim3(kThreads), .shared = shared},
         swila_mix_any_kernel, op);
}

}  // namespace weir::cuda::swila

namespace weir::cuda {

const char* refusal(const SwilaMix& op) {
  return swila::Vectors::bytes(op) <= 200 * 1024
             ? nullptr
             : "swila_mix of heads whose vectors take more than 200 KiB";
}

}  // namespace weir::cuda
