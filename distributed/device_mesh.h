// The ranks of a job as a grid with named dimensions, each with its own process
// group:
//
//   LORA_ASSIGN_OR_RETURN(
//       std::shared_ptr<const DeviceMesh> mesh,
//       DeviceMesh::Create(world, {{"replicate", 2}, {"tensor", 4}}));
//   mesh->ToString();    // "DeviceMesh(replicate=2, tensor=4)"
//   mesh->coordinate(1); // rank 6: 2
//   mesh->group(0);      // rank 6: the group of the ranks 2 and 6
//
// A group that a trainer already has becomes a mesh of one dimension, without a
// collective: DeviceMesh::Create(process_group).
#ifndef TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_
#define TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/libtorch_version.h"

// Only who calls into the group needs c10d's headers.
namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed {

// A dimension of a mesh.
struct MeshDim {
  // Letters, digits, '_' and '-'; each name is there once in a mesh.
  std::string name;
  // The number of ranks along the dimension, at least 1.
  int64_t size = 0;
};

// Immutable, and shared by what lies on it, which keeps the process groups
// alive. Its members may be called from any thread; collectives on a group, as
// in c10d, are called by one thread at a time and in one order on every rank.
// After a group was shut down or lost a peer, the mesh still answers, and
// collectives over it return a Status that names it.
class DeviceMesh {
 public:
  // A mesh of one dimension, whose coordinates are the ranks of `group`. Makes
  // no collective. kInvalidArgument for a null group or a bad name.
  static absl::StatusOr<std::shared_ptr<const DeviceMesh>> Create(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      std::string dim_name = "replicate");

  // A mesh of all ranks of `group`, which lie in row-major order as in
  // PyTorch's init_device_mesh: the last coordinate changes fastest. Each entry
  // of `flattened` names dimensions for which GroupOver() shall have a group.
  //
  // Collective: every rank of `group` calls it with the same arguments. Makes a
  // process group a dimension and a flattened entry, which meet in the group's
  // store and have its backend, devices and timeout, unless `group` itself or
  // one made before has the same ranks.
  //
  // Errors; bad or different arguments are one on every rank:
  //   kInvalidArgument     `group` is null, a name is bad, unknown or there
  //                        twice, or the sizes don't multiply to the ranks
  //   kFailedPrecondition  ranks passed different arguments (the message says
  //                        which), or the group has no store or was shut down
  //   kUnimplemented       the group has other backends than gloo and nccl
  //   kUnavailable, kDeadlineExceeded  a peer is lost or does not answer
  static absl::StatusOr<std::shared_ptr<const DeviceMesh>> Create(
      c10::intrusive_ptr<c10d::ProcessGroup> group,
      const std::vector<MeshDim>& dims,
      const std::vector<std::vector<std::string>>& flattened = {});

  ~DeviceMesh();
  DeviceMesh(const DeviceMesh&) = delete;
  DeviceMesh& operator=(const DeviceMesh&) = delete;

  // The number of dimensions, at least 1.
  int64_t ndim() const { return static_cast<int64_t>(dim_names_.size()); }
  // One name a dimension.
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  // The dimension of this name, in [0, ndim()). kNotFound names those there
  // are.
  absl::StatusOr<int64_t> DimByName(absl::string_view name) const;

  // The number of ranks in the whole mesh.
  int64_t size() const { return size_; }
  // The number of ranks along `dim`, which is in [0, ndim()).
  int64_t size(int64_t dim) const { return sizes_.at(dim); }

  // This process's rank in the whole mesh, in [0, size()).
  int64_t rank() const { return rank_; }
  // Its place along `dim`, in [0, size(dim)). `dim` is in [0, ndim()).
  int64_t coordinate(int64_t dim) const { return coordinates_.at(dim); }

  // All ranks of the mesh: the group it was created from. Never null.
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  // The ranks that differ from this one in their coordinate along `dim` alone;
  // the rank in the group is that coordinate. Never null. `dim` is in
  // [0, ndim()).
  const c10::intrusive_ptr<c10d::ProcessGroup>& group(int64_t dim) const;

  // The ranks that differ from this one in their coordinates along `dims`
  // alone, in row-major order: one collective on it reduces over all of them.
  // It is there for a single dimension, for all, and for those that Create got
  // as `flattened`; dimensions of size 1 make no difference. `dims` is not
  // empty, in any order, and has nothing twice, else kInvalidArgument.
  // kFailedPrecondition, which says what to pass to Create, for other sets.
  absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> GroupOver(
      absl::Span<const int64_t> dims) const;

  // The ranks of the mesh that are in the group over `dims` that has this one,
  // ascending: entry i is rank i of GroupOver(dims). Each of `dims` is in
  // [0, ndim()).
  std::vector<int64_t> RanksOver(absl::Span<const int64_t> dims) const;

  // Such as "DeviceMesh(replicate=2, tensor=4)", the same on every rank.
  std::string ToString() const;
  // For errors, such as "DeviceMesh(replicate=2, tensor=4), rank 6 at (1, 2)".
  // Without the coordinates where there is one dimension.
  std::string RankString() const;

 private:
  DeviceMesh(c10::intrusive_ptr<c10d::ProcessGroup> group,
             const std::vector<MeshDim>& dims);

  // Those of `dims` that have more than one rank, ascending: which ranks a
  // group over `dims` has depends on nothing else.
  std::vector<int64_t> KeyOf(absl::Span<const int64_t> dims) const;
  // Such as "{replicate, tensor}".
  std::string DimsString(absl::Span<const int64_t> dims) const;
  // Makes the groups over each of `dim_sets` that are not there yet, in this
  // order.
  absl::Status CreateGroups(const std::vector<std::vector<int64_t>>& dim_sets);

  // Each has an entry a dimension.
  std::vector<std::string> dim_names_;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> coordinates_;

  int64_t size_;
  int64_t rank_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  // By KeyOf() their dimensions.
  std::map<std::vector<int64_t>, c10::intrusive_ptr<c10d::ProcessGroup>>
      groups_;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_DEVICE_MESH_H_
