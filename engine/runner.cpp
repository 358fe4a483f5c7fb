#include "engine/runner.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_map>

#include "engine/deferred_writes.h"
#include "engine/lower.h"
#include "engine/padded_shape.h"
#include "engine/staging.h"
#include "engine/step_layout.h"
#include "kernels/check.h"

namespace weir {
namespace {

struct ShapeHash {
  size_t operator()(const StepShape& shape) const {
    const size_t both = size_t(shape.rows) * 0x9E3779B97F4A7C15ull + size_t(shape.tokens);
    const size_t all = both * 0x9E3779B97F4A7C15ull + size_t(shape.outputs);
    return all * 0x9E3779B97F4A7C15ull + size_t(shape.singles) * 65537 + size_t(shape.longer);
  }
};

struct Lowered {
  Program program;
  size_t bytes = 0;     // its floor
  bool defers = false;  // the writes of states, of rows of one token
};

// Programs are cheap to make again; the cache only has to hold what a busy hour repeats.
constexpr size_t kProgramsKept = 1024;

// Tokens of the smallest step of prompts that is tried at the start.
constexpr int32_t kPromptsWarmed = 128;

size_t input_bytes(const Limits& limits) {
  return StepInputs(largest_step(limits), pages_per_row(limits)).layout.bytes();
}
size_t answer_bytes(const Limits& limits) { return StepOutputs(limits.step_tokens).layout.bytes(); }
size_t token_bytes(const Limits& limits) { return size_t(limits.step_tokens) * sizeof(Token); }

int64_t workspace_floats(const ModelSpec& spec, const Limits& limits) {
  // One output less, and outputs are picked within the last layer, where they take other room.
  const StepShape most = largest_step(limits);
  int64_t floats = 0;
  for (const int32_t outputs : {most.outputs, most.outputs - 1}) {
    Workspace measure;
    lower(spec, weight_shapes(spec), nullptr, limits, {}, {most.rows, most.tokens, outputs},
          measure);
    floats = std::max(floats, measure.peak());
  }
  return floats;
}

}  // namespace

// A step that has been begun.
struct Begun {
  const StepBatch* batch = nullptr;
  int32_t outputs = 0;  // those of padding rows included
  uint64_t mark = 0;
};

struct Runner::Impl {
  Impl(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend)
      : model(model),
        pool(pool),
        limits(limits),
        backend(backend),
        kv_bytes_per_token(state_size(model.spec).kv_per_token),
        pages(pages_per_row(limits)),
        writes(model, pool, limits),
        in(input_bytes(limits), backend),
        device_out(static_cast<std::byte*>(backend.allocate(answer_bytes(limits)))),
        read(static_cast<Token*>(backend.allocate(token_bytes(limits)))) {
    for (auto& host : host_out) host.resize(answer_bytes(limits));
    const size_t bytes = size_t(workspace_floats(model.spec, limits)) * sizeof(float);
    workspace = static_cast<float*>(backend.allocate(bytes));
    drawn.resize(size_t(limits.step_tokens));
    reserve_edits(1024);
    if (backend.remembers_programs()) warm_up();
  }

  // Grows by doubling, so that all blocks together stay within twice the largest.
  void reserve_edits(size_t count) {
    if (count <= edits_capacity) return;
    edits_capacity = std::max(count, 2 * edits_capacity);
    device_edits =
        static_cast<LogitEdit*>(backend.allocate(edits_capacity * sizeof(LogitEdit)));
    programs.clear();
  }

  void fill_rows(const StepBatch& batch, const StepInputs& at);
  bool fill_written(const StepBatch& batch, bool defers, const StepInputs& at) {
    return writes.advance(batch.rows, defers, in.host(at.written), in.host(at.flushed));
  }
  void copy(const SlotCopy& copy) {
    pool.copy_slot(copy.to, copy.from);
    writes.copy(copy);
  }
  void fill_outputs(const StepBatch& batch, const StepInputs& at);
  void fill_padding(const StepShape& shape, const StepShape& to, const StepInputs& at);
  void run(const StepShape& shape, const StepInputs& at, bool flushes = false);
  // Tokens of a row of a warm-up, which its pages hold.
  int64_t row_most() const {
    const int64_t held = limits.pages > 0 ? int64_t(pages) * limits.page_tokens : INT64_MAX;
    return std::min<int64_t>({limits.chunk_tokens, limits.prompt_tokens, held});
  }
  int64_t row_pages() const {
    return pages > 0 ? (row_most() + limits.page_tokens - 1) / limits.page_tokens : 0;
  }
  void warm_up();
  void warm_up_prompts(int32_t tokens);
  const Lowered& lowered(const StepShape& shape);
  StepArrays device_arrays(const StepShape& shape) const;
  void read_drawn(const StepBatch& batch, const StepOutputs& at, const std::byte* host);

  const Model& model;
  const StatePool& pool;
  const Limits limits;
  Backend& backend;
  const size_t kv_bytes_per_token;
  const int32_t pages;        // page table entries a row
  DeferredWrites writes;
  Staging in;
  std::byte* device_out;      // answers, laid out as StepOutputs says
  std::vector<std::byte> host_out[Scheduler::kStepsOut];  // in turn
  Token* read;                // [step_tokens], on the device
  float* workspace = nullptr;
  std::vector<LogitEdit> edits;
  LogitEdit* device_edits = nullptr;
  size_t edits_capacity = 0;
  std::unordered_map<StepShape, Lowered, ShapeHash> programs;
  Acts logits;                // of the step begun last
  std::vector<Drawn> drawn;   // [step_tokens], reused
  size_t bytes = 0;           // the floor of the step begun last
  Begun begun[Scheduler::kStepsOut];  // in turn
  uint64_t steps_begun = 0, steps_finished = 0;
};

void Runner::Impl::fill_rows(const StepBatch& batch, const StepInputs& at) {
  WEIR_CHECK(batch.rows.size() <= size_t(limits.slots));
  WEIR_CHECK(batch.tokens.size() <= size_t(limits.step_tokens));
  std::ranges::copy(batch.tokens, in.host(at.ids));
  int32_t* slot = in.host(at.slot);
  int32_t* first = in.host(at.first);
  int32_t* begin = in.host(at.begin);
  int32_t* page_table = in.host(at.page_table);
  bytes = 0;
  for (size_t r = 0; r < batch.rows.size(); ++r) {
    const Row& row = batch.rows[r];
    slot[r] = row.slot;
    first[r] = row.first;
    begin[r] = row.begin;
    begin[r + 1] = row.begin + row.count;
    WEIR_CHECK(row.pages.size() <= size_t(pages));
    std::ranges::copy(row.pages, page_table + r * size_t(pages));
    bytes += size_t(row.first) * kv_bytes_per_token;
  }
}

void Runner::Impl::fill_outputs(const StepBatch& batch, const StepInputs& at) {
  edits.clear();
  const bool all = shape_of(batch).wants_all();
  int32_t* edit_begin = in.host(at.edit_begin);
  edit_begin[0] = 0;
  for (size_t i = 0; i < batch.outputs.size(); ++i) {
    const Output& output = batch.outputs[i];
    WEIR_CHECK(!all || output.token == int32_t(i));
    in.host(at.output_token)[i] = output.token;
    in.host(at.sampling)[i] = output.sampling;
    in.host(at.position)[i] = output.position;
    in.host(at.target)[i] = output.target;
    in.host(at.top)[i] = output.top;
    in.host(at.counts)[i] = output.counts_last ? output.token : -1;
    edits.insert(edits.end(), output.edits.begin(), output.edits.end());
    edit_begin[i + 1] = int32_t(edits.size());
  }
  reserve_edits(edits.size());
}

// Rows that touch nothing: of one token, the last one of all that are left. And outputs that nobody
// reads.
void Runner::Impl::fill_padding(const StepShape& shape, const StepShape& to,
                                const StepInputs& at) {
  std::fill(in.host(at.ids) + shape.tokens, in.host(at.ids) + to.tokens, 0);
  for (int32_t row = shape.rows, token = shape.tokens; row < to.rows; ++row) {
    in.host(at.slot)[row] = kPadding;
    in.host(at.first)[row] = 1;
    in.host(at.written)[row] = in.host(at.flushed)[row] = 1;
    in.host(at.begin)[row + 1] = row + 1 < to.rows ? ++token : to.tokens;
  }
  for (int32_t output = shape.outputs; output < to.outputs; ++output) {
    in.host(at.output_token)[output] = to.tokens - 1;
    in.host(at.sampling)[output] = {.temperature = 0};
    in.host(at.position)[output] = 1;
    in.host(at.target)[output] = -1;
    in.host(at.top)[output] = 0;
    in.host(at.counts)[output] = -1;
    in.host(at.edit_begin)[output + 1] = int32_t(edits.size());
  }
}

// flushes: before it, what at.flushed says is added to states.
void Runner::Impl::run(const StepShape& shape, const StepInputs& at, bool flushes) {
  in.upload(at.layout.bytes(), backend);
  if (flushes && pool.defers_writes()) {
    const Program& flush =
        writes.flush({.count = shape.rows, .slot = in.device(at.slot),
                      .first = in.device(at.first), .written = in.device(at.flushed)});
    backend.run(flush);
    bytes += cost(flush).bytes;
  }
  if (!edits.empty()) {
    backend.upload(device_edits, edits.data(), edits.size() * sizeof(LogitEdit));
  }
  const Lowered& lowered = this->lowered(shape);
  backend.run(lowered.program);
  bytes += lowered.bytes;
  if (const auto* sample = std::get_if<Sample>(&lowered.program.back())) {
    logits = sample->logits;
  }
}

// Every padded shape, twice: from the second run on the backend remembers it. Then prompts of sizes
// an eighth of an octave apart, large ones a quarter: the backend chooses between products when it
// first meets a size.
void Runner::Impl::warm_up() {
  const int32_t most = std::min(limits.slots, limits.step_tokens);
  for (int32_t rows = 1; rows <= most; ++rows) {
    const StepShape shape = padded_shape({rows, rows, rows}, limits);
    rows = shape.rows;
    const StepInputs at(shape, pages);
    in.host(at.begin)[0] = 0;
    in.host(at.edit_begin)[0] = 0;
    fill_padding({}, shape, at);
    for (int times = 0; times < 2; ++times) run(shape, at, times == 0);
    backend.finish();
  }
  int64_t rows = limits.slots;  // of prompts, each with pages of its own
  if (pages > 0) rows = std::min(rows, limits.pages / row_pages());
  const int64_t longest = std::min(int64_t(limits.step_tokens), rows * row_most());
  for (int32_t size = kPromptsWarmed; size < longest;) {
    const auto octave = int32_t(std::bit_floor(uint32_t(size)));
    size += octave / (size < kPaddedMost ? 8 : 4);
    warm_up_prompts(int32_t(std::min<int64_t>(size, longest)));
  }
}

// A step of prompts with so many tokens. No sequence has begun, so its states may be anybody's.
void Runner::Impl::warm_up_prompts(int32_t tokens) {
  std::vector<int32_t> page(size_t(limits.pages));
  std::iota(page.begin(), page.end(), 0);
  StepBatch batch;
  batch.tokens.assign(size_t(tokens), 0);
  for (int32_t begin = 0, count = 0; begin < tokens; begin += count) {
    count = int32_t(std::min<int64_t>(row_most(), tokens - begin));
    const size_t row = batch.rows.size(), held = size_t(row_pages());
    batch.rows.push_back({.slot = Slot(row), .count = count, .begin = begin,
                          .pages = {page.data() + row * held, held}});
  }
  batch.outputs.push_back({.token = tokens - 1, .position = batch.rows.back().count,
                           .sampling = {.temperature = 0}});
  const StepShape shape = shape_of(batch);
  const StepInputs at(shape, pages);
  fill_rows(batch, at);
  fill_written(batch, lowered(shape).defers, at);
  fill_outputs(batch, at);
  run(shape, at);
  backend.finish();
}

const Lowered& Runner::Impl::lowered(const StepShape& shape) {
  if (const auto found = programs.find(shape); found != programs.end()) return found->second;
  if (programs.size() >= kProgramsKept) programs.clear();
  Workspace space(workspace);
  const StepArrays arrays = device_arrays(shape);
  Lowered made;
  made.program = lower(model.spec, model.weights, &pool, limits, arrays, shape, space);
  made.defers = keep_deferred(made.program, backend);
  made.bytes = cost(made.program).bytes;
  return programs.emplace(shape, std::move(made)).first->second;
}

StepArrays Runner::Impl::device_arrays(const StepShape& shape) const {
  const StepInputs at(shape, pages);
  const StepOutputs to(shape.outputs);
  const auto out = [this]<typename T>(Layout::Array<T> array) {
    return reinterpret_cast<T*>(device_out + array.offset);
  };
  return {.ids = in.device(at.ids),
          .drawn = out(to.token),
          .read = read,
          .slot = in.device(at.slot),
          .first = in.device(at.first),
          .begin = in.device(at.begin),
          .written = in.device(at.written),
          .page_table = in.device(at.page_table),
          .pages_per_row = pages,
          .output_token = in.device(at.output_token),
          .sample = {.sampling = in.device(at.sampling),
                     .position = in.device(at.position),
                     .target = in.device(at.target),
                     .top = in.device(at.top),
                     .edit_begin = in.device(at.edit_begin),
                     .edits = device_edits,
                     .read = read,
                     .counts = in.device(at.counts),
                     .token = out(to.token),
                     .logprob = out(to.logprob),
                     .top_token = out(to.top_token),
                     .top_logprob = out(to.top_logprob)}};
}

void Runner::Impl::read_drawn(const StepBatch& batch, const StepOutputs& at,
                             const std::byte* host) {
  const auto in_host = [host]<typename T>(Layout::Array<T> array) {
    return reinterpret_cast<const T*>(host + array.offset);
  };
  const Token* token = in_host(at.token);
  const float* logprob = in_host(at.logprob);
  for (size_t i = 0; i < batch.outputs.size(); ++i) {
    Drawn& answer = drawn[i];
    answer.token = token[i];
    answer.logprob = logprob[i];
    answer.top.clear();
    const Token* top_token = in_host(at.top_token) + i * Sample::kTop;
    const float* top_logprob = in_host(at.top_logprob) + i * Sample::kTop;
    for (int32_t j = 0; j < batch.outputs[i].top; ++j) {
      if (top_token[j] >= 0) answer.top.push_back({top_token[j], top_logprob[j]});
    }
  }
}

Runner::Runner(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend)
    : impl_(std::make_unique<Impl>(model, pool, limits, backend)) {}

Runner::~Runner() = default;

size_t Runner::steps_out() const {
  return impl_->backend.runs_ahead() ? Scheduler::kStepsOut : 1;
}

void Runner::begin(const StepBatch& batch) {
  Impl& self = *impl_;
  WEIR_CHECK(self.steps_begun - self.steps_finished < steps_out());
  const StepShape shape = shape_of(batch);
  const StepShape padded =
      self.backend.remembers_programs() ? padded_shape(shape, self.limits) : shape;
  const StepInputs at(padded, self.pages);
  for (const SlotCopy& copy : batch.starts) self.copy(copy);
  self.fill_rows(batch, at);
  const bool flushes = self.fill_written(batch, self.lowered(padded).defers, at);
  self.fill_outputs(batch, at);
  self.fill_padding(shape, padded, at);
  self.run(padded, at, flushes);
  for (const SlotCopy& copy : batch.keeps) self.copy(copy);

  const size_t turn = self.steps_begun++ % Scheduler::kStepsOut;
  Begun& step = self.begun[turn];
  step = {.batch = &batch, .outputs = padded.outputs};
  if (!batch.outputs.empty()) {
    const StepOutputs to(padded.outputs);
    const bool alternatives = std::ranges::any_of(batch.outputs, &Output::top);
    self.backend.download(self.host_out[turn].data(), self.device_out,
                          alternatives ? to.layout.bytes() : to.without_top);
  }
  step.mark = self.backend.mark();
}

std::span<const Drawn> Runner::finish() {
  Impl& self = *impl_;
  WEIR_CHECK(self.steps_finished < self.steps_begun);
  const size_t turn = self.steps_finished++ % Scheduler::kStepsOut;
  const Begun& step = self.begun[turn];
  self.backend.await(step.mark);
  self.read_drawn(*step.batch, StepOutputs(step.outputs), self.host_out[turn].data());
  return {self.drawn.data(), step.batch->outputs.size()};
}

size_t Runner::step_bytes() const { return impl_->bytes; }

std::vector<float> Runner::logits(int32_t output) const {
  std::vector<float> values(size_t(impl_->model.spec.vocab));
  impl_->backend.download(values.data(), impl_->logits.at(output), values.size() * sizeof(float));
  impl_->backend.finish();
  return values;
}

size_t Runner::workspace_bytes(const ModelSpec& spec, const Limits& limits) {
  return size_t(workspace_floats(spec, limits)) * sizeof(float) +
         input_bytes(limits) + answer_bytes(limits) + token_bytes(limits);
}

}  // namespace weir
