// Which ops of a step run in one kernel, and as which phases.
#include <memory>

#include "kernels/resident_cuda.cuh"

namespace weir::cuda::resident {
namespace {

constexpr int kWorthIt = 3;  // linear phases

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }
bool aligned(const Acts& acts) { return aligned(acts.data) && acts.stride % 4 == 0; }
bool same(const Acts& a, const Acts& b) { return a.data == b.data && a.stride == b.stride; }
bool fits(const Acts& acts) { return acts.stride * kTokensMost < (int64_t(1) << 31); }

// What lies between the first and the last number of some vectors.
struct Span {
  const float *begin, *end;
  Span(const float* data, int64_t stride, int tokens, int64_t dim)
      : begin(data), end(data + stride * (tokens - 1) + dim) {}
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// The op at `i`, if it is one of these.
class Ops {
 public:
  Ops(const Op* first, int count) : first_(first), count_(count) {}
  template <typename T>
  const T* get(int i) const {
    return i < count_ ? std::get_if<T>(&first_[i]) : nullptr;
  }

 private:
  const Op* first_;
  int count_;
};

// The parts as slabs; false: more of them, or others, than the kernel knows.
bool find_slabs(const Linear& op, LinearPhase& phase) {
  int slab = -1;
  const char* end = nullptr;
  for (int p = 0; p < op.parts; ++p) {
    const Matrix& part = op.part[p];
    if (part.rows == 0) continue;
    if (part.dtype != DType::BF16 || !aligned(part.data)) return false;
    const bool joins = part.data == end && op.bias[p] == nullptr && slab >= 0 &&
                       phase.slab[slab].bias == nullptr;
    if (!joins && ++slab == kSlabs) return false;
    if (!joins) phase.slab[slab] = {static_cast<const char*>(part.data), op.bias[p], 0};
    phase.slab[slab].rows += part.rows;
    phase.rows += part.rows;
    end = static_cast<const char*>(part.data) + part.bytes();
  }
  return slab >= 0;
}

bool make_linear(const Linear& op, LinearPhase& phase) {
  if (op.tokens < 1 || op.tokens > kTokensMost || op.range != nullptr) return false;
  if (op.in % 32 != 0 || op.in > kColumnsMost || !aligned(op.x)) return false;
  if (!fits(op.x) || !fits(op.y) || !find_slabs(op, phase)) return false;
  phase.x = op.x.data;
  phase.x_stride = int(op.x.stride);
  phase.y = op.y.data;
  phase.y_stride = int(op.y.stride);
  phase.in = op.in;
  phase.tokens = op.tokens;
  phase.accumulate = op.accumulate;
  return true;
}

// Folds a SwiGLU of the whole output in. Nothing else reads what it was made of.
bool fold(const Swiglu& op, const Linear& linear, LinearPhase& phase) {
  const int half = phase.rows / 2;
  if (phase.rows % 8 != 0 || op.dim != half || op.tokens != phase.tokens) return false;
  if (!same(op.gate, linear.y) || !same(op.up, linear.y.from(half))) return false;
  if (phase.accumulate || !fits(op.out)) return false;
  for (const LinearPhase::Slab& slab : phase.slab) {
    if (slab.bias != nullptr) return false;
  }
  phase.paired = true;
  phase.y = op.out.data;
  phase.y_stride = int(op.out.stride);
  return true;
}

bool fold(const RmsNorm& op, LinearPhase& phase) {
  if (op.dim != phase.in || op.tokens != phase.tokens || op.dim > kNormedMost) return false;
  if (!aligned(op.in) || !aligned(op.out) || !aligned(op.weight)) return false;
  if (!fits(op.in) || !fits(op.out)) return false;
  phase.x = op.in.data;
  phase.x_stride = int(op.in.stride);
  phase.normed = op.out.data;
  phase.normed_stride = int(op.out.stride);
  phase.weight = op.weight;
  phase.group = op.dim;
  phase.eps = op.eps;
  return true;
}

// The norm and the gate of a mixer's answers.
bool fold(const DeltaMix& op, LinearPhase& phase) {
  if (op.value_dim % 32 != 0 || op.value_heads * op.value_dim != phase.in) return false;
  if (phase.in > kNormedMost || !aligned(op.norm_weight)) return false;
  if (op.gate.data != nullptr && (!aligned(op.gate) || !fits(op.gate))) return false;
  phase.weight = op.norm_weight;
  phase.group = op.value_dim;
  phase.eps = op.norm_eps;
  phase.gate = op.gate.data;
  phase.gate_stride = int(op.gate.stride);
  return true;
}

bool runs(const DeltaMix& op, const Context& context) {
  // As many tokens as rows: one each, for no row is empty.
  if (op.rows.count != op.rows.tokens || op.rows.count < 1) return false;
  if (op.rows.count > kTokensMost || op.rows.computed || !op.norm_output) return false;
  if (!op.erases || op.values_ready || op.emits || op.answer_add) return false;
  if (op.key_dim % 4 != 0 || op.key_dim > kKeysMost) return false;
  if (op.value_dim % kWarps != 0 || op.value_dim > kValuesMost) return false;
  if (!aligned(op.state.data) || op.state.stride % 4 != 0) return false;
  if (op.conv_width != 4) return false;
  if (!aligned(op.conv_q) || !aligned(op.conv_k) || !aligned(op.conv_v)) return false;
  const int64_t channels =
      2 * int64_t(op.key_heads) * op.key_dim + int64_t(op.value_heads) * op.value_dim;
  return op.rows.count * channels <= int64_t(context.multiprocessors) * kWarps * 32;
}

// Whether a phase writes nothing that its other blocks read.
bool apart(const LinearPhase& l) {
  const int tokens = l.tokens;
  const Span x(l.x, l.x_stride, l.index == nullptr ? tokens : 1, l.in);
  const Span y(l.y, l.y_stride, tokens, l.rows);
  if (x.meets(y)) return false;
  if (l.gate != nullptr && Span(l.gate, l.gate_stride, tokens, l.in).meets(y)) return false;
  if (l.normed == nullptr) return true;
  const Span normed(l.normed, l.normed_stride, tokens, l.in);
  return !normed.meets(x) && !normed.meets(y);
}

// Whether a phase reads and writes nothing that the phases after the last meeting write or read.
bool independent(const Table& table, const LinearPhase& next, int linear) {
  if (next.group > 0 || next.accumulate || linear == 0) return false;
  const Span x(next.x, next.x_stride, next.tokens, next.in);
  const Span y(next.y, next.y_stride, next.tokens, next.rows);
  for (int i = linear - 1, p = table.phases - 1; i >= 0; --i, --p) {
    if (table.is_mix[p]) return false;
    const LinearPhase& before = table.linear[i];
    if (before.normed != nullptr || before.gate != nullptr) return false;
    const Span read(before.x, before.x_stride, before.tokens, before.in);
    const Span written(before.y, before.y_stride, before.tokens, before.rows);
    if (x.meets(written) || y.meets(read) || y.meets(written)) return false;
    if (before.waits) return true;
  }
  return false;
}

// The phases made so far.
struct Plan {
  Table table;
  int linear = 0, mix = 0;

  // Has the phase that makes a gate, one of the last ones, apply its activation too.
  bool activate(const Acts& gate, int columns, Activation activation) {
    if (activation != Activation::Silu && activation != Activation::Sigmoid) return false;
    for (int i = linear - 1, left = 4; i >= 0 && left > 0; --i, --left) {
      LinearPhase& phase = table.linear[i];
      const int64_t row = gate.data - phase.y;
      if (phase.y_stride != gate.stride || row < 0 || row + columns > phase.rows) continue;
      if (phase.accumulate || phase.paired || phase.activated_end > 0) return false;
      phase.activated = int(row);
      phase.activated_end = int(row) + columns;
      phase.activation = activation;
      return true;
    }
    return false;
  }

  bool add(const LinearPhase& phase) {
    if (linear == Table::kLinear) return false;
    const bool waits = !independent(table, phase, linear);
    table.linear[linear] = phase;
    table.linear[linear++].waits = waits;
    table.is_mix[table.phases++] = false;
    return true;
  }
  bool has_room() const { return mix < Table::kMix && linear < Table::kLinear; }
  // The op and the out-projection after it.
  void add(const DeltaMix& op, const LinearPhase& phase) {
    table.mix[mix++] = op;
    table.is_mix[table.phases++] = true;
    add(phase);
  }
};

// Ops from `i` on as the next phases: how many, 0: they are others.
int add_linear(const Ops& ops, int i, Plan& plan) {
  const int first = i;
  const auto* gather = ops.get<Gather>(i);
  if (gather != nullptr) ++i;
  const auto* norm = ops.get<RmsNorm>(i);
  if (norm != nullptr) ++i;
  const auto* linear = ops.get<Linear>(i++);
  LinearPhase phase;
  if (linear == nullptr || !make_linear(*linear, phase)) return 0;
  if (norm != nullptr && (!same(norm->out, linear->x) || !fold(*norm, phase))) return 0;
  if (gather != nullptr) {
    const bool fits_in = aligned(gather->in) && fits(gather->in);
    if (norm == nullptr || !same(gather->out, norm->in) || !fits_in) return 0;
    if (gather->count != phase.tokens || gather->dim != phase.in) return 0;
    phase.x = gather->in.data;
    phase.x_stride = int(gather->in.stride);
    phase.index = gather->index;
  }
  if (!apart(phase)) return 0;
  const auto* swiglu = ops.get<Swiglu>(i);
  if (swiglu != nullptr && fold(*swiglu, *linear, phase)) ++i;
  return plan.add(phase) ? i - first : 0;
}

int add_mix(const Ops& ops, int i, const Context& context, Plan& plan) {
  const auto* mix = ops.get<DeltaMix>(i);
  const auto* linear = ops.get<Linear>(i + 1);
  LinearPhase phase;
  if (mix == nullptr || linear == nullptr || !runs(*mix, context)) return 0;
  if (!same(mix->out, linear->x) || !make_linear(*linear, phase) || !fold(*mix, phase)) return 0;
  if (!apart(phase) || !plan.has_room()) return 0;
  if (mix->gate && !plan.activate(mix->gate, phase.in, mix->gate_activation)) return 0;
  plan.add(*mix, phase);
  return 2;
}

// Whether a plan might begin with the op: most steps have more tokens, and end here.
bool may_begin(const Op& op) {
  if (const auto* gather = std::get_if<Gather>(&op)) return gather->count <= kTokensMost;
  if (const auto* norm = std::get_if<RmsNorm>(&op)) return norm->tokens <= kTokensMost;
  if (const auto* linear = std::get_if<Linear>(&op)) return linear->tokens <= kTokensMost;
  if (const auto* mix = std::get_if<DeltaMix>(&op)) return mix->rows.tokens <= kTokensMost;
  return false;
}

}  // namespace

int run(const Op* first, int count, Context& context) {
  if (context.meeting == nullptr || !may_begin(*first)) return 0;
  const Ops ops(first, count);
  const auto made = std::make_unique<Plan>();
  Plan& plan = *made;
  plan.table.keep_low = context.keep_low;
  int taken = 0;
  while (taken < count) {
    int more = add_mix(ops, taken, context, plan);
    if (more == 0) more = add_linear(ops, taken, plan);
    if (more == 0) break;
    taken += more;
  }
  if (plan.linear < kWorthIt) return 0;
  start(context.tables->put(plan.table, context.changed, context.stream), context);
  return taken;
}

}  // namespace weir::cuda::resident
