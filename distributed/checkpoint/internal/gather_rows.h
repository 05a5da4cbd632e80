// Tensors that lie over ranks, whole on one of them.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/device_mesh.h"
#include "distributed/tensor_slice.h"

namespace trainer_lora::distributed::internal {

// The elements of `tensor` themselves, row-major, on `device`.
at::Tensor Dense(const at::Tensor& tensor, at::Device device);

// Brings rows of a tensor to rank 0, in two steps: a rank that fails in the
// first must tell the others, which would wait for it in the second.
//
//   std::optional<RowGathering> gathering;
//   LORA_RETURN_IF_ERROR(AgreedStep(..., [&] {
//     gathering.emplace(mesh, tensor, begin, shape);
//     return absl::OkStatus();
//   }));
//   return gathering->Run();
class RowGathering {
 public:
  // `shape[0]` rows of `tensor` from `begin` on, or all of a scalar. Takes the
  // memory for it, and may throw. `mesh`, which must outlive this object, is
  // null for this process alone.
  RowGathering(const DeviceMesh* mesh, const ModelTensor& tensor, int64_t begin,
               const std::vector<int64_t>& shape);

  // Once, collective over the mesh. The rows, contiguous on the CPU of rank 0;
  // undefined on the others, each of which sends what rank 0 lacks. Errors of
  // RunCollective.
  absl::StatusOr<at::Tensor> Run();

 private:
  // A part of the rows that another rank has.
  struct Transfer {
    int64_t owner;
    at::Tensor part;  // On its owner, to be sent; on rank 0, of rows_.
  };

  void AddPart(const ModelTensor& tensor, int64_t owner, int64_t local_row,
               const TensorSlice& slice);
  // Whether `part` of rows_ must come through buffer_.
  bool IsBuffered(const at::Tensor& part) const;

  const DeviceMesh* mesh_;
  std::string name_;                 // Of the tensor.
  at::Tensor rows_;                  // On rank 0.
  std::vector<Transfer> transfers_;  // Of this rank.
  at::Tensor buffer_;                // On rank 0, for one part at a time.
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_GATHER_ROWS_H_
