#pragma once
#include "kernels/outer_chunk_layout.cuh"

// What all warps of a block do with a tile: from numbers as they lie in device memory to the halves
// that the state meets.
namespace weir::cuda::adding {

__device__ inline void store_halves(half* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack(x.x, x.y), pack(x.z, x.w)};
}

// One head's log decay and its factor of the values, a token for each lane.
struct Gates {
  float log_decay = 0, written = 0;

  __device__ void load(const OuterStep& op, const Place& place, int head, int token) {
    log_decay = written = 0;
    if (token >= place.count) return;
    const int64_t t = place.begin + token;
    if (op.decay == OuterStep::Decay::PerHead) log_decay = at(op.log_decay, t)[head];
    if (op.decay == OuterStep::Decay::Constant) log_decay = op.constant[head];
    written = op.v_scale.data == nullptr ? 1.0f : at(op.v_scale, t)[head];
  }
};

// kPer = K / 32 channels of a token in each lane.
template <int K>
struct Channels {
  static constexpr int kPer = K / 32;
  alignas(16) float x[kPer];

  __device__ void load(const float* row) {
    constexpr int kWide = kPer < 4 ? kPer : 4;
#pragma unroll
    for (int i = 0; i < kPer; i += kWide) {
      const float* from = row + 32 * i + threadIdx.x % 32 * kWide;
      if constexpr (kWide == 4) {
        *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from);
      } else if constexpr (kWide == 2) {
        *reinterpret_cast<float2*>(x + i) = *reinterpret_cast<const float2*>(from);
      } else {
        x[i] = *from;
      }
    }
  }
};

template <class L>
struct Preparer {
  static constexpr int K = L::K;
  const OuterStep& op;
  const Place& place;
  L& shared;

  // Dim columns of a tile's tokens on their way; zeros behind the row's end.
  template <int kDim>
  __device__ void load(const Acts& acts, int64_t column, int first, float* to) const {
    constexpr int kPieces = kDim / 4;
    const float* const from = at(acts, place.begin) + column;
#pragma unroll
    for (int i = threadIdx.x; i < kTokens * kPieces; i += L::kThreads) {
      const int t = i / kPieces, c = i % kPieces * 4;
      const bool valid = first + t < place.count;
      copy_16_or_zeros(to + 4 * i, from + (valid ? first + t : 0) * acts.stride + c, valid);
    }
  }
  __device__ void load_tile(int first) const {
    if constexpr (!L::kGather) load<K>(op.q, place.query * K, first, shared.raw_q);
    load<K>(op.k, place.key_head * K, first, shared.raw_k);
    if constexpr (L::kKey) load<K>(op.log_decay, place.key_head * K, first, shared.decay);
    if constexpr (L::kValue) {
      load<L::kValues>(op.log_decay, place.value_column, first, shared.decay);
    }
    load<L::kValues>(op.v, place.value_column, first, shared.raw_v);
    copies_commit();
  }

  template <int kDim>
  __device__ static void narrow_tile(const float* from, int pitch, float scale, half* to) {
    constexpr int kPieces = kDim / 4;
#pragma unroll
    for (int i = threadIdx.x; i < kTokens * kPieces; i += L::kThreads) {
      const float4 x = reinterpret_cast<const float4*>(from)[i];
      store_halves(to + i / kPieces * pitch + i % kPieces * 4, scaled(x, scale));
    }
  }

  __device__ void narrow_values() const {
    narrow_tile<L::kValues>(shared.raw_v, L::kValuePitch, 1.0f, shared.v);
  }
  __device__ void narrow_keys() const {
    if constexpr (!L::kGather) narrow_tile<K>(shared.raw_q, L::kKeyPitch, op.scale, shared.q);
    narrow_tile<K>(shared.raw_k, L::kKeyPitch, 1.0f, shared.k);
  }

  // Of the h-th head, by one warp: L within each chunk and what follows from it.
  __device__ void keep_gates(const Gates& gates, int h) const {
    const int lane = threadIdx.x % 32;
    float sum = kLog2E * gates.log_decay;
#pragma unroll
    for (int step = 1; step < kBlock; step *= 2) {
      const float before = __shfl_up_sync(0xffffffffu, sum, step, kBlock);
      if (lane % kBlock >= step) sum += before;
    }
    const float last = __shfl_sync(0xffffffffu, sum, kBlock - 1, kBlock);
    shared.logs[h][lane] = sum;
    shared.written[h][lane] = gates.written;
    shared.asked[h][lane] = exp2_fast(sum);
    shared.kept[h][lane] = gates.written * exp2_fast(last - sum);
    if (lane % kBlock == 0) shared.whole[h * kBlocks + lane / kBlock] = exp2_fast(last);
  }

  // P of chunk m, by one warp.
  __device__ void products(int m) const {
    float sums[2][2][4] = {};  // even and odd runs of keys; tokens s 0 .. 7 and 8 .. 15
    const uint32_t asked = rows_of_a(shared.q + m * kBlock * L::kKeyPitch, L::kKeyPitch);
    const uint32_t keys = rows_of_b(shared.k + m * kBlock * L::kKeyPitch, L::kKeyPitch);
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      uint32_t q[4], k[4];
      load_matrices(q, asked + 32 * i);
      load_matrices(k, keys + 32 * i);
      multiply(sums[i % 2][0], q, k[0], k[1]);
      multiply(sums[i % 2][1], q, k[2], k[3]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[0][n][i] += sums[1][n][i];
    }
    if constexpr (L::kValue) {
      keep_wide(m, sums[0]);
    } else {
      for (int h = 0; h < place.heads; ++h) keep_decayed(m, h, sums[0]);
    }
  }

  // The products of chunk m, [t, s], as head h takes them.
  __device__ void keep_decayed(int m, int h, const float (&sums)[2][4]) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
    const float *logs = shared.logs[h] + m * kBlock, *written = shared.written[h] + m * kBlock;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half_row = 0; half_row < 2; ++half_row) {
        const int t = g + 8 * half_row, s = 8 * n + p;
        float P[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float decay = exp2_fast(logs[t] - logs[s + i]) * written[s + i];
          P[i] = s + i <= t ? sums[n][2 * half_row + i] * decay : 0.0f;
        }
        *reinterpret_cast<uint32_t*>(
            &shared.p[h][(m * kBlock + t) * L::kBlockPitch + s]) = pack(P[0], P[1]);
      }
    }
  }
  __device__ void keep_wide(int m, const float (&sums)[2][4]) const {
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = g + i / 2 * 8, s = 8 * n + p + i % 2;
        shared.p_wide[(m * kBlock + s) * kBlock + t] = sums[n][i];
      }
    }
  }

  // A chunk's numbers of one channel, asked for together where registers are plenty: a store might,
  // for all the compiler knows, change what the next load reads.
  struct Column {
    static constexpr bool kTogether = L::kResident == 1;
    const float* from;
    int pitch;
    float x[kTogether ? kBlock : 1];

    __device__ Column(const float* from, int pitch) : from(from), pitch(pitch) {
      if constexpr (kTogether) {
#pragma unroll
        for (int t = 0; t < kBlock; ++t) x[t] = from[t * pitch];
      }
    }
    __device__ float operator[](int t) const { return kTogether ? x[t] : from[t * pitch]; }
  };

  // Per key: each thread has one channel of one chunk. The factors are products of single decays
  // from the chunk's start on and up to its end: none is above 1.
  __device__ void decay_keys() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlocks * K; i += L::kThreads) {
      const int m = i / K, channel = i % K, column = m * kBlock * K + channel;
      half* const q = &shared.q[m * kBlock * L::kKeyPitch + channel];
      half* const k = &shared.k[m * kBlock * L::kKeyPitch + channel];
      float decay[kBlock];
#pragma unroll
      for (int t = 0; t < kBlock; ++t) decay[t] = shared.decay[column + t * K];
      if constexpr (L::kGather) {
#pragma unroll
        for (int t = 0; t < kBlock; ++t) decay[t] = exp2_fast(kLog2E * decay[t]);
      } else {
        const Column raw_q(shared.raw_q + column, K);
        half* const later = &shared.later_q[8 * m * L::kKeyPitch + channel];
        float since = op.scale, since_half = op.scale;
#pragma unroll
        for (int t = 0; t < kBlock; ++t) {
          const float x = raw_q[t];
          decay[t] = exp2_fast(kLog2E * decay[t]);
          shared.decay[column + t * K] = decay[t];
          since *= decay[t];
          q[t * L::kKeyPitch] = to_half(x * since);
          if (t < 8) continue;
          since_half *= decay[t];
          later[(t - 8) * L::kKeyPitch] = to_half(x * since_half);
        }
      }
      const Column raw_k(shared.raw_k + column, K);
      half* const earlier = &shared.earlier_k[L::kGather ? 0 : 8 * m * L::kKeyPitch + channel];
      float until = 1, until_half = 1;
#pragma unroll
      for (int t = kBlock - 1; t >= 0; --t) {
        const float x = raw_k[t];
        k[t * L::kKeyPitch] = to_half(x * until);
        until *= decay[t];
        if (L::kGather || t >= 8) continue;
        earlier[t * L::kKeyPitch] = to_half(x * until_half);
        until_half *= decay[t];
      }
      shared.whole[i] = until;
    }
  }
  __device__ static half to_half(float x) {
    return __ushort_as_half(static_cast<unsigned short>(pack(x, 0.0f)));
  }

  // Per value, likewise: one value of one chunk for each thread.
  __device__ void decay_values() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlocks * L::kValues; i += L::kThreads) {
      const int m = i / L::kValues, value = i % L::kValues;
      const int column = m * kBlock * L::kValues + value;
      float decay[kBlock], since = 1, until = 1;
#pragma unroll
      for (int t = 0; t < kBlock; ++t) decay[t] = shared.decay[column + t * L::kValues];
#pragma unroll
      for (int t = 0; t < kBlock; ++t) {
        decay[t] = exp2_fast(kLog2E * decay[t]);
        if constexpr (L::kGather) continue;
        shared.decay[column + t * L::kValues] = decay[t];
        since *= decay[t];
        shared.since[column + t * L::kValues] = since;
      }
      const Column raw_v(shared.raw_v + column, L::kValues);
#pragma unroll
      for (int t = kBlock - 1; t >= 0; --t) {
        shared.v[(m * kBlock + t) * L::kValuePitch + value] = to_half(raw_v[t] * until);
        until *= decay[t];
      }
      shared.whole[i] = until;
    }
  }

  // Once a tile is ready: its decays to those of the whole segment.
  __device__ void add_to_total() const {
    static_assert(kBlocks == 2);
    if constexpr (L::kHead) {
      const int h = threadIdx.x;
      const float* const whole = &shared.whole[h * kBlocks];
      if (!L::kSum && h < place.heads) shared.total[h] *= whole[0] * whole[1];
    } else {
      for (int i = threadIdx.x; i < L::kChannels; i += L::kThreads) {
        shared.total[i] *= shared.whole[i] * shared.whole[L::kChannels + i];
      }
    }
  }
  // By the threads that made it.
  __device__ void keep_total(float* to) const {
    const int count = L::kHead ? place.heads : L::kChannels;
    for (int i = threadIdx.x; i < count; i += L::kThreads) to[i] = shared.total[i];
  }

  // Per value, by the same threads: what a chunk's own tokens answer. What each of them wrote is
  // decayed on from token to token while it is read.
  __device__ void own_answers() const {
#pragma unroll 1
    for (int i = threadIdx.x; i < kBlocks * L::kValues; i += L::kThreads) {
      const int m = i / L::kValues, value = i % L::kValues;
      const auto at_token = [&](int t) { return (m * kBlock + t) * L::kValues + value; };
      float decay[kBlock], sums[kBlock];
#pragma unroll
      for (int t = 0; t < kBlock; ++t) {
        decay[t] = shared.decay[at_token(t)];
        sums[t] = 0;
      }
#pragma unroll
      for (int s = 0; s < kBlock; ++s) {
        const float* const P = &shared.p_wide[(m * kBlock + s) * kBlock];
        float written = shared.raw_v[at_token(s)];
#pragma unroll
        for (int t = s; t < kBlock; ++t) {
          if (t > s) written *= decay[t];
          sums[t] += P[t] * written;
        }
      }
#pragma unroll
      for (int t = 0; t < kBlock; ++t) shared.own[at_token(t)] = sums[t];
    }
  }

  // Per key, P on its diagonal: columns s and 7 - s of the block of 8 tokens from `first` on, nine
  // numbers together, by one warp. A column's key is decayed on from token to token while the
  // queries meet it; a lane has K / 32 channels.
  __device__ void columns(int first, int s) const {
    constexpr int kPer = Channels<K>::kPer;
    const int lane = threadIdx.x % 32, turn = 8 - s;  // steps of the first column
    Channels<K> key, other;
    key.load(&shared.raw_k[(first + s) * K]);
    other.load(&shared.raw_k[(first + turn - 1) * K]);
    float sums[8], last = 0;
#pragma unroll
    for (int n = 0; n <= 8; ++n) {
      const int t = first + (n < turn ? s + n : n - 1);
      Channels<K> q, decay;
      q.load(&shared.raw_q[t * K]);
      decay.load(&shared.decay[t * K]);
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        if (n > 0) key.x[i] = n == turn ? other.x[i] : key.x[i] * decay.x[i];
        sum += q.x[i] * key.x[i];
      }
      if (n < 8) {
        sums[n] = sum;
      } else {
        last = sum;
      }
    }
    const float all = sum_over_groups<8>(scatter_sums(sums));  // lane n: the n-th, of 8 lanes
    last = sum_over_lanes(last);
    if (lane > 8) return;
    const int t = lane < turn ? s + lane : lane - 1, column = lane < turn ? s : turn - 1;
    shared.p[0][(first + t) * L::kBlockPitch + first % kBlock + column] =
        to_half(op.scale * (lane < 8 ? all : last));
  }
  // And below it: the later half's queries meet the earlier half's keys, of both chunks by one
  // warp; products of one chunk with the other are left alone.
  __device__ void below_diagonal() const {
    static_assert(kBlocks == 2 && kBlock == 16);
    float sums[2][4] = {};
    const uint32_t asked = rows_of_a(shared.later_q, L::kKeyPitch);
    const uint32_t keys = rows_of_b(shared.earlier_k, L::kKeyPitch);
#pragma unroll
    for (int i = 0; i < K / 16; ++i) {
      uint32_t q[4], k[4];
      load_matrices(q, asked + 32 * i);
      load_matrices(k, keys + 32 * i);
      multiply(sums[0], q, k[0], k[1]);
      multiply(sums[1], q, k[2], k[3]);
    }
    const int g = threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      *reinterpret_cast<uint32_t*>(&shared.p[0][(m * kBlock + 8 + g) * L::kBlockPitch + p]) =
          pack(sums[m][2 * m], sums[m][2 * m + 1]);
    }
  }
  __device__ void all_products() const {
    const int warp = threadIdx.x / 32;
    if (warp == 7) below_diagonal();
#pragma unroll 1
    for (int i = warp; i < kTokens / 8 * 4; i += 8) columns(i / 4 * 8, i % 4);
  }
};

}  // namespace weir::cuda::adding
