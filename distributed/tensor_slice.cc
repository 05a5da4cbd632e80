#include "distributed/tensor_slice.h"

#include <cstddef>
#include <cstdint>
#include <string>
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

}  // namespace trainer_lora::distributed
