// The ranks of a job as a grid with named dimensions, each with its own process
// group. A group that a trainer already has becomes a mesh of one dimension:
//
//   LORA_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceMesh> mesh,
//                         DeviceMesh::Create(process_group));
//   mesh->ToString();  // "DeviceMesh(replicate=4)"
//   mesh->size(0);     // 4
#ifndef TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_
#define TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"

// Only who calls into the group needs c10d's headers.
namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed {

// Immutable, and shared by what lies on it, which keeps the process groups
// alive. Its members may be called from any thread; collectives on a group, as
// in c10d, are called by one thread at a time and in one order on every rank.
class DeviceMesh {
 public:
  // A mesh of one dimension, whose coordinates are the ranks of `group`. Makes
  // no collective. kInvalidArgument for a null group or an empty name.
  static absl::StatusOr<std::shared_ptr<const DeviceMesh>> Create(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::string dim_name = "replicate");

  ~DeviceMesh();
  DeviceMesh(const DeviceMesh&) = delete;
  DeviceMesh& operator=(const DeviceMesh&) = delete;

  // The number of dimensions, at least 1.
  int64_t ndim() const { return static_cast<int64_t>(dim_names_.size()); }
  // One name a dimension.
  const std::vector<std::string>& dim_names() const { return dim_names_; }

  // The number of ranks in the whole mesh.
  int64_t size() const { return size_; }
  // The number of ranks along `dim`, which is in [0, ndim()).
  int64_t size(int64_t dim) const { return sizes_.at(dim); }

  // This process's rank in the whole mesh, in [0, size()).
  int64_t rank() const { return rank_; }

  // The ranks that differ from this one in their coordinate along `dim` alone.
  // Never null. `dim` is in [0, ndim()).
  const c10::intrusive_ptr<c10d::ProcessGroup>& group(int64_t dim) const {
    return groups_.at(dim);
  }

  // Such as "DeviceMesh(replicate=4)".
  std::string ToString() const;

 private:
  DeviceMesh(c10::intrusive_ptr<c10d::ProcessGroup> group,
             std::string dim_name);

  // Each has an entry a dimension.
  std::vector<std::string> dim_names_;
  std::vector<int64_t> sizes_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;

  int64_t size_;
  int64_t rank_;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_
