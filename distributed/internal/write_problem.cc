#include "distributed/internal/write_problem.h"

#include "ATen/MemoryOverlap.h"
#include "ATen/core/Tensor.h"
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

}  // namespace trainer_lora::distributed::internal
