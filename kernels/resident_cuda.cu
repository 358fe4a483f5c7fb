// The kernel of a decode step of few tokens: one block stays on each multiprocessor.
#include "kernels/device_memory.h"
#include "kernels/resident_copy_cuda.cuh"
#include "kernels/resident_linear_cuda.cuh"
#include "kernels/resident_mix_cuda.cuh"
#include "kernels/resident_narrow_cuda.cuh"
#include "kernels/resident_swila_cuda.cuh"

namespace weir::cuda::resident {
namespace {

// Weights do not depend on activations, so one warp keeps them coming, in the order in which the
// phases need them, through a ring of stages in shared memory: while a phase waits for what
// it reads, it fills. The other warps multiply on the tensor cores. A tile is eight rows of the
// stacked matrices; all tiles of all phases go round the blocks in turn, so that each has as much
// to read.
//
// A warp has the columns of every kWarps-th run of 32, for all tokens, in registers: as the left
// operand, of whose sixteen rows four are the tokens' high bf16 halves, four the low ones and eight
// nothing. The order of a sum depends on the matrix alone.
//
// Phases follow each other through words that say by themselves whether they have been written
// (Meeting): a phase begins where its x is there, whatever else other blocks still do. They are
// read past L1, which knows nothing of other blocks' stores.
//
// Floor: weights and states once.
// The describing warp: a phase's description is in shared memory one phase ahead, and what it reads
// besides weights in L2. Its addresses of words become those of the launch's half, `shift` further.
__device__ void shift_words(LinearPhase& l, int64_t shift) {
  if (l.x_left) l.x += shift;
  if (l.base_left) l.base += shift;
  if (l.gate != nullptr) l.gate += shift;
  if (l.left != nullptr) l.left += shift;
}
__device__ void shift_words(Acts& acts, int64_t shift) {
  if (acts.data != nullptr) acts.data += shift;
}
__device__ void shift_words(DeltaMix& op, int64_t s) {
  shift_words(op.q, s), shift_words(op.k, s), shift_words(op.v, s), shift_words(op.out, s);
  shift_words(op.decay_in, s), shift_words(op.beta, s);
  shift_words(op.erase, s), shift_words(op.write, s);
}
__device__ void shift_words(SwilaMix& op, int64_t s) {
  shift_words(op.q, s), shift_words(op.k, s), shift_words(op.v, s), shift_words(op.out, s);
  shift_words(op.key_router, s), shift_words(op.query_router, s), shift_words(op.beta, s);
  shift_words(op.key_mix, s), shift_words(op.query_mix, s), shift_words(op.decay_in, s);
}
__device__ void shift_words(NarrowPhase& l, int64_t shift) {
  for (int i = 0; i < l.layers; ++i) {
    l.layer[i].x += shift;
    if (l.layer[i].left != nullptr) l.layer[i].left += shift;
  }
}

// How many phases of each kind lie before one.
struct Counts {
  int linear = 0, narrow = 0, delta = 0, swila = 0;
};

template <typename T>
__device__ T& copy_phase(const T& from, uint32_t* to, int64_t shift) {
  const auto* words = reinterpret_cast<const uint32_t*>(&from);
  for (int i = threadIdx.x % 32; i < int(sizeof(T) / 4); i += 32) to[i] = words[i];
  __syncwarp();
  T& phase = *reinterpret_cast<T*>(to);
  if (threadIdx.x % 32 == 0) shift_words(phase, shift);
  __syncwarp();
  return phase;
}

template <typename Op>
__device__ void describe_mix(const Op& from, int d, int64_t shift, Shared& shared) {
  const Op& op = copy_phase(from, shared.phase[d], shift);
  if (const int lane = threadIdx.x % 32; lane < op.rows.count) {
    const int first = op.rows.first[lane];
    shared.rows[d][lane] = {op.rows.slot[lane], op.rows.begin[lane], first == 0,
                            ring_row(first, 3)};
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) share_out(op, shared.rows[d], shared.sharing[d]);
  __syncwarp();
  prefetch_mix(op, shared.sharing[d]);
}

__device__ void describe(const Table& table, int p, Counts& counts, int64_t shift,
                         Shared& shared) {
  if (p >= table.phases) return;
  const int d = p % 3;
  if (threadIdx.x % 32 == 0) shared.kind[d] = table.kind[p];
  if (table.kind[p] == Table::Kind::Narrow) {
    copy_phase(table.narrow[counts.narrow++], shared.phase[d], shift);
  } else if (table.kind[p] == Table::Kind::Linear) {
    const auto& l = copy_phase(table.linear[counts.linear++], shared.phase[d], shift);
    if (l.group > 0 && int(blockIdx.x) == p % int(gridDim.x)) prefetch(l.weight, l.group);
  } else if (table.kind[p] == Table::Kind::Delta) {
    describe_mix(table.delta[counts.delta++], d, shift, shared);
  } else {
    describe_mix(table.swila[counts.swila++], d, shift, shared);
  }
}

__device__ void describe_phases(const Table& table, uint32_t launch, Shared& shared) {
  const int64_t shift = launch % 2 == 0 ? 0 : Meeting::kWords;
  Counts counts;
#pragma unroll 1
  for (int p = 0; p < table.phases + 2; ++p) {
    describe(table, p, counts, shift, shared);
    // The first two are there; or as end_phase() of phase p - 2.
    if (p > 0) end_phase();
  }
}

__device__ void compute(const Table& table, Meeting& meeting, uint32_t launch) {
  const Shared& shared = shared_memory();
  const int dirty = meeting.used[(launch + 1) % 2];
  Walk walk;
  end_phase();  // the first description is there
  for (int p = 0; p < table.phases; ++p) {
    const Phase& phase = phase_of(p % 3);
    const Table::Kind kind = shared.kind[p % 3];
    if (kind == Table::Kind::Linear) {
      run_linear(phase.linear, walk);
    } else if (kind == Table::Kind::Narrow) {
      run_narrow(phase.narrow, walk);
    } else {
      if (kind == Table::Kind::Delta) {
        run_mix(phase.delta, shared.rows[p % 3], shared.sharing[p % 3]);
      } else {
        run_mix(phase.swila, shared.rows[p % 3], shared.sharing[p % 3]);
      }
      walk.late = true;
    }
    end_phase();
    if (p == 0) make_unwritten(meeting, launch, dirty);
  }
}

__device__ void store_phases(const Table& table, int o) {
  const Shared& shared = shared_memory();
  Walk walk;
  end_phase();
  for (int p = 0; p < table.phases; ++p) {
    const Phase& phase = phase_of(p % 3);
    const Table::Kind kind = shared.kind[p % 3];
    if (kind == Table::Kind::Linear) store_all(phase.linear, walk, o);
    if (kind == Table::Kind::Narrow) walk.leave_phase(walk.first, phase.narrow.tiles);
    end_phase();
  }
}

__global__ __launch_bounds__(kThreads, 1) void resident_kernel(const Table* __restrict__ table,
                                                                Meeting* meeting) {
  Shared& shared = shared_memory();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(shared.full + s), 1);
      barrier_init(shared_address(shared.free + s), kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();  // the barriers are there
  const uint32_t launch = meeting->launches[blockIdx.x];
  if (threadIdx.x >= kComputing) {
    if (threadIdx.x < kComputing + 32) {
      copy_weights(*table);
    } else if (threadIdx.x < kComputing + 64) {
      describe_phases(*table, launch, shared);
    } else {
      store_phases(*table, int(threadIdx.x) - kComputing - 64);
    }
    return;
  }
  compute(*table, *meeting, launch);
  if (threadIdx.x > 0) return;
  meeting->launches[blockIdx.x] = launch + 1;
  if (blockIdx.x == 0) meeting->used[launch % 2] = table->words;
}

}  // namespace

Meeting* make_meeting(const Context& context) {
  if (context.compute != 90 || context.multiprocessors > Meeting::kBlocks) return nullptr;
  auto* const meeting = static_cast<Meeting*>(device_memory(sizeof(Meeting)));
  WEIR_CUDA_CHECK(cudaMemset(meeting, 0, offsetof(Meeting, words)));
  static_assert(Meeting::kUnwritten == 0xffffffffu);
  WEIR_CUDA_CHECK(cudaMemset(meeting->words, 0xff, sizeof(Meeting::words)));
  return meeting;
}

Tables::~Tables() {
  for (void* data : memory_) cudaFree(data);
}

const Table* Tables::put(const Table& table, bool changed, cudaStream_t stream) {
  const bool fresh = next_ == memory_.size();
  if (fresh) memory_.push_back(device_memory(sizeof(Table)));
  void* data = memory_[next_++];
  if (fresh || changed) {
    WEIR_CUDA_CHECK(cudaMemcpyAsync(data, &table, sizeof(Table), cudaMemcpyHostToDevice, stream));
  }
  return static_cast<const Table*>(data);
}

void start(const Table* table, Context& context) {
  WEIR_CUDA_CHECK(cudaFuncSetAttribute(resident_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       int(sizeof(Shared))));
  cudaLaunchAttribute together;
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(context.multiprocessors);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = context.stream;
  config.attrs = &together;
  config.numAttrs = 1;
  WEIR_CUDA_CHECK(cudaLaunchKernelEx(&config, resident_kernel, table, context.meeting));
  context.follows = true;
}

}  // namespace weir::cuda::resident
