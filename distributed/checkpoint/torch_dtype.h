// The element types of files as those of tensors, and back.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_

#include <optional>

#include "c10/core/ScalarType.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed {

at::ScalarType ToScalarType(TensorDtype dtype);

// Nothing for a type that files do not have.
std::optional<TensorDtype> ToTensorDtype(at::ScalarType dtype);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_
