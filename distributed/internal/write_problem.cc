#include "distributed/internal/write_problem.h"

#include <string>

#include "ATen/MemoryOverlap.h"
#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/core/InferenceMode.h"

namespace trainer_lora::distributed::internal {

const char* WriteProblem(const at::Tensor& tensor) {
  if (tensor.is_inference() && !c10::InferenceMode::is_enabled()) {
    return "was made in inference mode";
  }
  if (!tensor.is_meta() &&
      at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    return "has several elements in one place";
  }
  return nullptr;
}

absl::Status CheckCanWrite(const std::string& name, const at::Tensor& tensor) {
  const char* const problem = WriteProblem(tensor);
  if (problem == nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      name, " can't be written: it ", problem, ": put a copy in its place"));
}

}  // namespace trainer_lora::distributed::internal
