#include "lora/layer_replacement.h"

#include <map>
#include <set>
#include <utility>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "lora/target_matcher.h"
#include "torch/nn/modules/linear.h"

namespace trainer_lora::lora {
namespace {

config::Logger Log() { return config::InitLogger("trainer_lora.lora"); }

// Calls `visit(name, module)` for every module below `model`, under every name
// that it has there.
template <typename Visit>
void ForEachModule(const torch::nn::Module& model, const Visit& visit,
                   const std::string& prefix = "") {
  for (const auto& child : model.named_children()) {
    const std::string name =
        prefix.empty() ? child.key() : absl::StrCat(prefix, ".", child.key());
    visit(name, *child.value());
    ForEachModule(*child.value(), visit, name);
  }
}

// A layer that will take an adapter.
struct Selection {
  LoraLayer* layer;
  // Every name that the model has for it, in the model's order.
  std::vector<std::string> names;
  LoraAdapter adapter;
};

// What the targets select in a model.
struct Plan {
  std::vector<Selection> selections;
  // Linear layers of libtorch, which have no way to take an adapter.
  std::vector<std::string> stock_linear_names;
  // Targets that select nothing that can take an adapter.
  std::vector<std::string> unmatched_targets;
};

absl::StatusOr<Plan> SelectLayers(const torch::nn::Module& model,
                                  const TargetMatcher& matcher) {
  Plan plan;
  std::map<const LoraLayer*, size_t> index_of;
  std::set<std::string> matched_targets;
  std::vector<std::string> adapted_names;
  ForEachModule(model, [&](const std::string& name, torch::nn::Module& module) {
    auto* layer = dynamic_cast<LoraLayer*>(&module);
    if (layer != nullptr && layer->is_adapted()) adapted_names.push_back(name);
    if (!matcher.Selects(name)) return;
    if (layer == nullptr) {
      if (dynamic_cast<torch::nn::LinearImpl*>(&module) != nullptr) {
        plan.stock_linear_names.push_back(name);
      }
      return;
    }
    for (std::string& target : matcher.MatchingTargets(name)) {
      matched_targets.insert(std::move(target));
    }
    const auto [position, is_new] =
        index_of.emplace(layer, plan.selections.size());
    if (is_new) plan.selections.push_back({layer, {}, {}});
    plan.selections[position->second].names.push_back(name);
  });
  if (!adapted_names.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "LoRA training is enabled already: ", adapted_names.front(),
        adapted_names.size() == 1
            ? std::string()
            : absl::StrCat(" and ", adapted_names.size() - 1, " more"),
        " have an adapter; enable all targets in one call"));
  }
  for (const std::string& target : matcher.targets()) {
    if (matched_targets.count(target) == 0) {
      plan.unmatched_targets.push_back(target);
    }
  }
  return plan;
}

std::string AdviceOnStockLinear(const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 10;
  const size_t shown = std::min(names.size(), kMostNames);
  std::string list = absl::StrJoin(names.begin(), names.begin() + shown, ", ");
  if (shown < names.size()) {
    absl::StrAppend(&list, " and ", names.size() - shown, " more");
  }
  return absl::StrCat(
      list,
      ": torch::nn::Linear cannot take a LoRA adapter; declare the layer "
      "as trainer_lora::lora::ReplicatedLinear, which takes the same "
      "options and has the same state names");
}

// Where several names are on meta, one is enough to find the mistake.
std::optional<std::string> FirstMetaParameter(const torch::nn::Module& model) {
  for (const auto& item : model.named_parameters()) {
    if (item.value().is_meta()) return item.key();
  }
  return std::nullopt;
}

// Allocates and initializes the adapters, without touching the model.
absl::Status MakeAdapters(const LoraTrainingOptions& options, Plan& plan) {
  for (Selection& selection : plan.selections) {
    const std::string& name = selection.names.front();
    absl::StatusOr<LoraAdapter> adapter = selection.layer->EmptyAdapter(
        options.rank,
        options.alpha.value_or(static_cast<double>(options.rank)));
    if (!adapter.ok()) {
      return absl::Status(adapter.status().code(),
                          absl::StrCat(name, ": ", adapter.status().message()));
    }
    selection.adapter = *std::move(adapter);
    for (const auto& [suffix, factor] :
         {std::make_pair(".lora_A", selection.adapter.lora_A),
          std::make_pair(".lora_B", selection.adapter.lora_B)}) {
      if (factor.is_meta()) continue;  // the loader makes it
      factor.copy_(
          InitialLoraValue(options.initialization, name + suffix,
                           factor.sizes(), factor.scalar_type(),
                           distributed::TensorSlice::Whole(factor.sizes())));
    }
  }
  return absl::OkStatus();
}

// One entry for each state of each layer, under each of its names.
absl::StatusOr<distributed::KeyAliases> MakeAliases(const Plan& plan) {
  distributed::KeyAliases aliases;
  for (const Selection& selection : plan.selections) {
    std::vector<std::string> states;
    for (const auto& item : selection.layer->named_parameters()) {
      states.push_back(item.key());
    }
    for (const auto& item : selection.layer->named_buffers()) {
      states.push_back(item.key());
    }
    for (const std::string& name : selection.names) {
      for (const std::string& state : states) {
        LORA_RETURN_IF_ERROR(
            aliases.Add(absl::StrCat(name, ".", state),
                        absl::StrCat(name, ".base_layer.", state)));
      }
    }
  }
  return aliases;
}

std::map<std::string, std::string> AdapterParameterNames(const Plan& plan) {
  std::map<std::string, std::string> names;
  for (const Selection& selection : plan.selections) {
    for (const std::string& name : selection.names) {
      for (const char* suffix : {".lora_A", ".lora_B"}) {
        names[name + suffix] = selection.names.front() + suffix;
      }
    }
  }
  return names;
}

void WarnOfWeakPoints(const LoraTrainingOptions& options, const Plan& plan) {
  if (!plan.stock_linear_names.empty()) {
    Log().Warning(AdviceOnStockLinear(plan.stock_linear_names));
  }
  for (const std::string& target : plan.unmatched_targets) {
    Log().Warning(absl::StrCat("LoRA target '", target,
                               "' matches no layer that can take an adapter"));
  }
  for (const Selection& selection : plan.selections) {
    const int64_t full_rank = std::min(selection.layer->in_features(),
                                       selection.layer->out_features());
    if (options.rank > full_rank) {
      Log().Warning(absl::StrCat(selection.names.front(), ": the LoRA rank ",
                                 options.rank, " is larger than ", full_rank,
                                 ", the most that the layer can use"));
    }
  }
}

}  // namespace

absl::StatusOr<LoraTrainingOptions> LoraTrainingOptions::FromConfig(
    const config::LoraConfig& config) {
  if (!config.enable) {
    return absl::InvalidArgumentError(
        "the LoRA configuration is disabled: set lora.enable to true, or do "
        "not "
        "enable LoRA training for this role");
  }
  LORA_RETURN_IF_ERROR(config.Validate());
  LoraTrainingOptions options;
  options.rank = *config.rank;
  options.alpha = config.alpha;
  options.target_modules =
      config.target_modules.value_or(std::vector<std::string>());
  return options;
}

std::vector<NamedLoraLayer> LoraLayers(const torch::nn::Module& model) {
  std::vector<NamedLoraLayer> layers;
  std::set<const LoraLayer*> seen;
  ForEachModule(model, [&](const std::string& name, torch::nn::Module& module) {
    auto* layer = dynamic_cast<LoraLayer*>(&module);
    if (layer != nullptr && seen.insert(layer).second) {
      layers.push_back({name, layer});
    }
  });
  return layers;
}

absl::StatusOr<LoraTraining> EnableLoraTraining(
    torch::nn::Module& model, const LoraTrainingOptions& options) {
  if (options.rank <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the LoRA rank must be > 0, got ", options.rank));
  }
  LORA_ASSIGN_OR_RETURN(
      const TargetMatcher matcher,
      TargetMatcher::Create(options.target_modules, options.excluded_modules));
  LORA_ASSIGN_OR_RETURN(Plan plan, SelectLayers(model, matcher));
  if (plan.selections.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no layer that can take a LoRA adapter was found for the targets [",
        absl::StrJoin(matcher.targets(), ", "), "]",
        plan.stock_linear_names.empty()
            ? std::string()
            : absl::StrCat("; ",
                           AdviceOnStockLinear(plan.stock_linear_names))));
  }
  if (!options.prepare_for_fsdp) {
    if (const auto name = FirstMetaParameter(model)) {
      return absl::FailedPreconditionError(absl::StrCat(
          *name,
          " is on the meta device: enable with prepare_for_fsdp, load the "
          "base weights, then call FinalizeLoraTraining"));
    }
  }
  LORA_RETURN_IF_ERROR(MakeAdapters(options, plan));

  LoraTraining training;
  LORA_ASSIGN_OR_RETURN(training.checkpoint_key_aliases, MakeAliases(plan));
  training.missing_parameter_initializer = MakeLoraParameterInitializer(
      options.initialization, AdapterParameterNames(plan));

  // Nothing fails from here on.
  WarnOfWeakPoints(options, plan);
  for (const at::Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(false);
  }
  for (Selection& selection : plan.selections) {
    LORA_RETURN_IF_ERROR(selection.layer->AdoptAdapter(selection.adapter));
    training.layer_names.push_back(selection.names.front());
  }
  if (!options.prepare_for_fsdp) {
    LORA_RETURN_IF_ERROR(FinalizeLoraTraining(model).status());
  }
  Log().Info(absl::StrFormat(
      "Enabled LoRA training with rank=%d alpha=%g on %d layers", options.rank,
      plan.selections.front().adapter.alpha, plan.selections.size()));
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
  if (const auto name = FirstMetaParameter(model)) {
    return absl::FailedPreconditionError(
        absl::StrCat(*name,
                     " is still on the meta device: load the base weights with "
                     "the aliases and the missing-parameter initializer that "
                     "EnableLoraTraining returned"));
  }
  for (const at::Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(false);
  }
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
