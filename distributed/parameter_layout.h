// How a parameter lies on a device mesh: what DTensor's mesh and placements
// are in Python.
//
//   ParameterLayout layout = ParameterLayout::Replicated(mesh);
//   layout.placements[0].is_replicate();  // true
#ifndef TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
#define TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "distributed/device_mesh.h"

namespace trainer_lora::distributed {

// The placement of a parameter over one mesh dimension: every rank holds all
// of it (Replicate), or its chunk of one tensor dimension (Shard). A value.
class Placement {
 public:
  static Placement Replicate() { return Placement(-1); }
  // `dim` is a tensor dimension, counted from 0.
  static Placement Shard(int64_t dim) { return Placement(dim); }

  bool is_replicate() const { return shard_dim_ < 0; }
  // The tensor dimension that is sharded; -1 for Replicate.
  int64_t shard_dim() const { return shard_dim_; }

 private:
  explicit Placement(int64_t shard_dim) : shard_dim_(shard_dim) {}

  int64_t shard_dim_;
};

// A parameter's mesh and one placement a mesh dimension. A parameter without a
// layout belongs to its process alone and takes part in no collective.
struct ParameterLayout {
  // Replicated over every dimension of `mesh`, which must not be null.
  static ParameterLayout Replicated(std::shared_ptr<const DeviceMesh> mesh);

  std::shared_ptr<const DeviceMesh> mesh;
  // As many as the mesh has dimensions.
  std::vector<Placement> placements;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
