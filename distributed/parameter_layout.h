// How a parameter lies on a device mesh: what DTensor's mesh and placements
// are in Python, and what its gradient needs.
//
//   ParameterLayout layout = ParameterLayout::Replicated(mesh);
//   layout.placements[0].is_replicate();           // true
//   layout.ReducedDims(GradientReduction::kAverage);  // {0}
//
//   // The weight of q, k and v over 4 tensor parallel ranks. k and v have 2
//   // heads of 64: ranks 0 and 1 hold the first of each, 2 and 3 the second.
//   ParameterLayout qkv{mesh, {Placement::Shard(0)},
//                       {{512}, {128, /*replicas=*/2}, {128, 2}}};
#ifndef TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
#define TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {

// A part of a tensor along its dimension 0 that is sharded by itself.
struct ShardedPart {
  // Its number of rows: indices of dimension 0.
  int64_t size = 0;
  // The number of consecutive ranks that hold each chunk, along the one mesh
  // dimension that shards dimension 0: the rank at coordinate c of n holds
  // chunk c / replicas of n / replicas. The gradient of such rows is partial on
  // each of these ranks, and complete as the sum over them.
  int64_t replicas = 1;
};

// A parameter's mesh and one placement a mesh dimension. A parameter without a
// layout belongs to its process alone and takes part in no collective.
struct ParameterLayout {
  // Replicated over every dimension of `mesh`, which must not be null; the
  // gradient is averaged over all of them.
  static ParameterLayout Replicated(std::shared_ptr<const DeviceMesh> mesh);

  // The mesh dimensions over which the gradient has this reduction, ascending,
  // as DeviceMesh::GroupOver takes them.
  std::vector<int64_t> ReducedDims(GradientReduction reduction) const;

  // Whether a part has several replicas.
  bool HasReplicatedParts() const;

  // For each part, the chunk of its rows that this rank holds; they lie one
  // after the other in the rank's tensor. The layout must be valid.
  std::vector<Chunk> LocalParts() const;

  // kInvalidArgument if there is no mesh, or not a placement for each of its
  // dimensions; if a part has a size below 0 or replicas below 1; or if one has
  // several replicas, and not exactly one mesh dimension shards dimension 0, in
  // a number of ranks that the replicas divide.
  absl::Status Validate() const;

  // Such as "replicate: Replicate(average), tensor: Shard(0)", with parts
  // followed by " in parts 512, 128 x 2, 128 x 2". `mesh` must not be null. A
  // placement past its dimensions, which Validate() refuses, is on "?".
  std::string ToString() const;

  // Over whose ranks it lies.
  std::shared_ptr<const DeviceMesh> mesh;
  // As many as the mesh has dimensions.
  std::vector<Placement> placements;
  // For a tensor made of several that are concatenated along dimension 0, such
  // as those for q, k and v. Empty: the tensor is one.
  std::vector<ShardedPart> parts = {};
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
