#include "distributed/tensor_slice.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {

TensorSlice TensorSlice::Whole(absl::Span<const int64_t> shape) {
  return {std::vector<int64_t>(shape.size(), 0),
          std::vector<int64_t>(shape.begin(), shape.end())};
}

int64_t TensorSlice::numel() const {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

std::string TensorSlice::ToString() const {
  std::string text = "[";
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    absl::StrAppend(&text, dim == 0 ? "" : ", ", offsets[dim], ":",
                    offsets[dim] + sizes[dim]);
  }
  return text + "]";
}

TensorSlice SliceOf(absl::Span<const int64_t> shape,
                    absl::Span<const Placement> placements,
                    absl::Span<const int64_t> mesh_sizes,
                    absl::Span<const int64_t> coordinates) {
  TensorSlice slice = TensorSlice::Whole(shape);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (placements[i].is_replicate()) continue;
    const int64_t dim = placements[i].shard_dim();
    const Chunk chunk =
        ChunkOf(slice.sizes[dim], mesh_sizes[i], coordinates[i]);
    slice.offsets[dim] += chunk.offset;
    slice.sizes[dim] = chunk.size;
  }
  return slice;
}

std::vector<int64_t> ConcatenatedShape(absl::Span<const TensorSlice> slices) {
  std::vector<int64_t> shape = slices[0].sizes;
  for (const TensorSlice& slice : slices.subspan(1)) shape[0] += slice.sizes[0];
  return shape;
}

std::vector<HeldRows> RowsWithin(absl::Span<const TensorSlice> slices,
                                 int64_t begin, int64_t count) {
  std::vector<HeldRows> held;
  int64_t local_row = 0;  // Of the slice.
  for (const TensorSlice& slice : slices) {
    const int64_t first = std::max(begin, slice.offsets[0]);
    const int64_t last =
        std::min(begin + count, slice.offsets[0] + slice.sizes[0]);
    TensorSlice common = slice;
    common.offsets[0] = first - begin;
    common.sizes[0] = std::max<int64_t>(last - first, 0);
    if (common.numel() > 0) {
      held.push_back({std::move(common), local_row + first - slice.offsets[0]});
    }
    local_row += slice.sizes[0];
  }
  return held;
}

}  // namespace trainer_lora::distributed
