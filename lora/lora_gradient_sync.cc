#include "lora/lora_gradient_sync.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
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
  // Of layers without an adapter too: `bias: all` trains theirs.
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
  std::set<const c10::TensorImpl*> seen;  // Two adapters may train a bias.
  for (const std::string& adapter : with_biases) {
    for (const NamedParameter& bias : TrainedBiases(model, adapter)) {
      if (!seen.insert(bias.parameter.unsafeGetTensorImpl()).second) continue;
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

// What LoraParameters() returns, and the names of those that it can't.
struct Placed {
  std::vector<DistributedParameter> parameters;
  std::vector<std::string> without_layout;
};

Placed PlacedParameters(const torch::nn::Module& model,
                        absl::string_view prefix) {
  Placed placed;
  for (TrainedParameter& item : ParametersOf(model, LoraLayers(model))) {
    std::string name = absl::StrCat(prefix, item.name);
    if (item.layout.has_value()) {
      placed.parameters.push_back({std::move(name), std::move(item.parameter),
                                   *std::move(item.layout)});
    } else {
      placed.without_layout.push_back(std::move(name));
    }
  }
  return placed;
}

// Nothing to say of a model of one process, where none has a layout.
std::string ProblemOf(const Placed& placed) {
  if (placed.parameters.empty() || placed.without_layout.empty()) return "";
  return absl::StrCat(
      "the ranks would train ", placed.without_layout.size(),
      " parameters apart, such as ", placed.without_layout.front(),
      ", as nothing says where they lie: call ReplicateLoraParameters, which "
      "leaves layers that are split over ranks as they are");
}

}  // namespace

absl::Status ReplicateLoraParameters(torch::nn::Module& model,
                                     std::shared_ptr<const DeviceMesh> mesh) {
  if (mesh == nullptr) {
    return absl::InvalidArgumentError(
        "adapters cannot be replicated over a null mesh");
  }
  const ParameterLayout layout = ParameterLayout::Replicated(std::move(mesh));
  const std::vector<NamedLoraLayer> layers = LoraLayers(model);
  std::vector<TrainedParameter> trained = ParametersOf(model, layers);
  std::vector<DistributedParameter> parameters;
  for (TrainedParameter& item : trained) {
    if (item.is_split) continue;
    parameters.push_back(
        {std::move(item.name), std::move(item.parameter), layout});
  }
  // What PiSSA and OLoRA took out of weights, and what they left. Each rank has
  // decomposed them itself, and another kind of processor rounds otherwise.
  std::vector<std::pair<at::Tensor, at::Tensor>> initial_factors;
  std::vector<DistributedParameter> residual_weights;
  for (const auto& [layer_name, layer] : layers) {
    for (const std::string& adapter : layer->adapter_names()) {
      const LoraAdapter initial = layer->InitialFactors(adapter);
      if (!initial.lora_A.defined()) continue;
      const at::Tensor weight = layer->state("weight");
      residual_weights.push_back(
          {absl::StrCat(layer_name, ".base_layer.weight"), weight, layout});
      for (const auto& [name, factor] : {std::pair("lora_A", initial.lora_A),
                                         std::pair("lora_B", initial.lora_B)}) {
        // Where the mesh's group can reach it.
        const at::Tensor copy = factor.to(weight.device());
        parameters.push_back(
            {absl::StrCat(layer_name, ".", name, " as it started"), copy,
             layout});
        initial_factors.emplace_back(factor, copy);
      }
    }
  }
  // Joined by a rank without adapters too, so that the others learn of it.
  LORA_RETURN_IF_ERROR(
      distributed::BroadcastParameters(*layout.mesh, parameters));
  for (const auto& [factor, copy] : initial_factors) factor.copy_(copy);
  // One by one, as a copy of all could be more than there is room for.
  for (const DistributedParameter& weight : residual_weights) {
    LORA_RETURN_IF_ERROR(
        distributed::BroadcastParameters(*layout.mesh, {weight}));
  }
  if (trained.empty()) {
    return absl::InvalidArgumentError(
        "the model has no LoRA adapter: call EnableLoraTraining first");
  }
  for (const auto& item : layers) {
    if (item.layer->is_adapted()) item.layer->set_replicated_layout(layout);
  }
  return absl::OkStatus();
}

std::vector<DistributedParameter> LoraParameters(const torch::nn::Module& model,
                                                 absl::string_view prefix) {
  Placed placed = PlacedParameters(model, prefix);
  if (const std::string problem = ProblemOf(placed); !problem.empty()) {
    config::InitLogger("trainer_lora.lora").Warning(problem);
  }
  return std::move(placed.parameters);
}

absl::StatusOr<int64_t> SyncReplicatedLoraGradients(
    const torch::nn::Module& model) {
  const Placed placed = PlacedParameters(model, /*prefix=*/"");
  if (std::string problem = ProblemOf(placed); !problem.empty()) {
    return absl::FailedPreconditionError(problem);
  }
  if (placed.parameters.empty()) return 0;
  return distributed::ReduceGradients(*placed.parameters[0].layout.mesh,
                                      placed.parameters);
}

}  // namespace trainer_lora::lora
