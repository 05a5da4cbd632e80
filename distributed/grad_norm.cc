#include "distributed/grad_norm.h"

#include <cmath>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"

namespace trainer_lora::distributed {

absl::StatusOr<double> ClipGradNorm(absl::Span<const at::Tensor> parameters,
                                    double max_norm) {
  if (!(max_norm > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_norm must be positive, got ", max_norm));
  }

  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  double squared_norm = 0;
  for (const at::Tensor& parameter : parameters) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    const double norm = at::linalg_vector_norm(gradient, 2, std::nullopt,
                                               /*keepdim=*/false, at::kDouble)
                            .item<double>();
    squared_norm += norm * norm;
    gradients.push_back(gradient);
  }

  const double norm = std::sqrt(squared_norm);
  if (std::isfinite(norm) && norm > max_norm) {
    for (at::Tensor& gradient : gradients) {
      gradient.mul_(max_norm / (norm + 1e-6));
    }
  }
  return norm;
}

}  // namespace trainer_lora::distributed
