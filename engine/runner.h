#pragma once
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/model.h"
#include "engine/state_pool.h"
#include "kernels/backend.h"

namespace weir {

// A StepBatch to uploaded arrays, the right Program, and the drawn tokens. A step is one small
// upload, its program and one small download, in that order; where the backend runs ahead, the next
// step's follow before the last one's answers are there, and its tokens may be those that the last
// one has left on the device. Owned by main; used by the engine thread alone. Model, pool and
// backend outlive it.
class Runner final : public StepRunner {
 public:
  Runner(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend);
  ~Runner() override;

  size_t steps_out() const override;
  void begin(const StepBatch& batch) override;
  std::span<const Drawn> finish() override;
  size_t step_bytes() const override;
  // The raw logits of output number `output` of the step begun last, [vocab].
  std::vector<float> logits(int32_t output) const;
  // Bytes of workspace that a runner for this model and these limits allocates.
  static size_t workspace_bytes(const ModelSpec& spec, const Limits& limits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
