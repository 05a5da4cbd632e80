#include "lora/layer_replacement.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/meta_device.h"
#include "lora/internal/layer_selection.h"
#include "lora/parameter_initializer.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using internal::SelectedLayer;

config::Logger Log() { return config::InitLogger("trainer_lora.lora"); }

void Freeze(torch::nn::Module& model) {
  // By module: Module::parameters() would make every full name first.
  model.apply([](torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      parameter.set_requires_grad(false);
    }
  });
}

// Says what to do about a model that is on meta.
absl::Status CheckMaterialized(const torch::nn::Module& model,
                               absl::string_view advice) {
  const absl::Status status = distributed::CheckMaterialized(model);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), ": ", advice));
}

std::optional<at::ScalarType> DtypeOf(config::AdapterDtype dtype) {
  switch (dtype) {
    case config::AdapterDtype::kBase:
      return std::nullopt;
    case config::AdapterDtype::kFloat32:
      return at::kFloat;
    case config::AdapterDtype::kBFloat16:
      return at::kBFloat16;
    case config::AdapterDtype::kFloat16:
      return at::kHalf;
  }
  return std::nullopt;
}

// Allocates the adapter of one layer and, unless it is on meta, fills it with
// its initial values.
absl::StatusOr<LoraAdapter> MakeAdapter(const SelectedLayer& selected,
                                        const config::LoraConfig& config,
                                        const LoraInitialization& values) {
  const std::string& name = selected.names.front();
  LoraAdapterOptions options;
  options.layer_name = name;
  options.rank = selected.rank;
  options.alpha = selected.alpha;
  options.dropout = config.dropout;
  options.dtype = DtypeOf(config.adapter_dtype);
  absl::StatusOr<LoraAdapter> adapter = selected.layer->EmptyAdapter(options);
  if (!adapter.ok()) {
    return absl::Status(adapter.status().code(),
                        absl::StrCat(name, ": ", adapter.status().message()));
  }
  for (const auto& [suffix, factor] :
       {std::make_pair(".lora_A", adapter->lora_A),
        std::make_pair(".lora_B", adapter->lora_B)}) {
    if (factor.is_meta()) continue;  // The loader makes it.
    factor.copy_(InitialLoraValue(
        values, name + suffix, factor.sizes(), factor.scalar_type(),
        distributed::TensorSlice::Whole(factor.sizes())));
  }
  return adapter;
}

// One entry for each state of each layer, under each of its names.
absl::StatusOr<distributed::KeyAliases> MakeAliases(
    const std::vector<SelectedLayer>& layers) {
  distributed::KeyAliases aliases;
  for (const SelectedLayer& selected : layers) {
    std::vector<std::string> states;
    // Most layers have no children, and the walk below them is not free.
    const bool recurse = !selected.layer->children().empty();
    for (const auto& item : selected.layer->named_parameters(recurse)) {
      states.push_back(item.key());
    }
    for (const auto& item : selected.layer->named_buffers(recurse)) {
      states.push_back(item.key());
    }
    for (const std::string& name : selected.names) {
      for (const std::string& state : states) {
        LORA_RETURN_IF_ERROR(
            aliases.Add(absl::StrCat(name, ".", state),
                        absl::StrCat(name, ".base_layer.", state)));
      }
    }
  }
  return aliases;
}

// From each name of each adapter parameter to the first.
std::map<std::string, std::string> AdapterParameterNames(
    const std::vector<SelectedLayer>& layers) {
  std::map<std::string, std::string> names;
  for (const SelectedLayer& selected : layers) {
    for (const std::string& name : selected.names) {
      for (const char* suffix : {".lora_A", ".lora_B"}) {
        names[name + suffix] = selected.names.front() + suffix;
      }
    }
  }
  return names;
}

void WarnOfLargeRanks(const std::vector<SelectedLayer>& layers) {
  for (const SelectedLayer& selected : layers) {
    const int64_t full_rank =
        std::min(selected.layer->in_features(), selected.layer->out_features());
    if (selected.rank > full_rank) {
      Log().Warning(absl::StrCat(selected.names.front(), ": the LoRA rank ",
                                 selected.rank, " is larger than ", full_rank,
                                 ", the most that the layer can use"));
    }
  }
}

}  // namespace

std::vector<NamedLoraLayer> LoraLayers(const torch::nn::Module& model) {
  std::vector<NamedLoraLayer> layers;
  for (internal::LayerInModel& item : internal::FindLoraLayers(model)) {
    layers.push_back({std::move(item.names.front()), item.layer});
  }
  return layers;
}

absl::StatusOr<LoraTraining> EnableLoraTraining(
    torch::nn::Module& model, const config::LoraConfig& config,
    const LoraTrainingOptions& options) {
  if (!config.enable) {
    return absl::InvalidArgumentError(
        "the LoRA configuration is disabled: set lora.enable to true, or do "
        "not enable LoRA training for this role");
  }
  LORA_RETURN_IF_ERROR(config.Validate());
  LORA_ASSIGN_OR_RETURN(
      const internal::LayerSelection selection,
      internal::SelectLayers(model, config, options.architecture_exclusions));
  if (!options.prepare_for_fsdp) {
    LORA_RETURN_IF_ERROR(CheckMaterialized(
        model,
        "enable with prepare_for_fsdp, load the base weights, then call "
        "FinalizeLoraTraining"));
  }
  const LoraInitialization initialization{static_cast<uint64_t>(config.seed),
                                          options.initialization_scope,
                                          config.initialization};
  std::vector<LoraAdapter> adapters;
  for (const SelectedLayer& selected : selection.layers) {
    LORA_ASSIGN_OR_RETURN(LoraAdapter adapter,
                          MakeAdapter(selected, config, initialization));
    adapters.push_back(std::move(adapter));
  }
  LoraTraining training;
  LORA_ASSIGN_OR_RETURN(training.checkpoint_key_aliases,
                        MakeAliases(selection.layers));
  training.missing_parameter_initializer = MakeLoraParameterInitializer(
      initialization, AdapterParameterNames(selection.layers));

  // Nothing fails from here on.
  for (const std::string& warning : selection.warnings) Log().Warning(warning);
  WarnOfLargeRanks(selection.layers);
  Freeze(model);
  for (size_t i = 0; i < adapters.size(); ++i) {
    LORA_RETURN_IF_ERROR(selection.layers[i].layer->AdoptAdapter(adapters[i]));
    training.layer_names.push_back(selection.layers[i].names.front());
  }
  if (!options.prepare_for_fsdp) {
    LORA_RETURN_IF_ERROR(FinalizeLoraTraining(model).status());
  }
  Log().Info(absl::StrFormat(
      "Enabled LoRA training with rank=%d alpha=%g on %d layers", *config.rank,
      config.EffectiveAlpha(), selection.layers.size()));
  return training;
}

absl::StatusOr<int64_t> FinalizeLoraTraining(torch::nn::Module& model) {
  std::vector<at::Tensor> adapter_parameters;
  for (const auto& [name, layer] : LoraLayers(model)) {
    if (!layer->is_adapted()) continue;
    const at::Tensor lora_A = layer->lora_A();
    const at::Tensor lora_B = layer->lora_B();
    if (!lora_A.defined() || !lora_B.defined()) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " has lost its adapter parameter ",
                       lora_A.defined() ? "lora_B" : "lora_A"));
    }
    adapter_parameters.push_back(lora_A);
    adapter_parameters.push_back(lora_B);
  }
  if (adapter_parameters.empty()) {
    return absl::InvalidArgumentError(
        "no layer of the model has a LoRA adapter: call EnableLoraTraining "
        "before loading the base weights");
  }
  LORA_RETURN_IF_ERROR(CheckMaterialized(
      model,
      "load the base weights with the aliases and the missing-parameter "
      "initializer that EnableLoraTraining returned"));
  Freeze(model);
  for (const at::Tensor& parameter : adapter_parameters) {
    parameter.set_requires_grad(true);
  }
  model.train();
  return static_cast<int64_t>(adapter_parameters.size() / 2);
}

std::vector<NamedParameter> TrainableParameters(
    const torch::nn::Module& model) {
  std::vector<NamedParameter> parameters;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      parameters.push_back({item.key(), item.value()});
    }
  }
  return parameters;
}

}  // namespace trainer_lora::lora
