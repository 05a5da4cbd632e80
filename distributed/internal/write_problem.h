// Can a tensor be written in place?
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_WRITE_PROBLEM_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_WRITE_PROBLEM_H_

#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace trainer_lora::distributed::internal {

// Why values can't be written into `tensor` in place, such as "was made in
// inference mode"; null if they can, as into what takes its place if it is
// meta.
const char* WriteProblem(const at::Tensor& tensor);

// kFailedPrecondition, which names the tensor, if it has such a problem.
absl::Status CheckCanWrite(const std::string& name, const at::Tensor& tensor);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_WRITE_PROBLEM_H_
