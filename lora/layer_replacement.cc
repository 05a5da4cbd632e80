#include "lora/layer_replacement.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "c10/core/InferenceMode.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/meta_device.h"
#include "lora/internal/layer_selection.h"
#include "lora/parameter_initializer.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using internal::SelectedLayer;

config::Logger Log() { return config::InitLogger("trainer_lora.lora"); }

// The tensors that are trained, and their names.
using Trained = std::map<const c10::TensorImpl*, std::string>;

void Add(const std::string& name, const at::Tensor& tensor, Trained& trained) {
  trained.emplace(tensor.unsafeGetTensorImpl(), name);
}

// kFailedPrecondition, which names it, if a parameter of the model that is
// `trained` can't require grad.
absl::Status CheckCanTrain(const Trained& trained,
                           const torch::nn::Module& model) {
  absl::Status status;
  if (trained.empty()) return status;
  model.apply([&](const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      const auto found = trained.find(parameter.unsafeGetTensorImpl());
      if (found == trained.end()) continue;
      std::string problem;
      if ((!parameter.is_floating_point() && !parameter.is_complex()) ||
          parameter.element_size() == 1) {  // A float8.
        problem =
            absl::StrCat("is of type ", c10::toString(parameter.scalar_type()));
      } else if (parameter.is_inference() &&
                 !c10::InferenceMode::is_enabled()) {
        problem = "was made in inference mode";
      } else {
        continue;
      }
      status.Update(absl::FailedPreconditionError(absl::StrCat(
          found->second, " can't be trained, as it ", problem, ": replace it",
          absl::EndsWith(found->second, ".bias")
              ? ", or leave it out by lora.bias or "
                "lora.exclude_modules"
              : "")));
    }
  });
  return status;
}

// Freezes what is not `trained`. A gradient that stayed would be in norms, and
// in the steps of an optimizer that has the parameter.
void TrainOnly(const Trained& trained, torch::nn::Module& model) {
  // By module: Module::parameters() would make every full name first.
  model.apply([&](torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      const bool trains = trained.count(parameter.unsafeGetTensorImpl()) > 0;
      parameter.set_requires_grad(trains);
      if (!trains) parameter.mutable_grad().reset();
    }
  });
}

// The parameters of a model that are called bias, each once.
std::vector<NamedParameter> BiasesOf(const torch::nn::Module& model) {
  std::vector<NamedParameter> biases;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : model.named_parameters()) {
    const bool is_bias =
        item.key() == "bias" || absl::EndsWith(item.key(), ".bias");
    if (is_bias && seen.insert(item.value().unsafeGetTensorImpl()).second) {
      biases.push_back({item.key(), item.value()});
    }
  }
  return biases;
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

// The initial value of this rank's part of a parameter.
at::Tensor InitialValueOf(const LoraLayer& layer,
                          const LoraInitialization& values,
                          const std::string& full_name,
                          const std::string& state_name, int64_t rank,
                          const at::Tensor& parameter) {
  const auto value_of = [&](at::IntArrayRef global_shape,
                            const distributed::TensorSlice& slice) {
    return InitialLoraValue(values, full_name, global_shape,
                            parameter.scalar_type(), slice);
  };
  const auto layout = layer.LayoutOf(state_name, rank);
  if (!layout.has_value()) {
    return value_of(parameter.sizes(),
                    distributed::TensorSlice::Whole(parameter.sizes()));
  }
  std::vector<at::Tensor> parts;
  for (const auto& slice : layout->SlicesOf(layout->layout.mesh->rank())) {
    parts.push_back(value_of(layout->global_shape, slice));
  }
  return at::cat(parts);
}

// Allocates the adapter of one layer and, unless it is on meta, fills it with
// its initial values.
absl::StatusOr<LoraAdapter> MakeAdapter(const SelectedLayer& selected,
                                        const config::LoraConfig& config,
                                        const std::string& adapter_name,
                                        const LoraInitialization& values) {
  const std::string& name = selected.names.front();
  LoraAdapterOptions options;
  options.layer_name = name;
  options.rank = selected.rank;
  options.alpha = selected.alpha;
  options.dropout = config.dropout;
  options.dtype = DtypeOf(config.adapter_dtype);
  options.use_rslora = config.use_rslora;
  options.use_dora = config.use_dora;
  options.initialization = config.initialization;
  options.bias = config.bias;
  absl::StatusOr<LoraAdapter> adapter = selected.layer->EmptyAdapter(options);
  if (!adapter.ok()) {
    return absl::Status(adapter.status().code(),
                        absl::StrCat(name, ": ", adapter.status().message()));
  }
  const at::Tensor parameters[] = {adapter->lora_A, adapter->lora_B,
                                   adapter->lora_magnitude};
  const auto names =
      selected.layer->AdapterParameterNames(adapter_name, options.use_dora);
  LORA_RETURN_IF_ERROR(distributed::internal::GuardedStep(name, [&] {
    for (size_t i = 0; i < names.size(); ++i) {
      if (parameters[i].is_meta()) continue;  // The loader makes it.
      const auto& [state_name, path] = names[i];
      parameters[i].copy_(
          InitialValueOf(*selected.layer, values, absl::StrCat(name, ".", path),
                         state_name, options.rank, parameters[i]));
    }
    return absl::OkStatus();
  }));
  return adapter;
}

// One entry for each state of each layer, under each of its names.
absl::StatusOr<distributed::KeyAliases> MakeAliases(
    const std::vector<SelectedLayer>& layers) {
  distributed::KeyAliases aliases;
  for (const SelectedLayer& selected : layers) {
    const std::vector<std::string> states = selected.layer->base_state_names();
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
    const std::vector<SelectedLayer>& layers, const std::string& adapter_name,
    bool use_dora) {
  std::map<std::string, std::string> names;
  for (const SelectedLayer& selected : layers) {
    for (const auto& [state_name, parameter] :
         selected.layer->AdapterParameterNames(adapter_name, use_dora)) {
      for (const std::string& name : selected.names) {
        names[absl::StrCat(name, ".", parameter)] =
            absl::StrCat(selected.names.front(), ".", parameter);
      }
    }
  }
  return names;
}

// The whole shape of a parameter.
std::vector<int64_t> GlobalShape(const LoraLayer& layer, const char* name,
                                 const std::vector<int64_t>& local_shape,
                                 int64_t rank) {
  const auto layout = layer.LayoutOf(name, rank);
  return layout ? layout->global_shape : local_shape;
}

void WarnOfLargeRanks(const std::vector<SelectedLayer>& layers) {
  for (const SelectedLayer& selected : layers) {
    const auto shapes = selected.layer->adapter_shapes(selected.rank);
    const auto names = selected.layer->factor_names();
    const std::vector<int64_t> a = GlobalShape(*selected.layer, names.lora_A,
                                               shapes.lora_A, selected.rank);
    const std::vector<int64_t> b = GlobalShape(*selected.layer, names.lora_B,
                                               shapes.lora_B, selected.rank);
    const int64_t out_features = b[0];
    // The LoRA rank, or the part of it that each group of a convolution has.
    const int64_t columns = c10::multiply_integers(b.begin() + 1, b.end());
    const int64_t full_rank =
        std::min(out_features, c10::multiply_integers(a) / columns);
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
      internal::SelectLayers(model, config, options.architecture_exclusions,
                             options.adapter_name));
  if (!options.prepare_for_fsdp) {
    LORA_RETURN_IF_ERROR(CheckMaterialized(
        model,
        "enable with prepare_for_fsdp, load the base weights, then call "
        "FinalizeLoraTraining"));
  }
  Trained biases;
  if (config.bias == config::BiasTraining::kAll) {
    for (const auto& [name, bias] : BiasesOf(model)) Add(name, bias, biases);
  } else if (config.bias == config::BiasTraining::kLoraOnly) {
    for (const SelectedLayer& selected : selection.layers) {
      Add(absl::StrCat(selected.names.front(), ".bias"),
          selected.layer->state("bias"), biases);
    }
  }
  LORA_RETURN_IF_ERROR(CheckCanTrain(biases, model));
  const LoraInitialization initialization{static_cast<uint64_t>(config.seed),
                                          options.initialization_scope,
                                          config.initialization};
  std::vector<LoraAdapter> adapters;
  std::vector<LoraAdapter> factors_from_base;
  for (const SelectedLayer& selected : selection.layers) {
    LORA_ASSIGN_OR_RETURN(
        LoraAdapter adapter,
        MakeAdapter(selected, config, options.adapter_name, initialization));
    LoraAdapter factors;
    if (!options.prepare_for_fsdp) {
      LORA_ASSIGN_OR_RETURN(factors, selected.layer->FactorsFromBase(adapter));
    }
    adapters.push_back(std::move(adapter));
    factors_from_base.push_back(std::move(factors));
  }
  LoraTraining training;
  LORA_ASSIGN_OR_RETURN(training.checkpoint_key_aliases,
                        MakeAliases(selection.layers));
  training.missing_parameter_initializer = MakeLoraParameterInitializer(
      initialization,
      AdapterParameterNames(selection.layers, options.adapter_name,
                            config.use_dora));

  // Nothing fails from here on, but for sums of DoRA's norms over ranks.
  for (const std::string& warning : selection.warnings) Log().Warning(warning);
  WarnOfLargeRanks(selection.layers);
  TrainOnly({}, model);
  for (const auto& item : LoraLayers(model)) {
    LORA_RETURN_IF_ERROR(item.layer->SetActiveAdapters({}));
  }
  for (size_t i = 0; i < adapters.size(); ++i) {
    LoraLayer& layer = *selection.layers[i].layer;
    LORA_RETURN_IF_ERROR(layer.AdoptAdapter(adapters[i], options.adapter_name));
    if (factors_from_base[i].lora_A.defined()) {
      LORA_RETURN_IF_ERROR(layer.InitializeFromBase(factors_from_base[i]));
    }
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
  internal::NamedLayers adapted;
  int64_t num_active = 0;
  std::set<std::string> adapter_names;
  Trained trained;
  for (const auto& [name, layer] : LoraLayers(model)) {
    if (!layer->is_adapted()) continue;
    if (layer->is_merged()) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " is merged: unmerge it before it is trained"));
    }
    for (const ActiveAdapter& active : layer->active_adapters()) {
      adapter_names.insert(active.name);
      for (const auto& item : layer->AdapterParameters(active.name)) {
        if (!item.parameter.defined()) {
          return absl::FailedPreconditionError(absl::StrCat(
              name, " has lost its adapter parameter ", item.name));
        }
        Add(absl::StrCat(name, ".", item.name), item.parameter, trained);
      }
    }
    adapted.emplace_back(name, layer);
    if (!layer->active_adapters().empty()) ++num_active;
  }
  if (num_active == 0) {
    return absl::InvalidArgumentError(
        adapted.empty()
            ? "no layer of the model has a LoRA adapter: call "
              "EnableLoraTraining before loading the base weights"
            : "no LoRA adapter of the model is active: call SetActiveAdapters "
              "with those that are to be trained");
  }
  LORA_RETURN_IF_ERROR(CheckMaterialized(
      model,
      "load the base weights with the aliases and the missing-parameter "
      "initializer that EnableLoraTraining returned"));
  for (const std::string& adapter_name : adapter_names) {
    for (const auto& [name, bias] : TrainedBiases(model, adapter_name)) {
      Add(name, bias, trained);
    }
  }
  LORA_RETURN_IF_ERROR(CheckCanTrain(trained, model));
  // All are computed before one is written.
  std::vector<LoraAdapter> factors(adapted.size());
  internal::NamedLayers starting;
  for (size_t i = 0; i < adapted.size(); ++i) {
    LORA_ASSIGN_OR_RETURN(factors[i], adapted[i].second->FactorsFromBase());
    if (factors[i].lora_A.defined()) starting.push_back(adapted[i]);
  }
  if (!starting.empty()) {
    LORA_RETURN_IF_ERROR(internal::CheckStartsAreNotShared(model, starting));
  }
  for (size_t i = 0; i < adapted.size(); ++i) {
    LORA_RETURN_IF_ERROR(adapted[i].second->InitializeFromBase(factors[i]));
  }
  TrainOnly(trained, model);
  model.train();
  return num_active;
}

std::vector<NamedParameter> TrainedBiases(const torch::nn::Module& model,
                                          absl::string_view adapter_name) {
  std::vector<NamedParameter> of_layers;
  bool all = false;
  for (const auto& [name, layer] : LoraLayers(model)) {
    if (!layer->HasAdapter(adapter_name)) continue;
    const config::BiasTraining training =
        layer->adapter(adapter_name).options.bias;
    all = all || training == config::BiasTraining::kAll;
    const at::Tensor bias = layer->state("bias");
    if (training == config::BiasTraining::kLoraOnly && bias.defined()) {
      of_layers.push_back({absl::StrCat(name, ".base_layer.bias"), bias});
    }
  }
  return all ? BiasesOf(model) : of_layers;
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
