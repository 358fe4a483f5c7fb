#include "kernels/cuda_util.cuh"

namespace weir::cuda {
namespace {

// A thread turns one pair of one head at a time; angles are computed in double precision, as on the
// CPU. Floor: none, the vectors are in cache.
constexpr int kThreads = 256;

__global__ __launch_bounds__(kThreads) void rotary_kernel(const __grid_constant__ Rotary op) {
  let_successor_start();
  wait_for_predecessor();
  const int row = blockIdx.y, begin = op.rows.begin[row];
  const int count = op.rows.begin[row + 1] - begin, half = op.dim / 2;
  if (op.rows.slot[row] == kPadding) return;
  for (int t = blockIdx.x; t < count; t += gridDim.x) {
    const double position = double(op.rows.first[row]) + t;
    for (int n = threadIdx.x; n < op.heads * half; n += kThreads) {
      const int head = n / half, i = n % half;
      double sine, cosine;
      sincos(position * pow(double(op.theta), -2.0 * i / op.dim), &sine, &cosine);
      float* const x = at(op.x, begin + t) + int64_t(head) * op.dim + i;
      const float a = x[0], b = x[half], c = float(cosine), s = float(sine);
      x[0] = a * c - b * s;
      x[half] = b * c + a * s;
    }
  }
}

}  // namespace

void run(const Rotary& op, Context& context) {
  if (op.rows.tokens == 0) return;
  WEIR_CHECK(op.rows.count <= 65535);
  const int chunks = (op.rows.tokens + op.rows.count - 1) / op.rows.count;
  launch(context,
         {.grid = dim3(chunks < 256 ? chunks : 256, op.rows.count), .block = dim3(kThreads)},
         rotary_kernel, op);
}

}  // namespace weir::cuda
