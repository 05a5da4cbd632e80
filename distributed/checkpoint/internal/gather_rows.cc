#include "distributed/checkpoint/internal/gather_rows.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
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

}  // namespace

at::Tensor Dense(const at::Tensor& tensor, at::Device device) {
  return tensor.to(device).contiguous().resolve_conj().resolve_neg();
}

RowGathering::RowGathering(const DeviceMesh* mesh, const ModelTensor& tensor,
                           int64_t begin, const std::vector<int64_t>& shape)
    : mesh_(mesh), name_(tensor.names.front()) {
  const bool is_writer = mesh == nullptr || mesh->rank() == kWriter;
  const at::Tensor local = tensor.tensor.detach();
  if (tensor.layout == nullptr || shape.empty()) {
    if (!is_writer) return;
    rows_ = Dense(shape.empty() ? local : local.narrow(0, begin, shape[0]),
                  at::kCPU);
    return;
  }
  if (is_writer) {
    rows_ = at::empty(shape, local.options().device(at::kCPU));
  }
  // From the first rank on that has it: the writer's own copies come first.
  std::set<TensorSlice> known;
  for (int64_t rank = 0; rank < mesh->size(); ++rank) {
    for (const HeldRows& held :
         RowsWithin(tensor.SlicesOf(rank), begin, shape[0])) {
      if (!known.insert(held.slice).second) continue;
      AddPart(tensor, rank, held.local_row, held.slice);
    }
  }
  int64_t buffer_size = 0;
  for (const Transfer& transfer : transfers_) {
    if (is_writer && IsBuffered(transfer.part)) {
      buffer_size = std::max(buffer_size, transfer.part.numel());
    }
  }
  if (buffer_size > 0) {
    buffer_ = at::empty({buffer_size},
                        rows_.options().device(MetadataDevice(*mesh->group())));
  }
}

absl::StatusOr<at::Tensor> RowGathering::Run() {
  for (const auto& [owner, part] : transfers_) {
    c10d::ProcessGroup& group = *mesh_->group();
    const std::string what =
        absl::StrCat(mesh_->RankString(), ": transfer of ", name_);
    if (mesh_->rank() != kWriter) {
      std::vector<at::Tensor> message = {part};
      LORA_RETURN_IF_ERROR(RunCollective(group, what, [&] {
        return group.send(message, kWriter, /*tag=*/0);
      }));
      continue;
    }
    std::vector<at::Tensor> message = {
        IsBuffered(part) ? buffer_.narrow(0, 0, part.numel()).view(part.sizes())
                         : part};
    LORA_RETURN_IF_ERROR(RunCollective(group, what, [&, owner = owner] {
      return group.recv(message, static_cast<int>(owner), /*tag=*/0);
    }));
    if (!message[0].is_same(part)) part.copy_(message[0]);
  }
  return rows_;
}

void RowGathering::AddPart(const ModelTensor& tensor, int64_t owner,
                           int64_t local_row, const TensorSlice& slice) {
  const bool is_owner = mesh_->rank() == owner;
  const bool is_writer = mesh_->rank() == kWriter;
  at::Tensor held;
  if (is_owner) {
    held = tensor.tensor.detach().narrow(0, local_row, slice.sizes[0]);
  }
  if (!is_writer) {
    if (!is_owner) return;
    transfers_.push_back({owner, Dense(held, MetadataDevice(*mesh_->group()))});
    return;
  }
  at::Tensor part = rows_;
  for (int64_t dim = 0; dim < rows_.dim(); ++dim) {
    part = part.narrow(dim, slice.offsets[dim], slice.sizes[dim]);
  }
  if (is_owner) {
    part.copy_(held);
  } else {
    transfers_.push_back({owner, part});
  }
}

bool RowGathering::IsBuffered(const at::Tensor& part) const {
  return !part.is_contiguous() || !MetadataDevice(*mesh_->group()).is_cpu();
}

}  // namespace trainer_lora::distributed::internal
