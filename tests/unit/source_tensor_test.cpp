// A tensor in shards: whatever the cuts, its elements come out in order; shards that overlap, lie
// outside or leave gaps are refused.
#include "clients/convert/source_tensor.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace weir {
namespace {

using Shape = std::vector<int64_t>;

// A tensor of I32 whose elements are their own places, cut into boxes.
class Sharded {
 public:
  explicit Sharded(const Shape& shape) { tensor_ = {.type = TensorType::I32, .shape = shape}; }

  Sharded& add(const Shape& first, const Shape& sizes) {
    int64_t count = 1;
    for (const int64_t size : sizes) count *= size;
    auto values = std::make_unique<int32_t[]>(size_t(count));
    for (int64_t i = 0; i < count; ++i) {
      int64_t rest = i, place = 0, stride = 1;
      for (size_t axis = sizes.size(); axis-- > 0;) {
        place += (first[axis] + rest % sizes[axis]) * stride;
        rest /= sizes[axis];
        stride *= tensor_.shape[axis];
      }
      values[size_t(i)] = int32_t(place);
    }
    const std::span<const std::byte> data =
        std::as_bytes(std::span(values.get(), size_t(count)));
    tensor_.pieces.push_back(
        {.first = first, .stored = {.type = TensorType::I32, .shape = sizes, .data = data}});
    kept_.push_back(std::move(values));
    return *this;
  }
  std::string error() const {
    const absl::Status status = check_pieces(tensor_, "w");
    return status.ok() ? "accepted" : std::string(status.message());
  }
  SourceTensor& tensor() { return tensor_; }

 private:
  SourceTensor tensor_;
  std::vector<std::unique_ptr<int32_t[]>> kept_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(SourceTensor, AnyCutsGiveItsElementsInOrder) {
  std::mt19937 random(4);
  const auto upto = [&](int64_t most) { return int64_t(random() % uint32_t(most)) + 1; };
  for (int round = 0; round < 200; ++round) {
    Shape shape;
    for (int64_t axis = upto(3); axis > 0; --axis) shape.push_back(upto(6));
    Sharded sharded(shape);
    int64_t total = 1;
    for (const int64_t size : shape) total *= size;
    // A grid of boxes: each axis is cut at some width.
    Shape width, first(shape.size(), 0);
    for (const int64_t size : shape) width.push_back(upto(size));
    for (bool more = true; more;) {
      Shape sizes;
      for (size_t axis = 0; axis < shape.size(); ++axis) {
        sizes.push_back(std::min(width[axis], shape[axis] - first[axis]));
      }
      sharded.add(first, sizes);
      more = false;
      for (size_t axis = 0; axis < shape.size() && !more; ++axis) {
        first[axis] += width[axis];
        more = first[axis] < shape[axis];
        if (!more) first[axis] = 0;
      }
    }
    std::shuffle(sharded.tensor().pieces.begin(), sharded.tensor().pieces.end(), random);
    ASSERT_EQ(sharded.error(), "accepted");
    const int64_t begin = upto(total) - 1, count = upto(total - begin);
    std::vector<int32_t> out(size_t(count), -1);
    copy_elements(sharded.tensor(), begin, count, reinterpret_cast<std::byte*>(out.data()));
    for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[size_t(i)], begin + i) << "round " << round;
  }
}

TEST(SourceTensor, ShardsThatOverlapOrLieOutsideAreRefused) {
  // As many elements as the tensor has, but some twice.
  EXPECT_TRUE(has(Sharded({4, 4}).add({0, 0}, {3, 4}).add({2, 0}, {1, 4}).error(),
                  "tensor w: two of its shards overlap"));
  EXPECT_TRUE(has(Sharded({4, 4}).add({0, 0}, {4, 2}).add({1, 1}, {2, 2}).add({0, 3}, {4, 1})
                      .error(), "two of its shards overlap"));
  EXPECT_TRUE(has(Sharded({4, 4}).add({0, 0}, {2, 4}).add({3, 0}, {2, 4}).error(),
                  "expected shards within [4, 4], found [2, 4] at [3, 0]"));
  EXPECT_TRUE(has(Sharded({4}).add({0}, {2}).add({-1}, {2}).error(),
                  "expected shards within [4], found [2] at [-1]"));
  EXPECT_TRUE(has(Sharded({4}).add({0}, {3}).error(),
                  "expected shards with 4 elements in all, found 3"));
  Sharded other({4});
  other.add({0}, {4}).tensor().type = TensorType::F32;
  EXPECT_TRUE(has(other.error(), "expected shards of F32, found I32"));
}

}  // namespace
}  // namespace weir
