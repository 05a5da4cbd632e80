#include "distributed/parameter_layout.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {

ParameterLayout ParameterLayout::Replicated(
    std::shared_ptr<const DeviceMesh> mesh) {
  std::vector<Placement> placements(mesh->ndim(), Placement::Replicate());
  return ParameterLayout{std::move(mesh), std::move(placements)};
}

std::vector<int64_t> ParameterLayout::ReducedDims(
    GradientReduction reduction) const {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < placements.size(); ++dim) {
    if (placements[dim].gradient_reduction() == reduction) dims.push_back(dim);
  }
  return dims;
}

std::string ParameterLayout::ToString() const {
  std::string text;
  for (int64_t dim = 0; dim < placements.size(); ++dim) {
    absl::StrAppend(&text, dim == 0 ? "" : ", ", mesh->dim_names().at(dim),
                    ": ", placements[dim].ToString());
  }
  return text;
}

}  // namespace trainer_lora::distributed
