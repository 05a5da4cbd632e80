#include "distributed/grad_norm.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/linalg_vector_norm.h"
#include "ATen/ops/stack.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/internal/layout_check.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"

namespace trainer_lora::distributed {
namespace {

absl::Status CheckMaxNorm(double max_norm) {
  if (max_norm > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("max_norm must be positive, got ", max_norm));
}

at::Tensor Norm(const at::Tensor& gradient) {
  return at::linalg_vector_norm(gradient, 2, std::nullopt, /*keepdim=*/false,
                                at::kDouble);
}

// The values of scalar tensors of doubles. The host waits for a device once,
// not for each of them.
std::vector<double> ReadAll(std::vector<at::Tensor> scalars) {
  if (scalars.empty()) return {};
  const at::Device device = scalars[0].device();
  for (at::Tensor& scalar : scalars) {
    // Towards the CPU nothing would wait for the value.
    scalar = scalar.to(device, /*non_blocking=*/device.is_cuda());
  }
  const at::Tensor values = at::stack(scalars).cpu();
  const double* const begin = values.const_data_ptr<double>();
  return {begin, begin + values.numel()};
}

double Square(double x) { return x * x; }

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

// The norms that SquaredNormShare() needs of a gradient.
void AppendNorms(const at::Tensor& gradient, const ParameterLayout& layout,
                 std::vector<at::Tensor>& norms) {
  if (!layout.HasReplicatedParts()) {
    norms.push_back(Norm(gradient));
    return;
  }
  int64_t row = 0;
  for (const Chunk& chunk : layout.LocalParts()) {
    norms.push_back(Norm(gradient.narrow(0, row, chunk.size)));
    row += chunk.size;
  }
}

// This rank's share of the squared norm of a gradient: each of the ranks that
// hold a value adds its own. Moves `norm` past the gradient's norms.
double SquaredNormShare(const ParameterLayout& layout,
                        std::vector<double>::const_iterator& norm) {
  double squared_norm = 0;
  if (layout.HasReplicatedParts()) {
    for (const ShardedPart& part : layout.parts) {
      squared_norm += Square(*norm++) / static_cast<double>(part.replicas);
    }
  } else {
    squared_norm = Square(*norm++);
  }
  return squared_norm / static_cast<double>(NumReplicas(layout));
}

}  // namespace

absl::StatusOr<double> ClipGradNorm(absl::Span<const at::Tensor> parameters,
                                    double max_norm) {
  LORA_RETURN_IF_ERROR(CheckMaxNorm(max_norm));
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    gradients.push_back(parameter.grad());
    norms.push_back(Norm(parameter.grad()));
  }
  double squared_norm = 0;
  for (const double norm : ReadAll(std::move(norms))) {
    squared_norm += Square(norm);
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
  std::vector<const ParameterLayout*> layouts;
  std::vector<at::Tensor> norms;
  for (const DistributedParameter& item : parameters) {
    if (item.layout.mesh.get() != &mesh) {
      error.Update(absl::InvalidArgumentError(
          absl::StrCat(item.name, " does not lie on ", mesh.ToString())));
      continue;
    }
    const at::Tensor& gradient = item.parameter.grad();
    if (!gradient.defined()) continue;
    const absl::Status fits =
        internal::CheckLayout(item.name, gradient, item.layout);
    error.Update(fits);
    if (!fits.ok()) continue;
    gradients.push_back(gradient);
    layouts.push_back(&item.layout);
    AppendNorms(gradient, item.layout, norms);
  }
  const std::vector<double> values = ReadAll(std::move(norms));
  auto value = values.begin();
  double squared_norm = 0;
  for (const ParameterLayout* layout : layouts) {
    squared_norm += SquaredNormShare(*layout, value);
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
