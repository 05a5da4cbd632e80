// Tensors that lie over ranks, whole on one of them.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/device_mesh.h"

namespace trainer_lora::distributed::internal {

// The elements of `tensor` themselves, row-major, on `device`.
at::Tensor Dense(const at::Tensor& tensor, at::Device device);

// `shape[0]` rows of `tensor` from `begin` on, or all of a scalar: contiguous
// on the CPU of rank 0, undefined on the others, each of which sends what rank
// 0 lacks. Collective over `mesh`; null: this process alone. Errors of
// RunCollective.
absl::StatusOr<at::Tensor> GatherRows(const DeviceMesh* mesh,
                                      const ModelTensor& tensor, int64_t begin,
                                      const std::vector<int64_t>& shape);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_
