#include "lora/lora_gradient_sync.h"

#include <functional>
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

// Calls `visit` with the full name of each parameter of each adapter.
void ForEachAdapterParameter(
    const std::vector<NamedLoraLayer>& layers,
    const std::function<void(const std::string& name, const LoraLayer& layer,
                             const AdapterParameter& item)>& visit) {
  for (const auto& [name, layer] : layers) {
    for (const std::string& adapter : layer->adapter_names()) {
      for (const AdapterParameter& item : layer->AdapterParameters(adapter)) {
        visit(absl::StrCat(name, ".", item.name), *layer, item);
      }
    }
  }
}

// Whether the layer itself says where the parameter lies.
bool IsSplit(const LoraLayer& layer, const AdapterParameter& item) {
  const std::string name = item.name.substr(item.name.rfind('.') + 1);
  return layer.LayoutOf(name, /*rank=*/1).has_value();
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
  ForEachAdapterParameter(
      layers, [&](const std::string& name, const LoraLayer& layer,
                  const AdapterParameter& item) {
        if (!IsSplit(layer, item)) {
          parameters.push_back({name, item.parameter, layout});
        }
      });
  // Joined by a rank without adapters too, so that the others learn of it.
  LORA_RETURN_IF_ERROR(distributed::BroadcastParameters(*mesh, parameters));
  if (layers.empty()) {
    return absl::InvalidArgumentError(
        "the model has no LoRA adapter: call EnableLoraTraining first");
  }
  for (const auto& item : layers) item.layer->set_replicated_layout(layout);
  return absl::OkStatus();
}

std::vector<DistributedParameter> LoraParameters(const torch::nn::Module& model,
                                                 absl::string_view prefix) {
  std::vector<DistributedParameter> parameters;
  ForEachAdapterParameter(
      AdaptedLayers(model), [&](const std::string& name, const LoraLayer&,
                                const AdapterParameter& item) {
        if (!item.layout.has_value()) return;
        parameters.push_back(
            {absl::StrCat(prefix, name), item.parameter, *item.layout});
      });
  return parameters;
}

absl::StatusOr<int64_t> SyncReplicatedLoraGradients(
    const torch::nn::Module& model) {
  const std::vector<DistributedParameter> parameters = LoraParameters(model);
  if (parameters.empty()) return 0;
  return distributed::ReduceGradients(*parameters[0].layout.mesh, parameters);
}

}  // namespace trainer_lora::lora
