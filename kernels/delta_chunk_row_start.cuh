#pragma once
#include "kernels/delta_chunk_row.cuh"

// Starting the one kernel for rows of many tokens.
namespace weir::cuda::chunk {

inline CUtensorMap map_of(const Acts& acts, int channels, int box_channels, int box_tokens,
                          int tokens, const Context& context) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  const cuuint64_t size[] = {cuuint64_t(channels), cuuint64_t(tokens)};
  const cuuint64_t stride = cuuint64_t(acts.stride) * sizeof(float);
  const cuuint32_t box[] = {cuuint32_t(box_channels), cuuint32_t(box_tokens)}, step[] = {1, 1};
  CUtensorMap map;
  const CUresult result = reinterpret_cast<Encode>(context.hopper.encode_map)(
      &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, acts.data, size, &stride, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  WEIR_CHECK(result == CUDA_SUCCESS);
  return map;
}

template <bool kChannel>
SplitVectors start_rows(const DeltaMix& op, Context& context) {
  const auto kernel = delta_row_kernel<kChannel>;
  constexpr size_t kBytes = sizeof(RowShared<kChannel>);
  static_assert(kBytes <= 227 * 1024);
  WEIR_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes)));
  const int keys = op.key_heads * op.key_dim, values = op.value_heads * op.value_dim;
  const int tokens = op.rows.tokens;
  constexpr int kRaw = RowShared<kChannel>::kRawTokens;
  RowMaps maps{{map_of(op.q, keys, 128, kRaw, tokens, context),
                map_of(op.k, keys, 128, kRaw, tokens, context),
                map_of(op.v, values, 128, kRaw, tokens, context)}};
  if (op.decay == Decay::PerChannel) {
    maps.decays = map_of(op.decay_in, op.decay_heads * 128, 128, kTokens, tokens, context);
  }
  if (op.erase.data != nullptr) {
    maps.erase = map_of(op.erase, keys, 128, 4, tokens, context);
  }
  RowOutput output;
  SplitVectors left;
  if (!context.keep_low && op.value_dim == 128) {
    left = leave_split(op.out, values, tokens, context);
    output.rounded = left.high;
    output.exact = output.rounded == nullptr || !op.read_once ||
                   !next_reads_split(op.out, values, tokens, context);
  }
  const int slices = op.value_dim / 128;
  launch(context,
         {.grid = dim3(op.value_heads * slices, most_long_rows(op.rows, kStepTokensMost)),
          .block = dim3(kRowThreads),
          .shared = kBytes},
         kernel, op, maps, output, slices);
  return left;
}

}  // namespace weir::cuda::chunk
