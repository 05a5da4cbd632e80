// The element types of files as those of tensors, and back:
//
//   ToScalarType(TensorDtype::kBF16);  // at::kBFloat16
//   ToTensorDtype(at::kComplexDouble);  // nullopt: files don't have it
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_

#include <optional>

#include "c10/core/ScalarType.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::distributed {

// Nothing for F6_E2M3 and F6_E3M2, which tensors do not have, and for F4, which
// they have as pairs: a tensor of those has another shape than the file says.
std::optional<at::ScalarType> ToScalarType(TensorDtype dtype);

// Nothing for a type that files do not have, or not with a tensor's shape.
std::optional<TensorDtype> ToTensorDtype(at::ScalarType dtype);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_TORCH_DTYPE_H_
