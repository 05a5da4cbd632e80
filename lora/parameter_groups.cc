#include "lora/parameter_groups.h"

#include <cmath>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::lora {
namespace {

absl::Status CheckNotNegative(absl::string_view name, double value) {
  if (std::isfinite(value) && value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " must be a number from 0 on, got ", value));
}

absl::Status CheckOptions(const ParameterGroupOptions& options) {
  LORA_RETURN_IF_ERROR(
      CheckNotNegative("learning_rate", options.learning_rate));
  LORA_RETURN_IF_ERROR(CheckNotNegative("weight_decay", options.weight_decay));
  const double ratio = options.loraplus_lr_ratio;
  if (std::isfinite(ratio) && ratio > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("loraplus_lr_ratio must be a positive number, got ", ratio));
}

absl::string_view LastComponent(absl::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

absl::StatusOr<std::vector<ParameterGroup>> LoraParameterGroups(
    const torch::nn::Module& model, const ParameterGroupOptions& options) {
  LORA_RETURN_IF_ERROR(CheckOptions(options));
  const double fast_rate = options.learning_rate * options.loraplus_lr_ratio;
  ParameterGroup lora_A{"lora_A", options.learning_rate, options.weight_decay};
  ParameterGroup lora_B{"lora_B", fast_rate, options.weight_decay};
  ParameterGroup no_decay{"no_decay", fast_rate, 0};
  for (NamedParameter& item : TrainableParameters(model)) {
    // A factor is one in whatever shape it is sharded.
    const absl::string_view last = LastComponent(item.name);
    ParameterGroup& group = last == "lora_B" ? lora_B
                            : last == "lora_A" || item.parameter.dim() > 1
                                ? lora_A
                                : no_decay;
    group.parameters.push_back(std::move(item));
  }

  std::vector<ParameterGroup> groups;
  for (ParameterGroup* group : {&lora_A, &lora_B, &no_decay}) {
    if (!group->parameters.empty()) groups.push_back(std::move(*group));
  }
  if (groups.empty()) {
    return absl::FailedPreconditionError(
        "no parameter of the model requires grad; call EnableLoraTraining() or "
        "FinalizeLoraTraining() first");
  }
  return groups;
}

}  // namespace trainer_lora::lora
