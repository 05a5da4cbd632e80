// Which of a model's adapters are in use: one, a weighted sum, or none.
//
//   // Two adapters, the second of which trains with the first left alone:
//   LoraTrainingOptions options;
//   LORA_RETURN_IF_ERROR(
//       EnableLoraTraining(*model, style_config, options).status());
//   options.adapter_name = "subject";
//   LORA_RETURN_IF_ERROR(
//       EnableLoraTraining(*model, subject_config, options).status());
//   // Both at once:
//   LORA_RETURN_IF_ERROR(SetActiveAdapters(
//       *model, {{kDefaultAdapter, 0.7}, {"subject", 0.3}}));
//   {
//     // The base model, as the reference of a preference loss or the teacher
//     // of a distillation.
//     LORA_ASSIGN_OR_RETURN(auto base,
//                           ActiveAdaptersScope::Create(*model, {}));
//     reference = model->forward(input);
//   }
#ifndef TRAINER_LORA_LORA_ACTIVE_ADAPTERS_H_
#define TRAINER_LORA_LORA_ACTIVE_ADAPTERS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/language_version.h"
#include "lora/lora_adapter.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// Makes `active` the adapters that forward uses, on every layer that has one of
// them; the others compute with their base layer. None: the base model. The
// parameters of active adapters, and no others of adapters, require grad
// afterwards; the others lose their gradients, so that neither an optimizer nor
// a norm can meet an adapter that is not in use. Biases stay as they are.
// kNotFound for an adapter that no layer has, kInvalidArgument for one that is
// listed twice or whose weight is not finite, kFailedPrecondition for a merged
// model, and for anything but weight 1 of an adapter that has started from the
// base weights (PiSSA, OLoRA): what is left of these is not the base model. The
// model is then as it was.
absl::Status SetActiveAdapters(torch::nn::Module& model,
                               const std::vector<ActiveAdapter>& active);

// While one lives, forward uses other adapters; then what it used before. What
// requires grad stays as it is, and so do gradients. Scopes nest, and end in
// the opposite order. The model must live as long; meanwhile, it must neither
// take an adapter nor be merged or unmerged.
class ActiveAdaptersScope {
 public:
  // Errors as SetActiveAdapters().
  static absl::StatusOr<ActiveAdaptersScope> Create(
      const torch::nn::Module& model, const std::vector<ActiveAdapter>& active);

  ~ActiveAdaptersScope();
  ActiveAdaptersScope(ActiveAdaptersScope&&) = default;
  ActiveAdaptersScope& operator=(ActiveAdaptersScope&&) = delete;

 private:
  using Before = std::vector<std::pair<LoraLayer*, std::vector<ActiveAdapter>>>;
  explicit ActiveAdaptersScope(Before before) : before_(std::move(before)) {}

  Before before_;  // Empty once it was moved from.
};

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_ACTIVE_ADAPTERS_H_
