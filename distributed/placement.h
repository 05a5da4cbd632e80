// How a tensor lies over the ranks of one mesh dimension, without any tensor:
//
//   std::vector<Placement> lora_a = {
//       Placement::Replicate(GradientReduction::kAverage),  // over data
//       Placement::Replicate(GradientReduction::kSum)};     // over tensor
//   Chunk rows = ChunkOf(/*size=*/10, /*num_chunks=*/4, /*index=*/3);
//   // rows.offset == 9, rows.size == 1
#ifndef TRAINER_LORA_DISTRIBUTED_PLACEMENT_H_
#define TRAINER_LORA_DISTRIBUTED_PLACEMENT_H_

#include <cstdint>
#include <string>

#include "config/language_version.h"

namespace trainer_lora::distributed {

// What makes the gradient of a parameter complete over one mesh dimension.
enum class GradientReduction {
  // Nothing: every rank has the complete gradient of what it holds.
  kNone,
  // The mean: the ranks hold the same values and saw different data.
  kAverage,
  // The sum: each rank's gradient is a part of it, as for the lora_A of a
  // column-parallel layer over the tensor parallel ranks.
  kSum,
};

// The placement of a parameter over one mesh dimension, and what its gradient
// needs there: every rank holds all of it (Replicate), or its chunk of one
// tensor dimension (Shard), whose gradient needs nothing. So a dimension is
// average, sum or neither, never two of them. A value.
class Placement {
 public:
  // All of the tensor on every rank.
  static Placement Replicate(
      GradientReduction reduction = GradientReduction::kAverage) {
    return Placement(-1, reduction);
  }
  // A chunk of tensor dimension `dim`, counted from 0, on each rank, as ChunkOf
  // cuts them. Where several mesh dimensions shard one tensor dimension, the
  // later ones chunk the chunks of the earlier ones.
  static Placement Shard(int64_t dim) {
    return Placement(dim, GradientReduction::kNone);
  }

  // Whether every rank holds all of the tensor.
  bool is_replicate() const { return shard_dim_ < 0; }
  // The tensor dimension that is sharded; -1 for Replicate.
  int64_t shard_dim() const { return shard_dim_; }
  // What makes its gradient complete over the mesh dimension.
  GradientReduction gradient_reduction() const { return reduction_; }

  // Such as "Replicate(average)", "Replicate(sum)", "Replicate(none)" or
  // "Shard(0)".
  std::string ToString() const;

 private:
  Placement(int64_t shard_dim, GradientReduction reduction)
      : shard_dim_(shard_dim), reduction_(reduction) {}

  int64_t shard_dim_;
  GradientReduction reduction_;
};

// A run of indices of one tensor dimension: [offset, offset + size).
struct Chunk {
  // The first index.
  int64_t offset = 0;
  // The number of indices; may be 0.
  int64_t size = 0;
};

// The chunk `index` of `size` indices in `num_chunks`, as torch.chunk and
// DTensor cut them: each chunk has ceil(size / num_chunks) indices, but the
// last ones, which are shorter or empty. An empty chunk starts at `size`.
// size >= 0, and 0 <= index < num_chunks.
Chunk ChunkOf(int64_t size, int64_t num_chunks, int64_t index);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_PLACEMENT_H_
