#include "distributed/checkpoint/internal/gather_rows.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/run_collective.h"
#include "distributed/tensor_slice.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed::internal {
namespace {

constexpr int kWriter = 0;

// Brings rows of the tensor of `owner`, from `local_row` on, to `slice` of
// `whole` on the writer.
absl::Status Move(const DeviceMesh& mesh, const ModelTensor& tensor,
                  int64_t owner, int64_t local_row, const TensorSlice& slice,
                  const at::Tensor& whole) {
  const bool is_owner = mesh.rank() == owner;
  const bool is_writer = mesh.rank() == kWriter;
  if (!is_owner && !is_writer) return absl::OkStatus();
  at::Tensor part;
  if (is_owner) {
    part = tensor.tensor.detach().narrow(0, local_row, slice.sizes[0]);
  }
  at::Tensor place = whole;
  if (is_writer) {
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      place = place.narrow(dim, slice.offsets[dim], slice.sizes[dim]);
    }
    if (is_owner) {
      place.copy_(part);
      return absl::OkStatus();
    }
  }
  c10d::ProcessGroup& group = *mesh.group();
  const at::Device device = MetadataDevice(group);
  const std::string what =
      absl::StrCat(mesh.RankString(), ": transfer of ", tensor.names.front());
  if (!is_writer) {
    std::vector<at::Tensor> message = {Dense(part, device)};
    return RunCollective(
        group, what, [&] { return group.send(message, kWriter, /*tag=*/0); });
  }
  std::vector<at::Tensor> message = {
      place.is_contiguous() && device.is_cpu()
          ? place
          : at::empty(place.sizes(), place.options().device(device))};
  LORA_RETURN_IF_ERROR(RunCollective(group, what, [&] {
    return group.recv(message, static_cast<int>(owner), /*tag=*/0);
  }));
  if (!message[0].is_same(place)) place.copy_(message[0]);
  return absl::OkStatus();
}

}  // namespace

at::Tensor Dense(const at::Tensor& tensor, at::Device device) {
  return tensor.to(device).contiguous().resolve_conj().resolve_neg();
}

absl::StatusOr<at::Tensor> GatherRows(const DeviceMesh* mesh,
                                      const ModelTensor& tensor, int64_t begin,
                                      const std::vector<int64_t>& shape) {
  const bool is_writer = mesh == nullptr || mesh->rank() == kWriter;
  const at::Tensor local = tensor.tensor.detach();
  if (tensor.layout == nullptr || shape.empty()) {
    if (!is_writer) return at::Tensor();
    const at::Tensor rows =
        shape.empty() ? local : local.narrow(0, begin, shape[0]);
    return Dense(rows, at::kCPU);
  }
  at::Tensor whole;
  if (is_writer) {
    whole = at::empty(shape, local.options().device(at::kCPU));
  }
  // From the first rank on that has it: the writer's own copies come first.
  std::set<TensorSlice> known;
  for (int64_t rank = 0; rank < mesh->size(); ++rank) {
    for (const HeldRows& held :
         RowsWithin(tensor.SlicesOf(rank), begin, shape[0])) {
      if (!known.insert(held.slice).second) continue;
      LORA_RETURN_IF_ERROR(
          Move(*mesh, tensor, rank, held.local_row, held.slice, whole));
    }
  }
  return whole;
}

}  // namespace trainer_lora::distributed::internal
