#include "distributed/device_mesh.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/subgroup.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

absl::Status CheckGroup(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  return group != nullptr
             ? absl::OkStatus()
             : absl::InvalidArgumentError(
                   "a DeviceMesh needs a process group, got a null pointer");
}

absl::Status CheckName(const std::string& name) {
  const bool is_good =
      !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_isalnum(c) || c == '_' || c == '-';
      });
  return is_good ? absl::OkStatus()
                 : absl::InvalidArgumentError(absl::StrCat(
                       "the name of a DeviceMesh's dimension is made of ",
                       "letters, digits, '_' and '-', got \"", name, "\""));
}

std::string MeshString(const std::vector<MeshDim>& dims) {
  return absl::StrCat("DeviceMesh(",
                      absl::StrJoin(dims, ", ",
                                    [](std::string* out, const MeshDim& dim) {
                                      absl::StrAppend(out, dim.name, "=",
                                                      dim.size);
                                    }),
                      ")");
}

std::string NamesString(const std::vector<std::string>& names) {
  return absl::StrCat("{", absl::StrJoin(names, ", "), "}");
}

absl::Status CheckDims(const std::vector<MeshDim>& dims, int64_t world_size) {
  std::set<std::string> names;
  // Stops growing above the world size, so that it can't overflow.
  int64_t ranks = 1;
  for (const MeshDim& dim : dims) {
    LORA_RETURN_IF_ERROR(CheckName(dim.name));
    if (!names.insert(dim.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(MeshString(dims), " has two dimensions ", dim.name));
    }
    if (dim.size < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          MeshString(dims), ": the size of ", dim.name, " must be at least 1"));
    }
    if (ranks <= world_size) ranks *= std::min(dim.size, world_size + 1);
  }
  if (dims.empty() || ranks != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(MeshString(dims), ": the sizes must multiply to the ",
                     world_size, " ranks of the process group"));
  }
  return absl::OkStatus();
}

absl::Status CheckFlattened(const std::vector<MeshDim>& dims,
                            const std::vector<std::string>& flattened) {
  std::set<std::string> names;
  for (const std::string& name : flattened) {
    const bool is_known =
        std::any_of(dims.begin(), dims.end(),
                    [&](const MeshDim& dim) { return dim.name == name; });
    if (!is_known || !names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "flattened ", NamesString(flattened), ": ", MeshString(dims),
          is_known ? " can have it once: " : " has no dimension ", name));
    }
  }
  return flattened.empty()
             ? absl::InvalidArgumentError(
                   "flattened {}: an entry needs at least one dimension")
             : absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const DeviceMesh>> DeviceMesh::Create(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::string dim_name) {
  LORA_RETURN_IF_ERROR(CheckGroup(group));
  LORA_RETURN_IF_ERROR(CheckName(dim_name));
  const int64_t size = group->getSize();
  return std::shared_ptr<const DeviceMesh>(
      new DeviceMesh(std::move(group), {{std::move(dim_name), size}}));
}

absl::StatusOr<std::shared_ptr<const DeviceMesh>> DeviceMesh::Create(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    const std::vector<MeshDim>& dims,
    const std::vector<std::vector<std::string>>& flattened) {
  LORA_RETURN_IF_ERROR(CheckGroup(group));
  absl::Status local_check = CheckDims(dims, group->getSize());
  std::vector<std::string> arguments = {MeshString(dims)};
  for (const std::vector<std::string>& names : flattened) {
    local_check.Update(CheckFlattened(dims, names));
    arguments.push_back(absl::StrCat("flattened ", NamesString(names)));
  }
  // A rank whose own check failed says so, as the others would wait for it.
  if (!local_check.ok()) arguments.emplace_back(local_check.message());
  LORA_RETURN_IF_ERROR(internal::CheckRanksAgree(
      *group, "a new DeviceMesh", "comparison of the dimensions", arguments));
  LORA_RETURN_IF_ERROR(local_check);

  const std::shared_ptr<DeviceMesh> mesh(
      new DeviceMesh(std::move(group), dims));
  std::vector<std::vector<int64_t>> dim_sets;
  for (int64_t dim = 0; dim < mesh->ndim(); ++dim) dim_sets.push_back({dim});
  for (const std::vector<std::string>& names : flattened) {
    std::vector<int64_t>& flattened_dims = dim_sets.emplace_back();
    for (const std::string& name : names) {
      LORA_ASSIGN_OR_RETURN(const int64_t dim, mesh->DimByName(name));
      flattened_dims.push_back(dim);
    }
  }
  LORA_RETURN_IF_ERROR(mesh->CreateGroups(dim_sets));
  return std::shared_ptr<const DeviceMesh>(mesh);
}

DeviceMesh::DeviceMesh(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       const std::vector<MeshDim>& dims)
    : coordinates_(dims.size()),
      size_(group->getSize()),
      rank_(group->getRank()),
      group_(std::move(group)) {
  for (const MeshDim& dim : dims) {
    dim_names_.push_back(dim.name);
    sizes_.push_back(dim.size);
  }
  int64_t rest = rank_;
  std::vector<int64_t> all_dims;
  for (int64_t dim = ndim() - 1; dim >= 0; --dim) {
    coordinates_[dim] = rest % sizes_[dim];
    rest /= sizes_[dim];
    all_dims.push_back(dim);
  }
  groups_[KeyOf(all_dims)] = group_;
}

DeviceMesh::~DeviceMesh() = default;

std::vector<int64_t> DeviceMesh::KeyOf(absl::Span<const int64_t> dims) const {
  std::vector<int64_t> key;
  for (const int64_t dim : dims) {
    if (sizes_.at(dim) > 1) key.push_back(dim);
  }
  std::sort(key.begin(), key.end());
  return key;
}

std::vector<int64_t> DeviceMesh::RanksOver(
    absl::Span<const int64_t> dims) const {
  // From the last dimension to the first, so that the ranks ascend.
  std::vector<int64_t> ranks = {0};
  int64_t stride = 1;
  for (int64_t dim = ndim() - 1; dim >= 0; --dim) {
    const bool varies = std::find(dims.begin(), dims.end(), dim) != dims.end();
    const int64_t first = varies ? 0 : coordinates_[dim];
    const int64_t last = varies ? sizes_[dim] - 1 : coordinates_[dim];
    std::vector<int64_t> more_ranks;
    for (int64_t coordinate = first; coordinate <= last; ++coordinate) {
      for (const int64_t rank : ranks) {
        more_ranks.push_back(coordinate * stride + rank);
      }
    }
    ranks = std::move(more_ranks);
    stride *= sizes_[dim];
  }
  return ranks;
}

std::string DeviceMesh::DimsString(absl::Span<const int64_t> dims) const {
  std::vector<std::string> names;
  for (const int64_t dim : dims) names.push_back(dim_names_.at(dim));
  return NamesString(names);
}

absl::Status DeviceMesh::CreateGroups(
    const std::vector<std::vector<int64_t>>& dim_sets) {
  internal::SubgroupMaker subgroups(*group_);
  for (const std::vector<int64_t>& dims : dim_sets) {
    const std::vector<int64_t> key = KeyOf(dims);
    if (groups_.count(key) != 0) continue;
    const std::vector<int64_t> ranks = RanksOver(key);
    absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> group =
        subgroups.Create(DimsString(key), ranks);
    if (!group.ok()) {
      return absl::Status(
          group.status().code(),
          absl::StrCat(RankString(), ": no group over ", DimsString(dims),
                       " of the ranks ", absl::StrJoin(ranks, ", "), ": ",
                       group.status().message()));
    }
    groups_[key] = *std::move(group);
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> DeviceMesh::DimByName(absl::string_view name) const {
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), name);
  if (found == dim_names_.end()) {
    return absl::NotFoundError(
        absl::StrCat(ToString(), " has no dimension \"", name, "\""));
  }
  return found - dim_names_.begin();
}

const c10::intrusive_ptr<c10d::ProcessGroup>& DeviceMesh::group(
    int64_t dim) const {
  return groups_.at(KeyOf({dim}));
}

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> DeviceMesh::GroupOver(
    absl::Span<const int64_t> dims) const {
  const std::set<int64_t> distinct(dims.begin(), dims.end());
  if (dims.empty() || distinct.size() != dims.size() || *distinct.begin() < 0 ||
      *distinct.rbegin() >= ndim()) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToString(), ": a group is over distinct dimensions in [0, ", ndim(),
        "), got {", absl::StrJoin(dims, ", "), "}"));
  }
  const auto found = groups_.find(KeyOf(dims));
  if (found == groups_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat(ToString(), " has no group over ", DimsString(dims),
                     ": list these among `flattened` in DeviceMesh::Create"));
  }
  return found->second;
}

std::string DeviceMesh::ToString() const {
  std::vector<MeshDim> dims;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    dims.push_back({dim_names_[dim], sizes_[dim]});
  }
  return MeshString(dims);
}

std::string DeviceMesh::RankString() const {
  const std::string text = absl::StrCat(ToString(), ", rank ", rank_);
  return ndim() == 1 ? text
                     : absl::StrCat(text, " at (",
                                    absl::StrJoin(coordinates_, ", "), ")");
}

}  // namespace trainer_lora::distributed
