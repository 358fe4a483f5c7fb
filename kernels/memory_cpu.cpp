#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/check.h"
#include "kernels/cpu.h"
#include "kernels/mixer_math.h"

namespace weir::cpu {
namespace {

// A token's memories in order of falling logits, and their weights.
void choose(const MemoryRoute& op, int64_t token, int32_t* memory) {
  const float* const logits = op.logits.at(token);
  for (int32_t c = 0; c < op.chosen; ++c) {
    int32_t best = -1;
    for (int32_t m = 0; m < op.memories; ++m) {
      if (std::find(memory, memory + c, m) != memory + c) continue;
      if (best < 0 || logits[m] > logits[best]) best = m;
    }
    memory[c] = best;
  }
  double total = 0;
  const auto share = [&](int32_t c) {
    return std::exp(double(logits[memory[c]]) - double(logits[memory[0]]));
  };
  for (int32_t c = 0; c < op.chosen; ++c) total += share(c);
  for (int32_t c = 0; c < op.chosen; ++c) op.weight.at(token)[c] = float(share(c) / total);
}

// The tokens a memory has had before this step, and then also those of the step.
int32_t add_seen(const MemoryRoute& op, const RowRun& row, int32_t memory, int32_t count) {
  if (row.empty()) return 0;
  int32_t* const seen = reinterpret_cast<int32_t*>(op.seen.at(row.slot)) + memory;
  const int32_t before = row.fresh() ? 0 : *seen;
  *seen = before + count;
  return before;
}

}  // namespace

// A token's choice is a few comparisons: nothing that threads would make faster.
void run(const MemoryRoute& op, const Context&) {
  WEIR_CHECK(op.chosen > 0 && op.chosen <= op.memories);
  const int32_t rows = op.rows.count, chosen = op.chosen;
  std::vector<int32_t> memory(size_t(op.rows.tokens) * size_t(chosen), -1);
  std::fill_n(op.token, memory.size(), 0);
  std::fill_n(op.pair, memory.size(), 0);
  for (int32_t t = 0; t < op.rows.tokens; ++t) std::fill_n(op.weight.at(t), chosen, 0.0f);
  for (int32_t r = 0; r < rows; ++r) {
    const RowRun row(op.rows, r);
    for (int32_t t = row.begin; !row.empty() && t < row.begin + row.count; ++t) {
      choose(op, t, &memory[size_t(t) * size_t(chosen)]);
    }
  }
  int32_t next = 0;
  for (int32_t m = 0; m < op.memories; ++m) {
    op.memory_begin[m] = next;
    int32_t* const begin = op.row_begin + int64_t(m) * (rows + 1);
    for (int32_t r = 0; r < rows; ++r) {
      const RowRun row(op.rows, r);
      begin[r] = next;
      for (int64_t i = int64_t(row.begin) * chosen; i < int64_t(row.begin + row.count) * chosen;
           ++i) {
        if (memory[size_t(i)] != m) continue;
        op.pair[i] = next;
        op.token[next++] = int32_t(i / chosen);
      }
      op.row_first[int64_t(m) * rows + r] = add_seen(op, row, m, next - begin[r]);
    }
    begin[rows] = next;
  }
  op.memory_begin[op.memories] = next;
}

void run(const MemoryMerge& op, const Context& context) {
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* const out = op.out.at(t);
      op.shared ? void(std::copy_n(op.shared.at(t), op.dim, out))
                : void(std::fill_n(out, op.dim, 0.0f));
      for (int32_t c = 0; c < op.chosen; ++c) {
        const float* const answer = op.answers.at(op.pair[t * op.chosen + c]);
        const float weight = op.weight.at(t)[c];
        for (int32_t i = 0; i < op.dim; ++i) out[i] += weight * answer[i];
      }
    }
  };
  context.plain ? work(0, op.tokens) : context.pool.parallel_for(op.tokens, work, 16);
}

}  // namespace weir::cpu
