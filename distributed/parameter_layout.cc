#include "distributed/parameter_layout.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

bool ParameterLayout::HasReplicatedParts() const {
  return std::any_of(parts.begin(), parts.end(),
                     [](const ShardedPart& part) { return part.replicas > 1; });
}

std::vector<Chunk> ParameterLayout::LocalParts() const {
  std::vector<Chunk> chunks;
  for (const ShardedPart& part : parts) {
    Chunk held{0, part.size};
    for (int64_t dim = 0; dim < placements.size(); ++dim) {
      if (placements[dim].shard_dim() != 0) continue;
      const Chunk chunk = ChunkOf(held.size, mesh->size(dim) / part.replicas,
                                  mesh->coordinate(dim) / part.replicas);
      held = {held.offset + chunk.offset, chunk.size};
    }
    chunks.push_back(held);
  }
  return chunks;
}

absl::Status ParameterLayout::Validate() const {
  if (mesh == nullptr) {
    return absl::InvalidArgumentError("the layout has no mesh");
  }
  if (placements.size() != mesh->ndim()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the layout has ", placements.size(), " placements for ",
                     mesh->ToString()));
  }
  std::vector<int64_t> row_shards;  // Mesh dimensions that shard dimension 0.
  for (int64_t dim = 0; dim < placements.size(); ++dim) {
    if (placements[dim].shard_dim() == 0) row_shards.push_back(dim);
  }
  for (const ShardedPart& part : parts) {
    if (part.size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the layout has a part of size ", part.size));
    }
    if (part.replicas == 1) continue;
    if (part.replicas < 1 || row_shards.size() != 1 ||
        mesh->size(row_shards[0]) % part.replicas != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the layout (", ToString(), ") has a part with ", part.replicas,
          " replicas, which must divide the ranks of the one dimension of ",
          mesh->ToString(), " that shards dimension 0"));
    }
  }
  return absl::OkStatus();
}

std::string ParameterLayout::ToString() const {
  std::string text;
  for (int64_t dim = 0; dim < placements.size(); ++dim) {
    absl::StrAppend(&text, dim == 0 ? "" : ", ",
                    dim < mesh->ndim() ? mesh->dim_names()[dim] : "?", ": ",
                    placements[dim].ToString());
  }
  if (parts.empty()) return text;
  return absl::StrCat(
      text, " in parts ",
      absl::StrJoin(parts, ", ", [](std::string* out, const ShardedPart& part) {
        absl::StrAppend(out, part.size);
        if (part.replicas == 1) return;
        absl::StrAppend(out, " x ", part.replicas);
      }));
}

}  // namespace trainer_lora::distributed
