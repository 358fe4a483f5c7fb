#include "engine/runner.h"

#include <algorithm>
#include <unordered_map>

#include "engine/lower.h"
#include "engine/staging.h"
#include "kernels/check.h"

namespace weir {
namespace {

struct ShapeHash {
  size_t operator()(const StepShape& shape) const {
    const size_t both = size_t(shape.rows) * 0x9E3779B97F4A7C15ull + size_t(shape.tokens);
    return both * 0x9E3779B97F4A7C15ull + size_t(shape.outputs);
  }
};

struct Lowered {
  Program program;
  size_t bytes = 0;  // its floor
};

// Programs are cheap to make again; the cache only has to hold what a busy hour repeats.
constexpr size_t kProgramsKept = 512;

// The rows that a decode step of so many is padded to, where the backend remembers programs.
int32_t padded_rows(int32_t rows, const Limits& limits) {
  constexpr int32_t kSteps[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128};
  const auto* const step = std::ranges::lower_bound(kSteps, rows);
  const int32_t padded = step != std::end(kSteps) ? *step : (rows + 63) / 64 * 64;
  return std::min({padded, limits.slots, limits.step_tokens});
}

int32_t pages_per_row(const Limits& limits) {
  const int64_t longest = int64_t(limits.prompt_tokens) + limits.new_tokens;
  const int64_t pages = (longest + limits.page_tokens - 1) / limits.page_tokens;
  return int32_t(std::min<int64_t>(pages, limits.pages));
}

// What a step reads: rows, tokens and how to draw.
struct Inputs {
  Inputs(const Limits& limits) : pages(pages_per_row(limits)) {
    const auto rows = size_t(limits.slots), tokens = size_t(limits.step_tokens);
    ids = staging.reserve<Token>(tokens);
    slot = staging.reserve<int32_t>(rows);
    first = staging.reserve<int32_t>(rows);
    begin = staging.reserve<int32_t>(rows + 1);
    page_table = staging.reserve<int32_t>(rows * size_t(pages));
    output_token = staging.reserve<int32_t>(tokens);
    sampling = staging.reserve<Sampling>(tokens);
    position = staging.reserve<int32_t>(tokens);
    target = staging.reserve<Token>(tokens);
    top = staging.reserve<int32_t>(tokens);
    edit_begin = staging.reserve<int32_t>(tokens + 1);
  }

  int32_t pages = 0;  // page table entries a row
  Staging staging;
  Staging::Array<Token> ids, target;
  Staging::Array<int32_t> slot, first, begin, page_table, output_token, position, top, edit_begin;
  Staging::Array<Sampling> sampling;
};

// What a step answers.
struct Outputs {
  Outputs(const Limits& limits) {
    const auto outputs = size_t(limits.step_tokens);
    token = staging.reserve<Token>(outputs);
    logprob = staging.reserve<float>(outputs);
    top_token = staging.reserve<Token>(outputs * Sample::kTop);
    top_logprob = staging.reserve<float>(outputs * Sample::kTop);
  }

  Staging staging;
  Staging::Array<Token> token, top_token;
  Staging::Array<float> logprob, top_logprob;
};

StepArrays device_arrays(const Inputs& in, const Outputs& out, const LogitEdit* edits) {
  const Staging& s = in.staging;
  return {.ids = s.device(in.ids),
          .slot = s.device(in.slot),
          .first = s.device(in.first),
          .begin = s.device(in.begin),
          .page_table = s.device(in.page_table),
          .pages_per_row = in.pages,
          .output_token = s.device(in.output_token),
          .sample = {.sampling = s.device(in.sampling),
                     .position = s.device(in.position),
                     .target = s.device(in.target),
                     .top = s.device(in.top),
                     .edit_begin = s.device(in.edit_begin),
                     .edits = edits,
                     .token = out.staging.device(out.token),
                     .logprob = out.staging.device(out.logprob),
                     .top_token = out.staging.device(out.top_token),
                     .top_logprob = out.staging.device(out.top_logprob)}};
}

int64_t workspace_floats(const ModelSpec& spec, const Limits& limits) {
  Workspace measure;
  const StepShape largest{limits.slots, limits.step_tokens, limits.step_tokens};
  lower(spec, weight_shapes(spec), nullptr, limits, {}, largest, measure);
  return measure.peak();
}

}  // namespace

struct Runner::Impl {
  Impl(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend)
      : model(model),
        pool(pool),
        limits(limits),
        backend(backend),
        kv_bytes_per_token(state_size(model.spec).kv_per_token),
        in(limits),
        out(limits) {
    in.staging.allocate(backend);
    out.staging.allocate(backend);
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

  void fill_rows(const StepBatch& batch);
  void fill_outputs(const StepBatch& batch);
  StepShape pad(const StepShape& shape);
  void fill_padding(int32_t row);
  void run(const StepShape& shape);
  void warm_up();
  const Lowered& lowered(const StepShape& shape);
  void read_drawn(const StepBatch& batch);

  const Model& model;
  const StatePool& pool;
  const Limits limits;
  Backend& backend;
  const size_t kv_bytes_per_token;
  Inputs in;
  Outputs out;
  float* workspace = nullptr;
  std::vector<LogitEdit> edits;
  LogitEdit* device_edits = nullptr;
  size_t edits_capacity = 0;
  std::unordered_map<StepShape, Lowered, ShapeHash> programs;
  Acts logits;                // of the last step
  std::vector<Drawn> drawn;   // [step_tokens], reused
  size_t bytes = 0;           // the last step's floor
};

void Runner::Impl::fill_rows(const StepBatch& batch) {
  WEIR_CHECK(batch.rows.size() <= size_t(limits.slots));
  WEIR_CHECK(batch.tokens.size() <= size_t(limits.step_tokens));
  std::ranges::copy(batch.tokens, in.staging.host(in.ids));
  int32_t* slot = in.staging.host(in.slot);
  int32_t* first = in.staging.host(in.first);
  int32_t* begin = in.staging.host(in.begin);
  int32_t* page_table = in.staging.host(in.page_table);
  bytes = 0;
  for (size_t r = 0; r < batch.rows.size(); ++r) {
    const Row& row = batch.rows[r];
    slot[r] = row.slot;
    first[r] = row.first;
    begin[r] = row.begin;
    begin[r + 1] = row.begin + row.count;
    WEIR_CHECK(row.pages.size() <= size_t(in.pages));
    std::ranges::copy(row.pages, page_table + r * size_t(in.pages));
    bytes += size_t(row.first) * kv_bytes_per_token;
  }
}

void Runner::Impl::fill_outputs(const StepBatch& batch) {
  edits.clear();
  int32_t* edit_begin = in.staging.host(in.edit_begin);
  edit_begin[0] = 0;
  for (size_t i = 0; i < batch.outputs.size(); ++i) {
    const Output& output = batch.outputs[i];
    in.staging.host(in.output_token)[i] = output.token;
    in.staging.host(in.sampling)[i] = output.sampling;
    in.staging.host(in.position)[i] = output.position;
    in.staging.host(in.target)[i] = output.target;
    in.staging.host(in.top)[i] = output.top;
    edits.insert(edits.end(), output.edits.begin(), output.edits.end());
    edit_begin[i + 1] = int32_t(edits.size());
  }
  reserve_edits(edits.size());
}

// A step of one token a row becomes one of few shapes where programs are remembered.
StepShape Runner::Impl::pad(const StepShape& shape) {
  const bool decode = shape.rows == shape.tokens && shape.rows == shape.outputs;
  if (shape.rows == 0 || !decode || !backend.remembers_programs()) return shape;
  const int32_t rows = padded_rows(shape.rows, limits);
  for (int32_t r = shape.rows; r < rows; ++r) fill_padding(r);
  return {rows, rows, rows};
}

// A row of one token that touches nothing, and whose answer nobody reads.
void Runner::Impl::fill_padding(int32_t row) {
  in.staging.host(in.ids)[row] = 0;
  in.staging.host(in.slot)[row] = kPadding;
  in.staging.host(in.first)[row] = 1;
  in.staging.host(in.begin)[row + 1] = row + 1;
  in.staging.host(in.output_token)[row] = row;
  in.staging.host(in.sampling)[row] = {.temperature = 0};
  in.staging.host(in.position)[row] = 1;
  in.staging.host(in.target)[row] = -1;
  in.staging.host(in.top)[row] = 0;
  in.staging.host(in.edit_begin)[row + 1] = int32_t(edits.size());
}

void Runner::Impl::run(const StepShape& shape) {
  in.staging.upload(backend);
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

// Every padded shape, twice: from the second run on the backend remembers it.
void Runner::Impl::warm_up() {
  in.staging.host(in.begin)[0] = 0;
  in.staging.host(in.edit_begin)[0] = 0;
  const int32_t most = std::min(limits.slots, limits.step_tokens);
  for (int32_t rows = 1, filled = 0; rows <= most; ++rows) {
    rows = padded_rows(rows, limits);
    for (; filled < rows; ++filled) fill_padding(filled);
    for (int times = 0; times < 2; ++times) run({rows, rows, rows});
    backend.finish();
  }
}

const Lowered& Runner::Impl::lowered(const StepShape& shape) {
  if (const auto found = programs.find(shape); found != programs.end()) return found->second;
  if (programs.size() >= kProgramsKept) programs.clear();
  Workspace space(workspace);
  const StepArrays arrays = device_arrays(in, out, device_edits);
  Lowered made;
  made.program = lower(model.spec, model.weights, &pool, limits, arrays, shape, space);
  made.bytes = cost(made.program).bytes;
  return programs.emplace(shape, std::move(made)).first->second;
}

void Runner::Impl::read_drawn(const StepBatch& batch) {
  if (batch.outputs.empty()) return;
  out.staging.download(backend);
  backend.finish();
  const Token* token = out.staging.host(out.token);
  const float* logprob = out.staging.host(out.logprob);
  for (size_t i = 0; i < batch.outputs.size(); ++i) {
    Drawn& answer = drawn[i];
    answer.token = token[i];
    answer.logprob = logprob[i];
    answer.top.clear();
    const Token* top_token = out.staging.host(out.top_token) + i * Sample::kTop;
    const float* top_logprob = out.staging.host(out.top_logprob) + i * Sample::kTop;
    for (int32_t j = 0; j < batch.outputs[i].top; ++j) {
      if (top_token[j] >= 0) answer.top.push_back({top_token[j], top_logprob[j]});
    }
  }
}

Runner::Runner(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend)
    : impl_(std::make_unique<Impl>(model, pool, limits, backend)) {}

Runner::~Runner() = default;

std::span<const Drawn> Runner::step(const StepBatch& batch) {
  Impl& self = *impl_;
  self.fill_rows(batch);
  self.fill_outputs(batch);
  self.run(self.pad({int32_t(batch.rows.size()), int32_t(batch.tokens.size()),
                     int32_t(batch.outputs.size())}));
  self.read_drawn(batch);
  self.backend.finish();
  return {self.drawn.data(), batch.outputs.size()};
}

size_t Runner::step_bytes() const { return impl_->bytes; }

std::vector<float> Runner::logits(int32_t output) const {
  std::vector<float> values(size_t(impl_->model.spec.vocab));
  impl_->backend.download(values.data(), impl_->logits.at(output), values.size() * sizeof(float));
  impl_->backend.finish();
  return values;
}

size_t Runner::workspace_bytes(const ModelSpec& spec, const Limits& limits) {
  return size_t(workspace_floats(spec, limits)) * sizeof(float) + Inputs(limits).staging.bytes() +
         Outputs(limits).staging.bytes();
}

}  // namespace weir
