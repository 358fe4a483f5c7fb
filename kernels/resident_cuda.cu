// The kernel of a decode step of few tokens: one block stays on each multiprocessor.
#include "kernels/resident_linear_cuda.cuh"
#include "kernels/resident_mix_cuda.cuh"

namespace weir::cuda::resident {
namespace {

// Weights do not depend on activations, so one warp keeps them coming, in the order in which the
// phases need them, through a ring of stages in shared memory: while the blocks meet between two
// phases, it fills. The other warps multiply on the tensor cores. A tile is eight rows of the
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
__device__ void shift_words(DeltaMix& op, int64_t shift) {
  const auto move = [shift](Acts& acts) {
    if (acts.data != nullptr) acts.data += shift;
  };
  move(op.q), move(op.k), move(op.v), move(op.decay_in);
  move(op.beta), move(op.erase), move(op.write), move(op.out);
}

__device__ void describe(const Table& table, int p, int& linear, int& mix, int64_t shift,
                         Shared& shared) {
  if (p >= table.phases) return;
  const bool is_mix = table.is_mix[p];
  const auto* from = is_mix ? reinterpret_cast<const uint32_t*>(&table.mix[mix])
                            : reinterpret_cast<const uint32_t*>(&table.linear[linear]);
  const int words = int((is_mix ? sizeof(DeltaMix) : sizeof(LinearPhase)) / 4);
  for (int i = threadIdx.x % 32; i < words; i += 32) shared.phase[p % 3][i] = from[i];
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    auto& phase = *reinterpret_cast<Phase*>(shared.phase[p % 3]);
    shared.is_mix[p % 3] = is_mix;
    if (is_mix) {
      shift_words(phase.mix, shift);
    } else {
      shift_words(phase.linear, shift);
    }
  }
  if (is_mix) {
    const DeltaMix& op = table.mix[mix++];
    if (const int row = threadIdx.x % 32; row < op.rows.count) {
      shared.rows[p % 3][row] = {op.rows.slot[row], op.rows.begin[row], op.rows.first[row] == 0};
    }
    prefetch_mix(op);
  } else if (const LinearPhase& l = table.linear[linear++];
             l.group > 0 && int(blockIdx.x) == p % int(gridDim.x)) {
    prefetch(l.weight, l.group);
  }
}

__device__ void describe_phases(const Table& table, uint32_t launch, Shared& shared) {
  const int64_t shift = launch % 2 == 0 ? 0 : Meeting::kWords;
  int linear = 0, mix = 0;
#pragma unroll 1
  for (int p = 0; p < table.phases + 2; ++p) {
    describe(table, p, linear, mix, shift, shared);
    // The first two are there; or as end_phase() of phase p - 2.
    if (p > 0) barrier_among<kDescribed>(kComputing + 32);
  }
}

__device__ void compute(const Table& table, Meeting& meeting, uint32_t launch) {
  const Shared& shared = shared_memory();
  const int dirty = meeting.used[(launch + 1) % 2];
  Walk walk;
  barrier_among<kDescribed>(kComputing + 32);
  for (int p = 0; p < table.phases; ++p) {
    const Phase& phase = phase_of(p % 3);
    if (shared.is_mix[p % 3]) {
      run_mix(phase.mix, shared.rows[p % 3]);
      walk.late = true;
    } else {
      run_linear(phase.linear, walk);
    }
    end_phase();
    if (p == 0) make_unwritten(meeting, launch, dirty);
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
    } else {
      describe_phases(*table, launch, shared);
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
  Meeting* meeting = nullptr;
  WEIR_CUDA_CHECK(cudaMalloc(&meeting, sizeof(Meeting)));
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
  if (fresh) WEIR_CUDA_CHECK(cudaMalloc(&memory_.emplace_back(), sizeof(Table)));
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
