#include "kernels/delta_chunk_row.cuh"

namespace weir::cuda::chunk {
namespace {

CUtensorMap raw_map(const Acts& acts, int channels, int tokens, const Context& context) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  const cuuint64_t size[] = {cuuint64_t(channels), cuuint64_t(tokens)};
  const cuuint64_t stride = cuuint64_t(acts.stride) * sizeof(float);
  const cuuint32_t box[] = {128, RowShared<false>::kRawTokens}, step[] = {1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<Encode>(context.hopper.encode_map)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, acts.data, size, &stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEIR_CHECK(result == CUDA_SUCCESS);
  return map;
}

template <bool kChannel>
void start(const DeltaMix& op, Context& context) {
  const auto kernel = delta_row_kernel<kChannel>;
  constexpr size_t kBytes = sizeof(RowShared<kChannel>);
  static_assert(kBytes <= 227 * 1024);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  const int keys = op.key_heads * op.key_dim, values = op.value_heads * op.value_dim;
  const int tokens = op.rows.tokens;
  const RawMaps maps{{raw_map(op.q, keys, tokens, context), raw_map(op.k, keys, tokens, context),
                      raw_map(op.v, values, tokens, context)}};
  const int slices = op.value_dim / 128;
  launch(context,
         {.grid = dim3(op.value_heads * slices, op.rows.count),
          .block = dim3(kRowThreads),
          .shared = kBytes},
         kernel, op, maps, slices);
}

}  // namespace

void start_rows(const DeltaMix& op, Context& context) {
  const bool channel = op.decay == Decay::PerChannel || op.erase.data != nullptr;
  return channel ? start<true>(op, context) : start<false>(op, context);
}

}  // namespace weir::cuda::chunk
