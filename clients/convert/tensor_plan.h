#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "clients/convert/served_model.h"

namespace weir {

using Shape = std::vector<int64_t>;

// A named share of a fused tensor: how many of its rows.
struct Part {
  std::string name;
  int64_t rows = 0;
};

// Takes a checkpoint's tensors one after the other into a list of what to write. Remembers which
// were taken, and the first thing that was wrong.
//
// A name is that of the legacy format. A tensor of layer l is also found where torch_dist keeps it:
// without its number, as row l of a tensor with a leading layer axis; and a fused tensor in parts
// with a name of their own, "in_proj.weight.query".
class TensorPlan {
 public:
  // The checkpoint is borrowed; `layers` is the length of a layer axis.
  TensorPlan(const MegatronCheckpoint& checkpoint, int64_t layers)
      : checkpoint_(checkpoint), layers_(layers) {}

  // Elements of one or several tensors that follow each other.
  using Elements = std::vector<Extent>;

  bool has(const std::string& name) const;
  // Its sizes, without the layer axis; empty when there is none of the name.
  Shape shape(const std::string& name) const;

  // A whole tensor of this shape, but for sizes of 1. Absence is refused.
  Elements take(const std::string& name, const Shape& shape);
  // The first of these names that there is.
  Elements take_first_of(const std::vector<std::string>& names, const Shape& shape);
  // The parts of a fused tensor whose rows have the shape `row`, in order.
  std::vector<Elements> take_parts(const std::string& name, const std::vector<Part>& parts,
                                   const Shape& row);
  // Takes it and has it nowhere.
  void drop(const std::string& name);

  void write(const std::string& name, const Shape& shape, Elements elements,
             bool plus_one = false);

  void refuse(const std::string& name, const std::string& why);
  void refuse_tensors_left();
  const absl::Status& status() const { return status_; }
  std::vector<ServedTensor> tensors() && { return std::move(tensors_); }

 private:
  struct Found {
    std::string name;                       // in the checkpoint
    const SourceTensor* tensor = nullptr;   // null: none
    int64_t first = 0;                      // its layer's first element
    Shape shape;                            // without the layer axis
  };
  Found find(const std::string& name) const;
  Extent take_found(const Found& found, const Shape& shape);

  const MegatronCheckpoint& checkpoint_;
  const int64_t layers_;
  std::set<std::string> taken_;
  std::vector<ServedTensor> tensors_;
  absl::Status status_;
};

}  // namespace weir
