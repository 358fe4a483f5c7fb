#pragma once
#include <vector>

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

namespace weir {

// The usual process_* metrics, read from /proc/self when asked.
class ProcessMetrics final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

}  // namespace weir
