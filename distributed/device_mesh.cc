#include "distributed/device_mesh.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {

absl::StatusOr<std::shared_ptr<const DeviceMesh>> DeviceMesh::Create(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::string dim_name) {
  if (group == nullptr) {
    return absl::InvalidArgumentError(
        "a DeviceMesh needs a process group, got a null pointer");
  }
  if (dim_name.empty()) {
    return absl::InvalidArgumentError(
        "the dimension of a DeviceMesh needs a name, got an empty string");
  }
  return std::shared_ptr<const DeviceMesh>(
      new DeviceMesh(std::move(group), std::move(dim_name)));
}

DeviceMesh::DeviceMesh(c10::intrusive_ptr<c10d::ProcessGroup> group,
                       std::string dim_name)
    : dim_names_({std::move(dim_name)}),
      sizes_({group->getSize()}),
      groups_({group}),
      size_(group->getSize()),
      rank_(group->getRank()) {}

DeviceMesh::~DeviceMesh() = default;

std::string DeviceMesh::ToString() const {
  std::string dims;
  for (int64_t dim = 0; dim < ndim(); ++dim) {
    absl::StrAppend(&dims, dim == 0 ? "" : ", ", dim_names_[dim], "=",
                    sizes_[dim]);
  }
  return absl::StrCat("DeviceMesh(", dims, ")");
}

}  // namespace trainer_lora::distributed
