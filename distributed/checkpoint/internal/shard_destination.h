// The memory of a target of a load: where elements of its rank's tensor go.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_DESTINATION_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_DESTINATION_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed::internal {

// Several threads may write to one destination at once, to different elements.
// Gradients must be off in them.
class ShardDestination {
 public:
  // `tensor` has memory, of any strides.
  explicit ShardDestination(const at::Tensor& tensor);

  // Where element `begin` (row-major) is, if it and the next ones can be
  // written there as they are, of type `dtype`; else null.
  char* DirectPointer(TensorDtype dtype, int64_t begin) const;

  // Writes `count` elements of type `dtype`, converted, from `begin` on.
  // `bytes` is aligned to an element.
  void Write(TensorDtype dtype, const char* bytes, int64_t begin,
             int64_t count) const;

 private:
  at::Tensor tensor_;  // One-dimensional if it is contiguous.
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_DESTINATION_H_
