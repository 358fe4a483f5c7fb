#include "clients/convert/tensor_plan.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace weir {
namespace {

constexpr std::string_view kLayers = "decoder.layers.";

int64_t count_of(const Shape& shape) {
  int64_t count = 0;
  return count_elements(shape, count) ? count : INT64_MAX;
}

bool same_but_for_ones(Shape a, Shape b) {
  std::erase(a, 1);
  std::erase(b, 1);
  return a == b;
}

bool is_served(TensorType type) {
  return type == TensorType::BF16 || type == TensorType::F16 || type == TensorType::F32;
}

// "decoder.layers.7.mlp.x" to 7 and "decoder.layers.mlp.x"; false: not a layer's name.
bool split_layer(const std::string& name, int64_t& layer, std::string& stacked) {
  if (!name.starts_with(kLayers)) return false;
  const char* begin = name.data() + kLayers.size();
  const char* end = name.data() + name.size();
  const auto number = std::from_chars(begin, end, layer);
  if (number.ec != std::errc() || number.ptr == end || *number.ptr != '.') return false;
  stacked = std::string(kLayers) + std::string(number.ptr + 1, end);
  return true;
}

}  // namespace

TensorPlan::Found TensorPlan::find(const std::string& name) const {
  const auto at = checkpoint_.tensors.find(name);
  if (at != checkpoint_.tensors.end()) {
    return {.name = name, .tensor = &at->second, .shape = at->second.shape};
  }
  int64_t layer = 0;
  std::string stacked;
  if (!split_layer(name, layer, stacked)) return {};
  const auto all = checkpoint_.tensors.find(stacked);
  if (all == checkpoint_.tensors.end()) return {};
  const Shape& shape = all->second.shape;
  if (shape.empty() || shape[0] != layers_ || layer >= layers_) return {};
  Found found{.name = stacked,
              .tensor = &all->second,
              .shape = Shape(shape.begin() + 1, shape.end())};
  found.first = layer * count_of(found.shape);
  return found;
}

bool TensorPlan::has(const std::string& name) const { return find(name).tensor != nullptr; }

Shape TensorPlan::shape(const std::string& name) const { return find(name).shape; }

Extent TensorPlan::take_found(const Found& found, const Shape& shape) {
  taken_.insert(found.name);
  if (!is_served(found.tensor->type)) {
    refuse(found.name, absl::StrCat("expected BF16, F16 or F32, found ",
                                    weir::name(found.tensor->type)));
  }
  if (!same_but_for_ones(found.shape, shape)) {
    refuse(found.name, absl::StrCat("expected shape ", shape_text(shape), ", found ",
                                    shape_text(found.shape)));
    return {.source = found.tensor};
  }
  return {.source = found.tensor, .first = found.first, .count = count_of(shape)};
}

TensorPlan::Elements TensorPlan::take(const std::string& name, const Shape& shape) {
  return take_first_of({name}, shape);
}

TensorPlan::Elements TensorPlan::take_first_of(const std::vector<std::string>& names,
                                               const Shape& shape) {
  for (const std::string& name : names) {
    const Found found = find(name);
    if (found.tensor != nullptr) return {take_found(found, shape)};
  }
  refuse(names[0], absl::StrCat("expected shape ", shape_text(shape), ", found nothing"));
  return {};
}

std::vector<TensorPlan::Elements> TensorPlan::take_parts(const std::string& name,
                                                         const std::vector<Part>& parts,
                                                         const Shape& row) {
  std::vector<Elements> elements;
  const auto with_rows = [&](int64_t rows) {
    Shape shape = {rows};
    shape.insert(shape.end(), row.begin(), row.end());
    return shape;
  };
  const Found whole = find(name);
  if (whole.tensor == nullptr && !parts.empty() && has(name + parts[0].name)) {
    for (const Part& part : parts) elements.push_back(take(name + part.name, with_rows(part.rows)));
    return elements;
  }
  int64_t rows = 0;
  for (const Part& part : parts) rows += part.rows;
  const Elements all = take(name, with_rows(rows));
  if (all.empty()) return std::vector<Elements>(parts.size());
  int64_t first = all[0].first;
  for (const Part& part : parts) {
    const int64_t count = all[0].count / rows * part.rows;
    elements.push_back({{.source = all[0].source, .first = first, .count = count}});
    first += count;
  }
  return elements;
}

void TensorPlan::drop(const std::string& name) {
  const Found found = find(name);
  if (found.tensor != nullptr) taken_.insert(found.name);
}

void TensorPlan::write(const std::string& name, const Shape& shape, Elements elements,
                       bool plus_one) {
  if (elements.empty()) return;  // there is none of it, or it was refused
  const TensorType type = elements[0].source->type;
  for (const Extent& part : elements) {
    if (part.source->type == type) continue;
    refuse(name, absl::StrCat("expected parts of one type, found ", weir::name(type), " and ",
                              weir::name(part.source->type)));
  }
  tensors_.push_back({.name = name,
                      .type = plus_one ? TensorType::F32 : type,
                      .shape = shape,
                      .parts = std::move(elements),
                      .plus_one = plus_one});
}

void TensorPlan::refuse(const std::string& name, const std::string& why) {
  if (!status_.ok()) return;
  const auto at = checkpoint_.tensors.find(name);
  const std::string& file =
      at == checkpoint_.tensors.end() ? checkpoint_.folder : at->second.file;
  status_ = absl::InvalidArgumentError(
      absl::StrCat(file, ": tensor ", absl::Utf8SafeCHexEscape(name), ": ", why));
}

void TensorPlan::refuse_tensors_left() {
  for (const auto& [name, tensor] : checkpoint_.tensors) {
    if (taken_.contains(name)) continue;
    refuse(name, absl::StrCat("the model has no place for it, of shape ",
                              shape_text(tensor.shape)));
  }
}

}  // namespace weir
