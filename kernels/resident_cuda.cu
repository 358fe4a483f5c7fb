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
// Between phases every block waits for all others. What another block wrote is read past L1, which
// knows nothing of it.
//
// Floor: weights and states once.
// The describing warp: a phase's description is in shared memory one phase ahead, and what it reads
// besides weights in L2.
__device__ void describe(const Table& table, int p, int& linear, int& mix, Shared& shared) {
  if (p >= table.phases) return;
  const bool is_mix = table.is_mix[p];
  const auto* from = is_mix ? reinterpret_cast<const uint32_t*>(&table.mix[mix])
                            : reinterpret_cast<const uint32_t*>(&table.linear[linear]);
  const int words = int((is_mix ? sizeof(DeltaMix) : sizeof(LinearPhase)) / 4);
  for (int i = threadIdx.x % 32; i < words; i += 32) shared.phase[p % 3][i] = from[i];
  if (threadIdx.x % 32 == 0) shared.is_mix[p % 3] = is_mix;
  if (is_mix) {
    prefetch_mix(table.mix[mix++]);
  } else if (const LinearPhase& l = table.linear[linear++];
             l.group > 0 && int(blockIdx.x) == p % int(gridDim.x)) {
    prefetch(l.weight, l.group);
  }
}

__device__ void describe_phases(const Table& table, Shared& shared) {
  int linear = 0, mix = 0;
#pragma unroll 1
  for (int p = 0; p < table.phases + 2; ++p) {
    describe(table, p, linear, mix, shared);
    // The first two are there; or as arrive() of phase p - 2.
    if (p > 0) barrier_among<kDescribed>(kComputing + 32);
  }
}

__device__ void compute(Walk& walk) {
  barrier_among<kDescribed>(kComputing + 32);
  for (int p = 0; p < walk.table.phases; ++p) {
    const auto& phase = *reinterpret_cast<const Phase*>(walk.shared.phase[p % 3]);
    if (walk.shared.is_mix[p % 3]) {
      run_mix(phase.mix, walk);
    } else if (phase.linear.in <= kStageColumns) {
      run_linear<kStageRuns>(phase.linear, walk);
    } else {
      run_linear<kRunsMost / kWarps>(phase.linear, walk);
    }
    arrive(walk);
  }
  if (threadIdx.x == 0) walk.meeting->done[blockIdx.x] = walk.done;
}

__global__ __launch_bounds__(kThreads, 1) void resident_kernel(const Table* __restrict__ all,
                                                                Meeting* meeting) {
  const Table& table = *all;
  extern __shared__ __align__(128) char space[];
  Shared& shared = *reinterpret_cast<Shared*>(space);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(shared.full + s), 1);
      barrier_init(shared_address(shared.free + s), kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();  // the barriers are there
  Walk walk{.table = table,
            .shared = shared,
            .meeting = meeting,
            .done = meeting->done[blockIdx.x],
            .keep_low = table.keep_low};
  if (threadIdx.x >= kComputing) {
    if (threadIdx.x < kComputing + 32) {
      copy_weights(walk);
    } else {
      describe_phases(table, shared);
    }
  } else {
    compute(walk);
  }
}

}  // namespace

Meeting* make_meeting(const Context& context) {
  if (context.compute != 90 || context.multiprocessors > Meeting::kBlocks) return nullptr;
  Meeting* meeting = nullptr;
  WEIR_CUDA_CHECK(cudaMalloc(&meeting, sizeof(Meeting)));
  WEIR_CUDA_CHECK(cudaMemset(meeting, 0, sizeof(Meeting)));
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
