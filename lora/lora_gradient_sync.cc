#include "lora/lora_gradient_sync.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "distributed/parameter_layout.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using distributed::DeviceMesh;
using distributed::DistributedParameter;
using distributed::ParameterLayout;

std::vector<NamedLoraLayer> AdaptedLayers(const torch::nn::Module& model) {
  std::vector<NamedLoraLayer> adapted;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    if (item.layer->is_adapted()) adapted.push_back(item);
  }
  return adapted;
}

}  // namespace

absl::Status ReplicateLoraParameters(torch::nn::Module& model,
                                     std::shared_ptr<const DeviceMesh> mesh) {
  if (mesh == nullptr) {
    return absl::InvalidArgumentError(
        "adapters cannot be replicated over a null mesh");
  }
  const ParameterLayout layout = ParameterLayout::Replicated(mesh);
  const std::vector<NamedLoraLayer> layers = AdaptedLayers(model);
  std::vector<DistributedParameter> parameters;
  for (const auto& [name, layer] : layers) {
    parameters.push_back(
        {absl::StrCat(name, ".lora_A"), layer->lora_A(), layout});
    parameters.push_back(
        {absl::StrCat(name, ".lora_B"), layer->lora_B(), layout});
  }
  // Joined by a rank without adapters too, so that the others learn of it.
  LORA_RETURN_IF_ERROR(distributed::BroadcastParameters(*mesh, parameters));
  if (layers.empty()) {
    return absl::InvalidArgumentError(
        "the model has no LoRA adapter: call EnableLoraTraining first");
  }
  for (const auto& item : layers) item.layer->set_lora_layouts(layout, layout);
  return absl::OkStatus();
}

std::vector<DistributedParameter> LoraParameters(const torch::nn::Module& model,
                                                 absl::string_view prefix) {
  std::vector<DistributedParameter> parameters;
  const auto add = [&](std::string name, at::Tensor parameter,
                       const std::optional<ParameterLayout>& layout) {
    if (!layout.has_value()) return;
    parameters.push_back({std::move(name), std::move(parameter), *layout});
  };
  for (const auto& [name, layer] : AdaptedLayers(model)) {
    add(absl::StrCat(prefix, name, ".lora_A"), layer->lora_A(),
        layer->lora_A_layout());
    add(absl::StrCat(prefix, name, ".lora_B"), layer->lora_B(),
        layer->lora_B_layout());
  }
  return parameters;
}

absl::StatusOr<int64_t> SyncReplicatedLoraGradients(
    const torch::nn::Module& model) {
  const std::vector<DistributedParameter> parameters = LoraParameters(model);
  if (parameters.empty()) return 0;
  return distributed::ReduceGradients(*parameters[0].layout.mesh, parameters);
}

}  // namespace trainer_lora::lora
