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
#include "distributed/placement.h"

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

// The number of ranks that hold each value of the parameter, over the mesh
// dimensions that replicate it.
int64_t NumReplicas(const ParameterLayout& layout) {
  int64_t replicas = 1;
  for (size_t dim = 0; dim < layout.placements.size(); ++dim) {
    if (layout.placements[dim].is_replicate()) {
      replicas *= layout.mesh->size(static_cast<int64_t>(dim));
    }
  }
  return replicas;
}

// This rank's share of the squared norm: each of the ranks that hold a value
// adds its own.
double SquaredNormShare(const at::Tensor& gradient,
                        const ParameterLayout& layout) {
  double squared_norm = 0;
  if (layout.HasReplicatedParts()) {
    const std::vector<Chunk> chunks = layout.LocalParts();
    int64_t row = 0;
    for (size_t i = 0; i < chunks.size(); ++i) {
      squared_norm += SquaredNorm(gradient.narrow(0, row, chunks[i].size)) /
                      static_cast<double>(layout.parts[i].replicas);
      row += chunks[i].size;
    }
  } else {
    squared_norm = SquaredNorm(gradient);
  }
  return squared_norm / static_cast<double>(NumReplicas(layout));
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
    squared_norm += SquaredNormShare(item.parameter.grad(), item.layout);
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
