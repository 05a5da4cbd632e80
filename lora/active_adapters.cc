#include "lora/active_adapters.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "lora/layer_replacement.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

// A layer, and those of the adapters that it has.
struct Choice {
  LoraLayer* layer;
  std::vector<ActiveAdapter> active;
};

absl::StatusOr<std::vector<Choice>> Choose(
    const torch::nn::Module& model, const std::vector<ActiveAdapter>& active) {
  std::vector<Choice> choices;
  std::vector<bool> is_found(active.size(), false);
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    if (!item.layer->is_adapted()) continue;
    Choice choice{item.layer, {}};
    for (size_t i = 0; i < active.size(); ++i) {
      if (!item.layer->HasAdapter(active[i].name)) continue;
      is_found[i] = true;
      choice.active.push_back(active[i]);
    }
    choices.push_back(std::move(choice));
  }
  const auto missing = std::find(is_found.begin(), is_found.end(), false);
  if (missing != is_found.end()) {
    return absl::NotFoundError(
        absl::StrCat("no layer of the model has a LoRA adapter '",
                     active[missing - is_found.begin()].name, "'"));
  }
  return choices;
}

using Before = std::vector<std::pair<LoraLayer*, std::vector<ActiveAdapter>>>;

void Restore(const Before& before) {
  for (const auto& [layer, active] : before) {
    // They were active before.
    layer->SetActiveAdapters(active).IgnoreError();
  }
}

// Returns what was active before.
absl::StatusOr<Before> Activate(const std::vector<Choice>& choices) {
  Before before;
  for (const Choice& choice : choices) {
    std::vector<ActiveAdapter> was_active = choice.layer->active_adapters();
    if (absl::Status status = choice.layer->SetActiveAdapters(choice.active);
        !status.ok()) {
      Restore(before);
      return status;
    }
    before.emplace_back(choice.layer, std::move(was_active));
  }
  return before;
}

}  // namespace

absl::Status SetActiveAdapters(torch::nn::Module& model,
                               const std::vector<ActiveAdapter>& active) {
  LORA_ASSIGN_OR_RETURN(const std::vector<Choice> choices,
                        Choose(model, active));
  LORA_RETURN_IF_ERROR(Activate(choices).status());
  for (const Choice& choice : choices) {
    for (const std::string& name : choice.layer->adapter_names()) {
      const bool is_active = std::any_of(
          choice.active.begin(), choice.active.end(),
          [&name](const ActiveAdapter& a) { return a.name == name; });
      for (const auto& item : choice.layer->AdapterParameters(name)) {
        item.parameter.set_requires_grad(is_active);
        if (!is_active) item.parameter.mutable_grad().reset();
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<ActiveAdaptersScope> ActiveAdaptersScope::Create(
    const torch::nn::Module& model, const std::vector<ActiveAdapter>& active) {
  LORA_ASSIGN_OR_RETURN(const std::vector<Choice> choices,
                        Choose(model, active));
  LORA_ASSIGN_OR_RETURN(Before before, Activate(choices));
  return ActiveAdaptersScope(std::move(before));
}

ActiveAdaptersScope::~ActiveAdaptersScope() { Restore(before_); }

}  // namespace trainer_lora::lora
