#include "lora/lora_gradient_sync.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "config/lora_config.h"
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

// A parameter that is trained with an adapter. Its layout is nothing where
// neither its layer nor ReplicateLoraParameters() says where it lies.
struct TrainedParameter {
  std::string name;  // In the model.
  at::Tensor parameter;
  std::optional<ParameterLayout> layout;
  // Whether its layer says where it lies.
  bool is_split;
};

std::vector<TrainedParameter> ParametersOf(
    const torch::nn::Module& model, const std::vector<NamedLoraLayer>& layers) {
  std::vector<TrainedParameter> parameters;
  std::set<std::string> with_biases;  // Adapters.
  std::map<const c10::TensorImpl*, const LoraLayer*> layer_of_bias;
  std::optional<ParameterLayout> replicated;
  for (const auto& [name, layer] : layers) {
    for (const std::string& adapter : layer->adapter_names()) {
      if (layer->adapter(adapter).options.bias != config::BiasTraining::kNone) {
        with_biases.insert(adapter);
      }
      for (AdapterParameter& item : layer->AdapterParameters(adapter)) {
        parameters.push_back({absl::StrCat(name, ".", item.name),
                              std::move(item.parameter), std::move(item.layout),
                              item.is_split});
      }
    }
    const at::Tensor bias = layer->state("bias");
    if (bias.defined()) layer_of_bias[bias.unsafeGetTensorImpl()] = layer;
    if (!replicated) replicated = layer->replicated_layout();
  }
  for (const std::string& adapter : with_biases) {
    for (const NamedParameter& bias : TrainedBiases(model, adapter)) {
      const auto found =
          layer_of_bias.find(bias.parameter.unsafeGetTensorImpl());
      const bool is_split = found != layer_of_bias.end() &&
                            found->second->LayoutOf("bias", 1).has_value();
      parameters.push_back(
          {bias.name, bias.parameter,
           is_split ? found->second->ParameterLayoutOf("bias", 1) : replicated,
           is_split});
    }
  }
  return parameters;
}

}  // namespace

absl::Status ReplicateLoraParameters(torch::nn::Module& model,
                                     std::shared_ptr<const DeviceMesh> mesh) {
  if (mesh == nullptr) {
    return absl::InvalidArgumentError(
        "adapters cannot be replicated over a null mesh");
  }
  const ParameterLayout layout = ParameterLayout::Replicated(std::move(mesh));
  const std::vector<NamedLoraLayer> layers = AdaptedLayers(model);
  std::vector<DistributedParameter> parameters;
  for (TrainedParameter& item : ParametersOf(model, layers)) {
    if (item.is_split) continue;
    parameters.push_back(
        {std::move(item.name), std::move(item.parameter), layout});
  }
  // Joined by a rank without adapters too, so that the others learn of it.
  LORA_RETURN_IF_ERROR(
      distributed::BroadcastParameters(*layout.mesh, parameters));
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
  for (TrainedParameter& item : ParametersOf(model, AdaptedLayers(model))) {
    if (!item.layout.has_value()) continue;
    parameters.push_back({absl::StrCat(prefix, item.name),
                          std::move(item.parameter), *std::move(item.layout)});
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
