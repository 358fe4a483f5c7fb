#pragma once
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/model.h"
#include "engine/state_pool.h"
#include "kernels/backend.h"

namespace weir {

// A StepBatch to uploaded arrays, the right Program, and the drawn tokens. Owned by main; used by
// the engine thread alone. Model, pool and backend outlive it.
class Runner final : public StepRunner {
 public:
  Runner(const Model& model, const StatePool& pool, const Limits& limits, Backend& backend);
  ~Runner() override;

  std::span<const Drawn> step(const StepBatch& batch) override;
  size_t step_bytes() const override;
  // The raw logits of the last step's output number `output`, [vocab].
  std::vector<float> logits(int32_t output) const;
  // Bytes of workspace that a runner for this model and these limits allocates.
  static size_t workspace_bytes(const ModelSpec& spec, const Limits& limits);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weir
