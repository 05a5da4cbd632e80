// The parameters and buffers of a model, with their layouts.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_MODEL_STATE_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_MODEL_STATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "distributed/device_mesh.h"
#include "distributed/state_layout.h"
#include "distributed/tensor_slice.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed::internal {

// A parameter or buffer.
struct ModelTensor {
  std::vector<int64_t> GlobalShape() const;
  // What `rank` of the mesh holds of it.
  std::vector<TensorSlice> SlicesOf(int64_t rank) const;
  // The shape of this rank's part.
  std::vector<int64_t> LocalShape() const;

  std::vector<std::string> names;  // One for each place that it hangs at.
  at::Tensor tensor;
  const StateLayout* layout;  // Null for one that every rank holds whole.
};

// Those of `model`, in its order and each once: named_parameters() lists a
// shared layer under each of its names. Of several names the first with a
// layout counts. `layouts` must outlive the result.
std::vector<ModelTensor> ListTensors(const torch::nn::Module& model,
                                     const StateLayouts& layouts);

// kInvalidArgument, which names the tensor, unless each of `layouts` is valid,
// over a mesh of the same ranks as `mesh` (which is null for a process alone),
// and for one of `tensors`.
absl::Status CheckLayouts(const std::vector<ModelTensor>& tensors,
                          const DeviceMesh* mesh, const StateLayouts& layouts);

// Such as "BF16 [4, 8]".
std::string DescribeTensor(at::ScalarType dtype, at::IntArrayRef shape);

// What the ranks must know alike to move `tensor` between them: its first name,
// type, global shape and layout.
std::string DescribeShards(const ModelTensor& tensor);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_MODEL_STATE_H_
