// The parameters to train in groups of one learning rate and weight decay each,
// for an optimizer. With LoRA+ (Hayou et al., 2024, arXiv 2402.12354) lora_B
// learns faster than lora_A:
//
//   ParameterGroupOptions options;
//   options.learning_rate = 1e-4;
//   options.weight_decay = 0.01;
//   options.loraplus_lr_ratio = config.loraplus_lr_ratio.value_or(1);
//   LORA_ASSIGN_OR_RETURN(const std::vector<ParameterGroup> groups,
//                         LoraParameterGroups(*model, options));
//   torch::optim::AdamW optimizer(
//       OptimizerGroups(groups, torch::optim::AdamWOptions().eps(1e-6)));
//
// Schedulers multiply the rate of each group, which keeps the ratio.
#ifndef TRAINER_LORA_LORA_PARAMETER_GROUPS_H_
#define TRAINER_LORA_LORA_PARAMETER_GROUPS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "lora/layer_replacement.h"
#include "torch/optim/optimizer.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// What the groups' rates are made from.
struct ParameterGroupOptions {
  // Of lora_A; finite and not negative.
  double learning_rate = 1e-3;
  // Of matrices; finite and not negative.
  double weight_decay = 0;
  // The learning rate of lora_B over that of lora_A; positive and finite. 1: no
  // LoRA+.
  double loraplus_lr_ratio = 1;
};

// Parameters that are trained alike.
struct ParameterGroup {
  // lora_A, lora_B or no_decay.
  std::string name;
  // Of all parameters in the group.
  double learning_rate = 0;
  // Likewise.
  double weight_decay = 0;
  // At least one, in the model's order. Handles to the model's parameters.
  std::vector<NamedParameter> parameters = {};
};

// TrainableParameters(model), each in one group:
//
//   name      parameters                     learning rate  weight decay
//   lora_A    lora_A, and other matrices     learning_rate  weight_decay
//   lora_B    lora_B                         times ratio    weight_decay
//   no_decay  other vectors: biases, DoRA's  times ratio    0
//             magnitudes
//
// in this order, without groups that would be empty. The rates are those of
// PEFT's create_loraplus_optimizer, which decays magnitudes too, and has a
// group of another rate for the adapters of embeddings: here they are as other
// matrices.
// kInvalidArgument for options out of range; kFailedPrecondition if no
// parameter of the model requires grad.
absl::StatusOr<std::vector<ParameterGroup>> LoraParameterGroups(
    const torch::nn::Module& model, const ParameterGroupOptions& options);

// The groups for the constructor of an optimizer of libtorch, with its options
// `prototype` but for learning rate and weight decay. `Options` is
// torch::optim::AdamWOptions or another that has both.
template <typename Options>
std::vector<torch::optim::OptimizerParamGroup> OptimizerGroups(
    absl::Span<const ParameterGroup> groups, const Options& prototype) {
  std::vector<torch::optim::OptimizerParamGroup> optimizer_groups;
  for (const ParameterGroup& group : groups) {
    std::vector<at::Tensor> parameters;
    for (const NamedParameter& item : group.parameters) {
      parameters.push_back(item.parameter);
    }
    auto options = std::make_unique<Options>(prototype);
    options->lr(group.learning_rate).weight_decay(group.weight_decay);
    optimizer_groups.emplace_back(std::move(parameters), std::move(options));
  }
  return optimizer_groups;
}

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_PARAMETER_GROUPS_H_
