#include "distributed/parameter_layout.h"

#include <memory>
#include <utility>
#include <vector>

#include "distributed/device_mesh.h"

namespace trainer_lora::distributed {

ParameterLayout ParameterLayout::Replicated(
    std::shared_ptr<const DeviceMesh> mesh) {
  std::vector<Placement> placements(mesh->ndim(), Placement::Replicate());
  return ParameterLayout{std::move(mesh), std::move(placements)};
}

}  // namespace trainer_lora::distributed
