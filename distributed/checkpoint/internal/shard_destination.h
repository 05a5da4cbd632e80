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
  // `tensor` has memory. One that is not contiguous gets its values in Finish()
  // from a contiguous one.
  explicit ShardDestination(const at::Tensor& tensor);

  // Where element `begin` (row-major) is, if elements of type `dtype` can be
  // written there as they are; else null.
  char* DirectPointer(TensorDtype dtype, int64_t begin) const;

  // Writes `count` elements of type `dtype`, converted, from `begin` on.
  // `bytes` is aligned to 8.
  void Write(TensorDtype dtype, const char* bytes, int64_t begin,
             int64_t count) const;

  // Must be called once, after all writes.
  void Finish() const;

 private:
  at::Tensor tensor_;
  at::Tensor flat_;  // One-dimensional and contiguous.
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_DESTINATION_H_
