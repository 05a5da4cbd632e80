// How a parameter lies on a device mesh: what DTensor's mesh and placements
// are in Python, and what its gradient needs.
//
//   ParameterLayout layout = ParameterLayout::Replicated(mesh);
//   layout.placements[0].is_replicate();           // true
//   layout.ReducedDims(GradientReduction::kAverage);  // {0}
#ifndef TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
#define TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "distributed/device_mesh.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {

// A parameter's mesh and one placement a mesh dimension. A parameter without a
// layout belongs to its process alone and takes part in no collective.
struct ParameterLayout {
  // Replicated over every dimension of `mesh`, which must not be null; the
  // gradient is averaged over all of them.
  static ParameterLayout Replicated(std::shared_ptr<const DeviceMesh> mesh);

  // The mesh dimensions over which the gradient has this reduction, ascending,
  // as DeviceMesh::GroupOver takes them.
  std::vector<int64_t> ReducedDims(GradientReduction reduction) const;

  // Such as "replicate: Replicate(average), tensor: Shard(0)". `mesh` must not
  // be null.
  std::string ToString() const;

  std::shared_ptr<const DeviceMesh> mesh;
  // As many as the mesh has dimensions.
  std::vector<Placement> placements;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_PARAMETER_LAYOUT_H_
