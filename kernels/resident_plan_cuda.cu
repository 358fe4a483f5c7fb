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

// The parts as slabs; false: the kernel does not know such.
bool find_slabs(const Linear& op, LinearPhase& phase) {
  int slab = -1;
  const char* end = nullptr;
  for (int p = 0; p < op.parts; ++p) {
    const Matrix& part = op.part[p];
    if (part.rows == 0) continue;
    if (part.dtype != DType::BF16 || !aligned(part.data)) return false;
    const bool joins = part.data == end && op.bias[p] == nullptr && slab >= 0 &&
                       phase.slab[slab].bias == nullptr;
    if (!joins) phase.slab[++slab] = {static_cast<const char*>(part.data), op.bias[p], 0};
    phase.slab[slab].rows += part.rows;
    phase.biased = phase.biased || op.bias[p] != nullptr;
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
  if (op.accumulate) {
    phase.base = phase.y;
    phase.base_stride = phase.y_stride;
  }
  return true;
}

// Folds a SwiGLU of the whole output in. Nothing else reads what it was made of.
bool fold(const Swiglu& op, const Linear& linear, LinearPhase& phase) {
  const int half = phase.rows / 2;
  if (phase.rows % 8 != 0 || op.dim != half || op.tokens != phase.tokens) return false;
  if (!same(op.gate, linear.y) || !same(op.up, linear.y.from(half))) return false;
  if (phase.base != nullptr || !fits(op.out)) return false;
  for (const LinearPhase::Slab& slab : phase.slab) {
    if (slab.bias != nullptr) return false;
  }
  phase.paired = true;
  phase.y = op.out.data;
  phase.y_stride = int(op.out.stride);
  return true;
}

// False: groups that the kernel's warps can not share out.
bool set_group(int group, float eps, bool by_rows, LinearPhase& phase) {
  constexpr int kRun = 32;  // columns, of eight lanes
  const bool whole = group == phase.in;
  const auto is_power = [](int n) { return n > 0 && (n & (n - 1)) == 0; };
  if (!whole && (!is_power(group) || group < kRun)) return false;
  phase.group = group;
  // So rounded, run * groups_a_run >> 16 is the group of each run of 32 of kNormedMost columns.
  phase.groups_a_run = (1 << 16) * 32 / group + 1;
  phase.by_rows = by_rows;
  phase.norm_lanes = by_rows ? 32 : 8;
  phase.norm_runs = whole ? kNormedMost / kRun : group / kRun;
  phase.eps = eps;
  phase.share = 1.0f / float(group);
  return true;
}

bool fold(const RmsNorm& op, LinearPhase& phase) {
  if (op.dim != phase.in || op.tokens != phase.tokens || op.dim > kNormedMost) return false;
  if (!aligned(op.in) || !aligned(op.out) || !aligned(op.weight)) return false;
  if (!fits(op.in) || !fits(op.out)) return false;
  phase.x = op.in.data;
  phase.x_stride = int(op.in.stride);
  phase.normed = op.read_once ? nullptr : op.out.data;
  phase.normed_stride = int(op.out.stride);
  phase.weight = op.weight;
  return set_group(op.dim, op.eps, true, phase);
}

// The norm and the gate of a mixer's answers.
bool fold(const DeltaMix& op, LinearPhase& phase) {
  if (op.value_dim % 32 != 0 || op.value_heads * op.value_dim != phase.in) return false;
  if (phase.in > kNormedMost || !aligned(op.norm_weight)) return false;
  if (op.gate.data != nullptr && (!aligned(op.gate) || !fits(op.gate))) return false;
  phase.weight = op.norm_weight;
  return set_group(op.value_dim, op.norm_eps, false, phase);
}

bool fold(const SwilaMix& op, LinearPhase& phase) {
  if (op.heads * op.dim != phase.in || phase.in > kNormedMost || !aligned(op.norm_weight)) {
    return false;
  }
  phase.weight = op.norm_weight;
  return set_group(op.dim, op.norm_eps, false, phase);
}

// As many tokens as rows: one each, for no row is empty.
bool steps(const Rows& rows) {
  return rows.count == rows.tokens && rows.count >= 1 && rows.count <= kTokensMost &&
         !rows.computed;
}
bool has_threads(int64_t channels, const Context& context) {
  return channels <= int64_t(context.multiprocessors) * kWarps * 32;
}

bool runs(const SwilaMix& op, const Context& context) {
  if (!steps(op.rows) || op.conv_width != 4 || op.pending.data != nullptr) return false;
  const int J = op.mixtures, D = op.dim;
  if (J != 1 && J != 2 && J != 4 && J != 8) return false;
  if (D % 32 != 0 || D > kKeysMost || J * D % 128 != 0 || J * D > kSwilaMost) return false;
  if (!aligned(op.state.data) || op.state.stride % 4 != 0) return false;
  if (!aligned(op.conv_q) || !aligned(op.conv_k) || !aligned(op.conv_v)) return false;
  return has_threads(int64_t(op.rows.count) * 3 * op.heads * D, context);
}

bool runs(const DeltaMix& op, const Context& context) {
  if (!steps(op.rows) || !op.norm_output || op.pending.data != nullptr) return false;
  if (!op.erases || op.values_ready || op.emits || op.answer_add) return false;
  if (op.key_dim % 32 != 0 || op.key_dim > kKeysMost) return false;
  if (op.value_dim % kWarps != 0 || op.value_dim > kValuesMost) return false;
  if (!aligned(op.state.data) || op.state.stride % 4 != 0) return false;
  if (op.conv_width != 4) return false;
  if (!aligned(op.conv_q) || !aligned(op.conv_k) || !aligned(op.conv_v)) return false;
  const int64_t channels =
      2 * int64_t(op.key_heads) * op.key_dim + int64_t(op.value_heads) * op.value_dim;
  return has_threads(op.rows.count * channels, context);
}

// Numbers that a phase reads or writes.
struct Numbers {
  const float* data;
  int64_t stride;
  int tokens, dim;

  const float* end() const { return data + stride * (tokens - 1) + dim; }
  // What lies between the first and the last of these has something of the others'.
  bool meet(const Numbers& other) const {
    if (data == nullptr || other.data == nullptr) return false;
    return data < other.end() && other.data < end();
  }
  // `other` lies that many columns on in these; -1: not all of it does.
  int64_t find(const Numbers& other) const {
    const int64_t column = other.data - data;
    const bool inside = column >= 0 && column + other.dim <= dim;
    return inside && other.stride == stride && other.tokens <= tokens ? column : -1;
  }
};

Numbers input_of(const LinearPhase& l) {
  return {l.x, l.x_stride, l.index == nullptr ? l.tokens : 1, l.in};
}
Numbers output_of(const LinearPhase& l) {
  return {l.y, l.y_stride, l.tokens, l.paired ? l.rows / 2 : l.rows};
}
Numbers normed_of(const LinearPhase& l) { return {l.normed, l.normed_stride, l.tokens, l.in}; }

// Whether a phase writes nothing that its other blocks read.
bool apart(const LinearPhase& l) {
  const Numbers x = input_of(l), y = output_of(l), normed = normed_of(l);
  return !x.meet(y) && !normed.meet(x) && !normed.meet(y);
}

// Makes a linear phase one more layer of a narrow one, if it is such.
bool joins(NarrowPhase& narrow, const LinearPhase& l) {
  if (narrow.layers == NarrowPhase::kLayers || l.in > kNarrowMost || l.rows % 8 != 0) return false;
  if (!l.x_left || l.group > 0 || l.index != nullptr || l.base != nullptr || l.paired) return false;
  const bool activates = l.activated_end > 0;
  if (l.slab[0].rows != l.rows || (activates && l.activated_end - l.activated != l.rows)) {
    return false;
  }
  if (narrow.layers > 0 && (narrow.in != l.in || narrow.tokens != l.tokens)) return false;
  for (int i = 0; i < narrow.layers; ++i) {
    const NarrowPhase::Layer& layer = narrow.layer[i];
    if (l.x >= layer.left && l.x < layer.left + int64_t(layer.left_stride) * l.tokens) return false;
  }
  narrow.layer[narrow.layers++] = {.x = l.x,
                                   .weights = l.slab[0].data,
                                   .bias = l.slab[0].bias,
                                   .left = l.left,
                                   .y = l.y,
                                   .x_stride = l.x_stride,
                                   .left_stride = l.left_stride,
                                   .y_stride = l.y_stride,
                                   .rows = l.rows,
                                   .activates = activates,
                                   .activation = l.activation};
  narrow.in = l.in;
  narrow.tokens = l.tokens;
  narrow.tiles += l.rows / 8;
  narrow.keep_low = l.keep_low;
  return true;
}

// The phases made so far.
class Plan {
 public:
  explicit Plan(const Context& context)
      : words_(&context.meeting->words[0][0]), keep_low_(context.keep_low) {}

  Table table;
  int linear = 0;

  // Numbers that a mixer reads: their place in words, where earlier phases leave them.
  bool find_left(Acts& acts, int tokens, int dim, int multiple = 1) {
    if (!acts) return true;
    const Found found = find({acts.data, acts.stride, tokens, dim}, multiple);
    if (found.source != Source::Left) return false;
    acts = {found.data, found.stride};
    after_ |= found.after;
    return true;
  }
  // Where the phase finds its x and what it adds to. False: not as the kernel knows it.
  bool find_inputs(LinearPhase& l) {
    after_ = 0;
    const Numbers y = output_of(l);
    for (int i = 0; i < linear; ++i) {
      // Who writes a place last? finish() has the answer where this phase writes all of it. Phases
      // with another between them write long after each other; a program's scratch is used so.
      const Numbers& earlier = made_[i].y;
      if (i + 1 == linear && y.meet(earlier) && y.find(earlier) < 0) return false;
      if (y.meet(normed_of(table.linear[i])) || normed_of(l).meet(earlier)) return false;
    }
    if (!use_again(l) && !use(input_of(l), 4, l.x, l.x_stride, l.x_left)) return false;
    return l.base == nullptr || use(y, 1, l.base, l.base_stride, l.base_left);
  }
  bool take_words(int64_t count, float*& at) {
    count = (count + 3) / 4 * 4;
    if (table.words + count > Meeting::kWords) return false;
    at = words_ + table.words;
    table.words += int(count);
    return true;
  }

  // Has the phase that makes a gate, one of the last ones, apply its activation too.
  bool activate(const Acts& gate, int columns, Activation activation) {
    if (activation != Activation::Silu && activation != Activation::Sigmoid) return false;
    for (int i = linear - 1, left = 4; i >= 0 && left > 0; --i, --left) {
      LinearPhase& phase = table.linear[i];
      const int64_t row = gate.data - phase.y;
      if (phase.y_stride != gate.stride || row < 0 || row + columns > phase.rows) continue;
      if (phase.base != nullptr || phase.paired || phase.activated_end > 0) return false;
      phase.activated = int(row);
      phase.activated_end = int(row) + columns;
      phase.activation = activation;
      gate_maker_ = &phase;
      return true;
    }
    return false;
  }
  // Around the planning of a mixer that may turn out not to fit: its gate is then its own again.
  void begin_mixer() { gate_maker_ = nullptr; }
  void drop_mixer() {
    if (gate_maker_ != nullptr) gate_maker_->activated = gate_maker_->activated_end = 0;
  }

  // After find_inputs().
  bool add(const LinearPhase& phase) {
    if (linear == Table::kLinear || !may_write(phase)) return false;
    Made& made = made_[linear];
    made = {.y = output_of(phase), .after = after_};
    if (!phase.x_left) made.read[0] = input_of(phase);
    if (phase.base != nullptr && !phase.base_left) made.read[1] = made.y;
    if (made.read[0].data != nullptr || made.read[1].data != nullptr) {
      if (readers_ == 64) return false;
      made.after |= uint64_t(1) << readers_;
      made.reader = readers_++;
    }
    table.linear[linear] = phase;
    table.linear[linear++].keep_low = keep_low_;
    table.kind[table.phases++] = Table::Kind::Linear;
    return true;
  }
  // The op and the out-projection after it.
  bool add(const DeltaMix& op, const LinearPhase& phase) {
    return add_mixer(op, phase, Table::Kind::Delta, table.delta, deltas_);
  }
  bool add(const SwilaMix& op, const LinearPhase& phase) {
    return add_mixer(op, phase, Table::Kind::Swila, table.swila, swilas_);
  }

  // Only what no later phase overwrites is written for after the launch: so no two phases write to
  // one place, of which one would have to be the later.
  void finish() {
    for (int i = 0; i < linear; ++i) {
      for (int j = i + 1; j < linear; ++j) {
        if (made_[j].y.find(made_[i].y) >= 0) table.linear[i].y = nullptr;
      }
    }
    join_narrow();
  }

 private:
  template <typename Op>
  bool add_mixer(const Op& op, const LinearPhase& phase, Table::Kind kind,
                 Op (&ops)[Table::kMix], int& count) {
    if (count == Table::kMix) return false;
    table.kind[table.phases++] = kind;
    if (!add(phase)) {
      --table.phases;
      return false;
    }
    ops[count++] = op;
    return true;
  }

  enum class Source { Program, Left, Unknown };
  struct Found {
    Source source = Source::Unknown;
    float* data = nullptr;
    int stride = 0;
    uint64_t after = 0;
  };
  // What else is known of a linear phase.
  struct Made {
    Numbers y{};
    Numbers read[2]{};   // where the program has them
    int reader = -1;     // its number among the phases that read such
    uint64_t after = 0;  // readers that are done where this phase's y is known
  };

  // Neighbouring layers of few columns become one phase.
  void join_narrow() {
    int kept = 0, phases = 0, narrow = 0;  // linear; of all kinds; narrow
    for (int p = 0, i = 0; p < table.phases; ++p) {
      const Table::Kind kind = table.kind[p];
      if (kind != Table::Kind::Linear) {
        table.kind[phases++] = kind;
        continue;
      }
      const LinearPhase& phase = table.linear[i++];
      const bool follows = phases > 0 && table.kind[phases - 1] == Table::Kind::Narrow;
      if (follows && joins(table.narrow[narrow - 1], phase)) continue;
      if (narrow < Table::kNarrow) table.narrow[narrow] = {};
      if (narrow < Table::kNarrow && joins(table.narrow[narrow], phase)) {
        ++narrow;
        table.kind[phases++] = Table::Kind::Narrow;
      } else {
        table.linear[kept++] = phase;
        table.kind[phases++] = Table::Kind::Linear;
      }
    }
    table.phases = phases;
  }

  // Where a new phase finds the numbers. The phase that wrote them last is made to leave them.
  Found find(const Numbers& wanted, int multiple) {
    for (int i = linear - 1; i >= 0; --i) {
      LinearPhase& phase = table.linear[i];
      if (wanted.meet(normed_of(phase))) return {};
      if (!wanted.meet(made_[i].y)) continue;
      const int64_t column = made_[i].y.find(wanted);
      if (column < 0 || column % multiple != 0) return {};
      if (phase.left == nullptr) {
        phase.left_stride = (made_[i].y.dim + 3) / 4 * 4;
        if (!take_words(int64_t(phase.left_stride) * phase.tokens, phase.left)) return {};
      }
      return {Source::Left, phase.left + column, phase.left_stride, made_[i].after};
    }
    return {Source::Program};
  }
  bool use(const Numbers& wanted, int multiple, const float*& data, int& stride, bool& left) {
    const Found found = find(wanted, multiple);
    left = found.source == Source::Left;
    after_ |= found.after;
    if (left) {
      data = found.data;
      stride = found.stride;
    }
    return found.source != Source::Unknown;
  }
  // A norm that an earlier phase has made: made again.
  bool use_again(LinearPhase& l) {
    if (l.group > 0) return false;
    for (int i = linear - 1; i >= 0; --i) {
      const LinearPhase& before = table.linear[i];
      if (input_of(l).meet(made_[i].y)) return false;
      if (before.normed != l.x || before.normed_stride != l.x_stride) continue;
      if (before.in != l.in || before.tokens != l.tokens) return false;
      l.x = before.x;
      l.x_stride = before.x_stride;
      l.x_left = before.x_left;
      l.index = before.index;
      l.weight = before.weight;
      if (!set_group(before.group, before.eps, true, l)) return false;
      after_ |= made_[i].after;
      return true;
    }
    return false;
  }
  // Whether all phases that have read there are done when the phase writes.
  bool may_write(const LinearPhase& phase) const {
    for (int i = 0; i < linear; ++i) {
      const Made& made = made_[i];
      if (made.reader < 0 || (after_ >> made.reader & 1) != 0) continue;
      for (const Numbers& read : made.read) {
        if (read.meet(output_of(phase)) || read.meet(normed_of(phase))) return false;
      }
    }
    return true;
  }

  float* words_;  // of even launches, on the device
  bool keep_low_;
  LinearPhase* gate_maker_ = nullptr;  // which activate() has told of a mixer's gate
  Made made_[Table::kLinear];
  int readers_ = 0, deltas_ = 0, swilas_ = 0;
  uint64_t after_ = 0;  // of the phase that is being made
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
  const auto* swiglu = ops.get<Swiglu>(i);
  if (swiglu != nullptr && fold(*swiglu, *linear, phase)) ++i;
  if (!apart(phase) || !plan.find_inputs(phase)) return 0;
  return plan.add(phase) ? i - first : 0;
}

// All that a mixer reads of other ops is left by earlier phases.
bool find_reads(DeltaMix& op, LinearPhase& phase, Plan& plan) {
  const int tokens = op.rows.tokens, keys = op.key_heads * op.key_dim,
            values = op.value_heads * op.value_dim,
            decays = op.decay_heads * (op.decay == Decay::PerHead ? 1 : op.key_dim);
  if (!plan.find_left(op.q, tokens, keys) || !plan.find_left(op.k, tokens, keys)) return false;
  if (!plan.find_left(op.v, tokens, values)) return false;
  if (!plan.find_left(op.beta, tokens, op.value_heads)) return false;
  if (op.decay != Decay::None && !plan.find_left(op.decay_in, tokens, decays)) return false;
  if (!plan.find_left(op.erase, tokens, keys)) return false;
  if (!plan.find_left(op.write, tokens, values)) return false;
  if (!op.gate) return true;
  Acts gate = op.gate;
  if (!plan.find_left(gate, tokens, values, 4)) return false;
  phase.gate = gate.data;
  phase.gate_stride = int(gate.stride);
  return plan.activate(op.gate, phase.in, op.gate_activation);
}
bool find_reads(SwilaMix& op, LinearPhase&, Plan& plan) {
  const int tokens = op.rows.tokens, channels = op.heads * op.dim, mixed = channels * op.mixtures;
  for (Acts* acts : {&op.q, &op.k, &op.v, &op.key_mix, &op.query_mix}) {
    if (!plan.find_left(*acts, tokens, channels)) return false;
  }
  for (Acts* acts : {&op.key_router, &op.query_router, &op.beta, &op.decay_in}) {
    if (!plan.find_left(*acts, tokens, mixed)) return false;
  }
  return true;
}

template <typename Op>
int add_mix(const Ops& ops, int i, const Context& context, Plan& plan) {
  const auto* mix = ops.get<Op>(i);
  const auto* linear = ops.get<Linear>(i + 1);
  LinearPhase phase;
  if (mix == nullptr || linear == nullptr || !runs(*mix, context)) return 0;
  if (!same(mix->out, linear->x) || !make_linear(*linear, phase) || !fold(*mix, phase)) return 0;
  phase.x = nullptr;  // below
  if (!apart(phase) || !plan.find_inputs(phase)) return 0;
  Op op = *mix;
  plan.begin_mixer();
  if (!find_reads(op, phase, plan)) return 0;
  float* out = nullptr;  // its answers are left too
  bool fits = plan.take_words(int64_t(phase.in) * op.rows.tokens, out);
  op.out = {out, phase.in};
  phase.x = out;
  phase.x_stride = phase.in;
  phase.x_left = true;
  fits = fits && plan.add(op, phase);
  if (!fits) plan.drop_mixer();
  return fits ? 2 : 0;
}

// Whether a plan might begin with the op: most steps have more tokens, and end here.
bool may_begin(const Op& op) {
  if (const auto* gather = std::get_if<Gather>(&op)) return gather->count <= kTokensMost;
  if (const auto* norm = std::get_if<RmsNorm>(&op)) return norm->tokens <= kTokensMost;
  if (const auto* linear = std::get_if<Linear>(&op)) return linear->tokens <= kTokensMost;
  return false;
}

}  // namespace

int run(const Op* first, int count, Context& context) {
  if (context.meeting == nullptr || !may_begin(*first)) return 0;
  const Ops ops(first, count);
  const auto made = std::make_unique<Plan>(context);
  Plan& plan = *made;
  int taken = 0;
  while (taken < count) {
    int more = add_mix<DeltaMix>(ops, taken, context, plan);
    if (more == 0) more = add_mix<SwilaMix>(ops, taken, context, plan);
    if (more == 0) more = add_linear(ops, taken, plan);
    if (more == 0) break;
    taken += more;
  }
  if (plan.linear < kWorthIt) return 0;
  plan.finish();
  start(context.tables->put(plan.table, context.changed, context.stream), context);
  return taken;
}

}  // namespace weir::cuda::resident
