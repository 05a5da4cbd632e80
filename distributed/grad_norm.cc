#include "distributed/grad_norm.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"

namespace trainer_lora::distributed {
namespace {

absl::Status CheckMaxNorm(double max_norm) {
  if (max_norm > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("max_norm must be positive, got ", max_norm));
}

double SquaredNorm(const at::Tensor& gradient) {
  const double norm = at::linalg_vector_norm(gradient, 2, std::nullopt,
                                             /*keepdim=*/false, at::kDouble)
                          .item<double>();
  return norm * norm;
}

void Clip(const std::vector<at::Tensor>& gradients, double norm,
          double max_norm) {
  if (!std::isfinite(norm) || norm <= max_norm) return;
  for (const at::Tensor& gradient : gradients) {
    gradient.mul_(max_norm / (norm + 1e-6));
  }
}

// The number of ranks that hold each value of the parameter.
int64_t NumReplicas(const ParameterLayout& layout) {
  int64_t replicas = 1;
  for (size_t dim = 0; dim < layout.placements.size(); ++dim) {
    if (layout.placements[dim].is_replicate()) {
      replicas *= layout.mesh->size(static_cast<int64_t>(dim));
    }
  }
  return replicas;
}

}  // namespace

absl::StatusOr<double> ClipGradNorm(absl::Span<const at::Tensor> parameters,
                                    double max_norm) {
  LORA_RETURN_IF_ERROR(CheckMaxNorm(max_norm));
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  double squared_norm = 0;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    gradients.push_back(parameter.grad());
    squared_norm += SquaredNorm(parameter.grad());
  }
  const double norm = std::sqrt(squared_norm);
  Clip(gradients, norm, max_norm);
  return norm;
}

absl::StatusOr<double> ClipGradNorm(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    double max_norm) {
  absl::Status error = CheckMaxNorm(max_norm);
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  double squared_norm = 0;
  for (const DistributedParameter& item : parameters) {
    if (item.layout.mesh.get() != &mesh) {
      error.Update(absl::InvalidArgumentError(
          absl::StrCat(item.name, " does not lie on ", mesh.ToString())));
      continue;
    }
    if (!item.parameter.grad().defined()) continue;
    gradients.push_back(item.parameter.grad());
    // Each of the ranks that hold it adds its share.
    squared_norm += SquaredNorm(item.parameter.grad()) /
                    static_cast<double>(NumReplicas(item.layout));
  }
  // A rank in error takes part all the same, so that no other waits for it.
  if (!error.ok()) squared_norm = std::numeric_limits<double>::quiet_NaN();
  const absl::StatusOr<double> total =
      AllReduce(mesh, squared_norm, ReduceOp::kSum);
  LORA_RETURN_IF_ERROR(error);
  LORA_RETURN_IF_ERROR(total.status());
  const double norm = std::sqrt(*total);
  Clip(gradients, norm, max_norm);
  return norm;
}

}  // namespace trainer_lora::distributed
