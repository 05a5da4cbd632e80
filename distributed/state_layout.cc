#include "distributed/state_layout.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/tensor_slice.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

std::vector<int64_t> MeshSizes(const DeviceMesh& mesh) {
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    sizes.push_back(mesh.size(dim));
  }
  return sizes;
}

// Where `rank` is in a mesh whose ranks lie in row-major order.
std::vector<int64_t> CoordinatesOf(int64_t rank,
                                   const std::vector<int64_t>& mesh_sizes) {
  std::vector<int64_t> coordinates(mesh_sizes.size());
  for (size_t dim = mesh_sizes.size(); dim-- > 0;) {
    coordinates[dim] = rank % mesh_sizes[dim];
    rank /= mesh_sizes[dim];
  }
  return coordinates;
}

}  // namespace

std::vector<TensorSlice> StateLayout::SlicesOf(int64_t rank) const {
  const std::vector<int64_t> mesh_sizes = MeshSizes(*layout.mesh);
  const std::vector<int64_t> coordinates = CoordinatesOf(rank, mesh_sizes);
  if (layout.parts.empty()) {
    return {SliceOf(global_shape, layout.placements, mesh_sizes, coordinates)};
  }
  std::vector<TensorSlice> slices;
  std::vector<int64_t> part_shape = global_shape;
  int64_t begin = 0;
  for (const ShardedPart& part : layout.parts) {
    std::vector<int64_t> part_sizes = mesh_sizes;
    std::vector<int64_t> part_coordinates = coordinates;
    for (size_t dim = 0; dim < mesh_sizes.size(); ++dim) {
      if (layout.placements[dim].shard_dim() != 0) continue;
      part_sizes[dim] /= part.replicas;
      part_coordinates[dim] /= part.replicas;
    }
    part_shape[0] = part.size;
    slices.push_back(
        SliceOf(part_shape, layout.placements, part_sizes, part_coordinates));
    slices.back().offsets[0] += begin;
    begin += part.size;
  }
  return slices;
}

std::vector<int64_t> StateLayout::LocalShape() const {
  return ConcatenatedShape(SlicesOf(layout.mesh->rank()));
}

absl::Status StateLayout::Validate() const {
  LORA_RETURN_IF_ERROR(layout.Validate());
  const int64_t ndim = global_shape.size();
  for (const Placement& placement : layout.placements) {
    if (placement.shard_dim() >= ndim) {
      return absl::InvalidArgumentError(
          absl::StrCat("the layout (", layout.ToString(), ") shards dimension ",
                       placement.shard_dim(), " of a tensor of ", ndim));
    }
  }
  if (layout.parts.empty()) return absl::OkStatus();
  int64_t rows = 0;
  for (const ShardedPart& part : layout.parts) rows += part.size;
  if (ndim == 0 || rows != global_shape[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat("the parts of the layout (", layout.ToString(),
                     ") don't sum to dimension 0 of [",
                     absl::StrJoin(global_shape, ", "), "]"));
  }
  return absl::OkStatus();
}

StateLayouts ShardedLayouts(const torch::nn::Module& model,
                            std::shared_ptr<const DeviceMesh> mesh,
                            const std::vector<Placement>& placements) {
  const ParameterLayout sharded{std::move(mesh), placements};
  StateLayouts layouts;
  for (const auto& item : model.named_parameters()) {
    const at::Tensor& parameter = item.value();
    ParameterLayout layout = sharded;
    for (Placement& placement : layout.placements) {
      if (placement.shard_dim() >= parameter.dim()) {
        placement = Placement::Replicate();
      }
    }
    layouts[item.key()] = {parameter.sizes().vec(), std::move(layout)};
  }
  return layouts;
}

}  // namespace trainer_lora::distributed
