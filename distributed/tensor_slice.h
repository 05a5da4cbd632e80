// The part of a tensor that a rank holds:
//
//   // Rank (1, 2) of a mesh of 2 x 4, a weight of [10, 6]:
//   TensorSlice slice = SliceOf(
//       {10, 6}, {Placement::Replicate(), Placement::Shard(0)},
//       /*mesh_sizes=*/{2, 4}, /*coordinates=*/{1, 2});
//   slice.ToString();  // "[6:9, 0:6]"
#ifndef TRAINER_LORA_DISTRIBUTED_TENSOR_SLICE_H_
#define TRAINER_LORA_DISTRIBUTED_TENSOR_SLICE_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "absl/types/span.h"
#include "config/language_version.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {

// A rectangular part of a tensor: element i of dimension d of the part is
// element offsets[d] + i of the tensor's, for i < sizes[d]. A value.
struct TensorSlice {
  // All of a tensor of this shape.
  static TensorSlice Whole(absl::Span<const int64_t> shape);

  // The number of elements; 1 for a scalar.
  int64_t numel() const;

  // Such as "[6:9, 0:6]".
  std::string ToString() const;

  // Whether both are the same part.
  friend bool operator==(const TensorSlice& a, const TensorSlice& b) {
    return a.offsets == b.offsets && a.sizes == b.sizes;
  }
  // By offsets, then by sizes: an order for maps.
  friend bool operator<(const TensorSlice& a, const TensorSlice& b) {
    return std::tie(a.offsets, a.sizes) < std::tie(b.offsets, b.sizes);
  }

  // Where the part begins, an index a dimension of the tensor.
  std::vector<int64_t> offsets;
  // Its shape.
  std::vector<int64_t> sizes;
};

// The part of a tensor of `shape` that is at `coordinates` of a mesh of
// `mesh_sizes`, as DTensor cuts it: mesh dimensions from the first to the last,
// each shard in the chunks of ChunkOf. `placements`, `mesh_sizes` and
// `coordinates` have an entry a mesh dimension; a shard dimension is one of
// `shape`'s.
TensorSlice SliceOf(absl::Span<const int64_t> shape,
                    absl::Span<const Placement> placements,
                    absl::Span<const int64_t> mesh_sizes,
                    absl::Span<const int64_t> coordinates);

// The shape of `slices` that lie one after the other along dimension 0. There
// is one at least; they differ in dimension 0 alone.
std::vector<int64_t> ConcatenatedShape(absl::Span<const TensorSlice> slices);

// Some of the rows that a rank holds.
struct HeldRows {
  // The rows, and what the rank has of the other dimensions.
  TensorSlice slice;
  int64_t local_row;  // Where they begin in the rank's own tensor.
};

// What the rank that holds `slices`, one after the other along dimension 0, has
// of the rows [begin, begin + count) of a tensor: slices of these rows, none of
// them empty. The tensor is no scalar.
std::vector<HeldRows> RowsWithin(absl::Span<const TensorSlice> slices,
                                 int64_t begin, int64_t count);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_TENSOR_SLICE_H_
