#include "clients/convert/source_tensor.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace weir {
namespace {

using Piece = SourceTensor::Piece;
using Shape = std::vector<int64_t>;

// A run of a piece's elements that lie side by side in the tensor as in the piece.
struct Runs {
  int64_t length = 1;      // elements of a run
  size_t outer = 0;        // leading dimensions that are stepped through, run by run
};

// Trailing dimensions that the piece fills lie side by side, and so does the one before them.
Runs runs_of(const SourceTensor& tensor, const Piece& piece) {
  Runs runs{.outer = tensor.shape.size()};
  while (runs.outer > 0) {
    const size_t axis = --runs.outer;
    runs.length *= piece.stored.shape[axis];
    if (piece.stored.shape[axis] != tensor.shape[axis]) break;
  }
  return runs;
}

bool overlap(const Piece& a, const Piece& b) {
  for (size_t i = 0; i < a.first.size(); ++i) {
    if (a.first[i] + a.stored.shape[i] <= b.first[i] ||
        b.first[i] + b.stored.shape[i] <= a.first[i]) {
      return false;
    }
  }
  return true;
}

bool is_inside(const SourceTensor& tensor, const Piece& piece) {
  const size_t rank = tensor.shape.size();
  if (piece.first.size() != rank || piece.stored.shape.size() != rank) return false;
  for (size_t i = 0; i < rank; ++i) {
    const int64_t first = piece.first[i], size = piece.stored.shape[i];
    if (first < 0 || size < 0 || size > tensor.shape[i] || first > tensor.shape[i] - size) {
      return false;
    }
  }
  return true;
}

// Copies what a piece has of elements first .. end - 1.
void copy_piece(const SourceTensor& tensor, const Piece& piece, int64_t first, int64_t end,
                std::byte* out) {
  const size_t width = size_of(tensor.type);
  const Runs runs = runs_of(tensor, piece);
  std::vector<int64_t> index(tensor.shape.size(), 0);  // of the run, within the piece
  const std::byte* from = piece.stored.data.data();
  const std::byte* from_end = from + piece.stored.data.size();
  while (from != from_end) {
    int64_t begin = 0;
    for (size_t i = 0; i < index.size(); ++i) {
      begin = begin * tensor.shape[i] + piece.first[i] + index[i];
    }
    const int64_t low = std::max(first, begin), high = std::min(end, begin + runs.length);
    if (low < high) {
      std::memcpy(out + size_t(low - first) * width, from + size_t(low - begin) * width,
                  size_t(high - low) * width);
    }
    from += size_t(runs.length) * width;
    for (size_t i = runs.outer; i-- > 0;) {
      if (++index[i] < piece.stored.shape[i]) break;
      index[i] = 0;
    }
  }
}

}  // namespace

SourceTensor whole_tensor(const StoredTensor& stored, const std::string& file) {
  SourceTensor tensor{.type = stored.type, .shape = stored.shape, .file = file};
  tensor.pieces.push_back(
      {.first = std::vector<int64_t>(stored.shape.size(), 0), .stored = stored});
  return tensor;
}

absl::Status check_pieces(const SourceTensor& tensor, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(tensor.file, ": tensor ",
                                                   absl::Utf8SafeCHexEscape(name), ": ", why));
  };
  int64_t expected = 0, found = 0;
  if (!count_elements(tensor.shape, expected)) {
    return refuse("its shape " + shape_text(tensor.shape) + " is too large");
  }
  for (const Piece& piece : tensor.pieces) {
    if (piece.stored.type != tensor.type) {
      return refuse(absl::StrCat("expected shards of ", weir::name(tensor.type), ", found ",
                                 weir::name(piece.stored.type)));
    }
    if (!is_inside(tensor, piece)) {
      return refuse(absl::StrCat("expected shards within ", shape_text(tensor.shape), ", found ",
                                 shape_text(piece.stored.shape), " at ",
                                 shape_text(piece.first)));
    }
    int64_t count = 0;
    count_elements(piece.stored.shape, count);
    found += count;  // at most the tensor's elements, as shards inside it that are more overlap
    if (found > expected) break;
  }
  // Sorted along the first dimension, only neighbours there can overlap.
  std::vector<const Piece*> sorted;
  for (const Piece& piece : tensor.pieces) {
    if (!piece.stored.data.empty()) sorted.push_back(&piece);
  }
  const auto row = [](const Piece* piece) { return piece->first.empty() ? 0 : piece->first[0]; };
  std::ranges::sort(sorted, {}, row);
  for (size_t i = 0; i < sorted.size(); ++i) {
    for (size_t j = i + 1; j < sorted.size(); ++j) {
      const Shape& shape = sorted[i]->stored.shape;
      const int64_t end = row(sorted[i]) + (shape.empty() ? 1 : shape[0]);
      if (row(sorted[j]) >= end) break;
      if (overlap(*sorted[i], *sorted[j])) return refuse("two of its shards overlap");
    }
  }
  if (found == expected) return absl::OkStatus();
  return refuse(absl::StrCat("expected shards with ", expected, " elements in all, found ", found));
}

void copy_elements(const SourceTensor& tensor, int64_t first, int64_t count, std::byte* out) {
  for (const Piece& piece : tensor.pieces) {
    if (piece.stored.data.empty()) continue;
    int64_t begin = 0, last = 0;  // of the piece's elements, in the tensor
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      begin = begin * tensor.shape[i] + piece.first[i];
      last = last * tensor.shape[i] + piece.first[i] + piece.stored.shape[i] - 1;
    }
    if (begin < first + count && last >= first) {
      copy_piece(tensor, piece, first, first + count, out);
    }
  }
}

}  // namespace weir
