// Does a tensor lie as its layout says?
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_LAYOUT_CHECK_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_LAYOUT_CHECK_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "distributed/parameter_layout.h"

namespace trainer_lora::distributed::internal {

// kInvalidArgument, with the `name` of the parameter, if `layout` is not valid,
// or if it has parts with replicas and `tensor`, which is the parameter or its
// gradient, has not the rows of its parts.
absl::Status CheckLayout(const std::string& name, const at::Tensor& tensor,
                         const ParameterLayout& layout);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_LAYOUT_CHECK_H_
