#include "distributed/gradient_sync.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/MemoryOverlap.h"
#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace trainer_lora::distributed {
namespace {

using ParameterRefs = std::vector<const DistributedParameter*>;

// Parameters of one dtype and device, which one collective serves.
struct Bucket {
  ParameterRefs parameters;
  // The slices of all parameters, one after the other: [numel].
  at::Tensor flat;
  // For each parameter its view of `flat`, in the parameter's shape.
  std::vector<at::Tensor> slices;
};

// Replicated over some dimension; CheckCanBeSent() wants it over all.
bool IsReplicated(const ParameterLayout& layout) {
  return layout.mesh != nullptr &&
         std::any_of(layout.placements.begin(), layout.placements.end(),
                     [](const Placement& placement) {
                       return placement.is_replicate();
                     });
}

ParameterRefs ReplicatedParameters(
    absl::Span<const DistributedParameter> parameters) {
  ParameterRefs replicated;
  for (const DistributedParameter& parameter : parameters) {
    if (IsReplicated(parameter.layout)) replicated.push_back(&parameter);
  }
  return replicated;
}

ParameterRefs ThoseThatRequireGrad(const ParameterRefs& parameters) {
  ParameterRefs trainable;
  for (const DistributedParameter* parameter : parameters) {
    if (parameter->parameter.requires_grad()) trainable.push_back(parameter);
  }
  return trainable;
}

std::string ShapeString(const at::Tensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

// Such as "broadcast of 2 parameters, the first to_q.lora_A".
std::string NameCollective(const std::string& collective,
                           const ParameterRefs& parameters) {
  return absl::StrCat(
      collective, " of ", parameters.size(), " parameters",
      parameters.empty() ? "" : ", the first " + parameters[0]->name);
}

// What has to be the same on every rank.
std::string Describe(const DistributedParameter& parameter) {
  const at::Tensor& tensor = parameter.parameter;
  return absl::StrCat(
      parameter.name, " (", c10::toString(tensor.scalar_type()), " ",
      ShapeString(tensor), " on ",
      c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true), ")");
}

absl::Status CheckCanBeSent(const DeviceMesh& mesh,
                            const DistributedParameter& parameter) {
  const at::Tensor& tensor = parameter.parameter;
  if (parameter.layout.mesh.get() != &mesh) {
    return absl::InvalidArgumentError(absl::StrCat(
        parameter.name, " lies on another mesh, ",
        parameter.layout.mesh->ToString(), "; pass the mesh of its layout"));
  }
  for (const Placement& placement : parameter.layout.placements) {
    if (placement.is_replicate()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(parameter.name, " must be replicated over all of ",
                     mesh.ToString(), ", is ", parameter.layout.ToString()));
  }
  if (tensor.is_meta() || tensor.layout() != at::kStrided) {
    return absl::InvalidArgumentError(
        absl::StrCat(parameter.name, " must be a dense tensor with values; ",
                     "load or materialize it first"));
  }
  return absl::OkStatus();
}

absl::Status CheckIsAveraged(const DistributedParameter& parameter) {
  for (const Placement& placement : parameter.layout.placements) {
    if (placement.gradient_reduction() == GradientReduction::kAverage) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the gradient of ", parameter.name,
                     " must be averaged over every dimension of its mesh, is ",
                     parameter.layout.ToString()));
  }
  return absl::OkStatus();
}

absl::Status CheckGradient(const DistributedParameter& parameter) {
  const at::Tensor& gradient = parameter.parameter.grad();
  if (!gradient.defined()) return absl::OkStatus();
  if (gradient.layout() != at::kStrided || gradient.is_meta() ||
      gradient.sizes() != parameter.parameter.sizes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the gradient of ", parameter.name, " must be a dense tensor of shape ",
        ShapeString(parameter.parameter)));
  }
  return absl::OkStatus();
}

// Collective. A rank whose own check failed tells the others, which would
// otherwise wait for it in the collective that it never joins.
absl::Status AgreeOn(const DeviceMesh& mesh, std::string operation,
                     const ParameterRefs& parameters,
                     const absl::Status& local_check) {
  std::vector<std::string> lines = {std::move(operation)};
  for (const DistributedParameter* parameter : parameters) {
    lines.push_back(Describe(*parameter));
  }
  if (!local_check.ok()) lines.push_back(std::string(local_check.message()));
  LORA_RETURN_IF_ERROR(internal::CheckRanksAgree(
      *mesh.group(), mesh.ToString(), NameCollective("comparison", parameters),
      lines));
  return local_check;
}

// In the order of the parameters: the ranks agree on it.
std::vector<Bucket> MakeBuckets(const ParameterRefs& parameters) {
  std::vector<Bucket> buckets;
  for (const DistributedParameter* parameter : parameters) {
    auto bucket = buckets.begin();
    while (bucket != buckets.end() &&
           (bucket->parameters[0]->parameter.scalar_type() !=
                parameter->parameter.scalar_type() ||
            bucket->parameters[0]->parameter.device() !=
                parameter->parameter.device())) {
      ++bucket;
    }
    if (bucket == buckets.end()) bucket = buckets.emplace(bucket);
    bucket->parameters.push_back(parameter);
  }

  for (Bucket& bucket : buckets) {
    int64_t numel = 0;
    for (const DistributedParameter* parameter : bucket.parameters) {
      numel += parameter->parameter.numel();
    }
    bucket.flat = at::empty({numel}, bucket.parameters[0]->parameter.options());
    int64_t offset = 0;
    for (const DistributedParameter* parameter : bucket.parameters) {
      const at::Tensor& tensor = parameter->parameter;
      bucket.slices.push_back(
          bucket.flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }
  return buckets;
}

void PackGradients(const Bucket& bucket) {
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& gradient = bucket.parameters[i]->parameter.grad();
    if (gradient.defined()) {
      bucket.slices[i].copy_(gradient);
    } else {
      bucket.slices[i].zero_();
    }
  }
}

void UnpackGradients(const Bucket& bucket) {
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& parameter = bucket.parameters[i]->parameter;
    at::Tensor& gradient = parameter.mutable_grad();
    // An expanded gradient has no element of its own to write each value to.
    if (!gradient.defined() ||
        at::has_internal_overlap(gradient) == at::MemOverlap::Yes) {
      gradient = at::empty_like(parameter);
    }
    gradient.copy_(bucket.slices[i]);
  }
}

// Sum and division, not c10d's AVG: two ranks then give the bits of one that
// accumulated both gradients and divided.
absl::Status AverageBucket(const DeviceMesh& mesh, const Bucket& bucket) {
  c10d::ProcessGroup& group = *mesh.group();
  std::vector<at::Tensor> tensors = {bucket.flat};
  LORA_RETURN_IF_ERROR(internal::RunCollective(
      group,
      absl::StrCat(mesh.RankString(), ": ",
                   NameCollective("gradient all-reduce", bucket.parameters)),
      [&] { return group.allreduce(tensors); }));
  tensors[0].div_(mesh.size());
  return absl::OkStatus();
}

absl::Status BroadcastBucket(const DeviceMesh& mesh, const Bucket& bucket,
                             int root) {
  c10d::ProcessGroup& group = *mesh.group();
  std::vector<at::Tensor> tensors = {bucket.flat};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return internal::RunCollective(
      group,
      absl::StrCat(mesh.RankString(), ": ",
                   NameCollective("broadcast", bucket.parameters)),
      [&] { return group.broadcast(tensors, options); });
}

}  // namespace

absl::StatusOr<int64_t> AverageReplicatedGradients(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters) {
  const at::NoGradGuard no_grad;
  const ParameterRefs synchronized =
      ThoseThatRequireGrad(ReplicatedParameters(parameters));

  absl::Status local_check;
  for (const DistributedParameter* parameter : synchronized) {
    local_check.Update(CheckCanBeSent(mesh, *parameter));
    local_check.Update(CheckIsAveraged(*parameter));
    local_check.Update(CheckGradient(*parameter));
  }
  LORA_RETURN_IF_ERROR(
      AgreeOn(mesh, "the average of gradients", synchronized, local_check));

  // Nothing is written before every collective went through.
  const std::vector<Bucket> buckets = MakeBuckets(synchronized);
  for (const Bucket& bucket : buckets) {
    PackGradients(bucket);
    LORA_RETURN_IF_ERROR(AverageBucket(mesh, bucket));
  }
  for (const Bucket& bucket : buckets) UnpackGradients(bucket);
  return static_cast<int64_t>(synchronized.size());
}

absl::Status BroadcastParameters(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    int root) {
  const at::NoGradGuard no_grad;
  const ParameterRefs replicated = ReplicatedParameters(parameters);

  absl::Status local_check;
  if (root < 0 || root >= mesh.size()) {
    local_check = absl::InvalidArgumentError(absl::StrCat(
        "root must be a rank of ", mesh.ToString(), ", got ", root));
  }
  for (const DistributedParameter* parameter : replicated) {
    local_check.Update(CheckCanBeSent(mesh, *parameter));
  }
  LORA_RETURN_IF_ERROR(AgreeOn(mesh,
                               absl::StrCat("the broadcast from rank ", root),
                               replicated, local_check));

  const std::vector<Bucket> buckets = MakeBuckets(replicated);
  for (const Bucket& bucket : buckets) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      bucket.slices[i].copy_(bucket.parameters[i]->parameter);
    }
    LORA_RETURN_IF_ERROR(BroadcastBucket(mesh, bucket, root));
  }
  for (const Bucket& bucket : buckets) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      bucket.parameters[i]->parameter.copy_(bucket.slices[i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace trainer_lora::distributed
