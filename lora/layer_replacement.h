// Turns a model into one that trains LoRA adapters: the selected linear layers
// take an adapter, everything else is frozen.
//
// For a model whose base weights come from a checkpoint (the path for new
// trainers, and the only one for models on the meta device):
//
//   LoraTrainingOptions options;
//   options.rank = 16;
//   options.prepare_for_fsdp = true;
//   LORA_ASSIGN_OR_RETURN(LoraTraining training,
//                         EnableLoraTraining(*model, options));
//   // Load with training.checkpoint_key_aliases and
//   // training.missing_parameter_initializer
//   // (distributed/checkpoint/sharded_loader.h), then:
//   LORA_ASSIGN_OR_RETURN(int64_t layers, FinalizeLoraTraining(*model));
//   optimizer(TrainableParameters(*model)) ...
//
// For a model that has its weights already, one call without prepare_for_fsdp
// does all of it.
#ifndef TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_
#define TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "lora/lora_adapter.h"
#include "lora/parameter_initializer.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::config {
struct LoraConfig;
}  // namespace trainer_lora::config

namespace trainer_lora::lora {

struct LoraTrainingOptions {
  // rank, alpha and targets of an enabled `models.<role>.lora` block.
  // kInvalidArgument if the block is disabled or not valid.
  static absl::StatusOr<LoraTrainingOptions> FromConfig(
      const config::LoraConfig& config);

  // The LoRA rank; must be > 0.
  int64_t rank = 0;
  // Finite and > 0; nothing: the rank, so that the scaling is 1.
  std::optional<double> alpha;
  // Parts of module names (lora/target_matcher.h); empty: the defaults.
  std::vector<std::string> target_modules;
  // Modules whose name contains one of these are left alone.
  std::vector<std::string> excluded_modules;
  // True: base weights, and adapters with them, are loaded or made afterwards,
  // as for a model on the meta device; FinalizeLoraTraining() is then the
  // caller's to call. False: the model has its weights, and is ready to train
  // when the call returns.
  bool prepare_for_fsdp = false;
  // Seed and scope of the adapters' initial values.
  LoraInitialization initialization;
};

// What EnableLoraTraining() did, and what a loader needs to know of it.
struct LoraTraining {
  // The adapted layers in the model's order; a layer that the model has under
  // several names is listed once, under the first.
  std::vector<std::string> layer_names;
  // For each state of each adapted layer: X.weight -> X.base_layer.weight. A
  // shared layer has an alias for each of its names.
  distributed::KeyAliases checkpoint_key_aliases;
  // Makes the adapter parameters, which a base checkpoint lacks.
  distributed::MissingParameterInitializer missing_parameter_initializer;
};

// A parameter and its full, dotted name in the model.
struct NamedParameter {
  std::string name;
  at::Tensor parameter;
};

// A layer that can take an adapter, or has one, and its first name in the
// model.
struct NamedLoraLayer {
  std::string name;
  LoraLayer* layer;
};

// Every LoraLayer below `model`, each once, in the model's order; not `model`
// itself. The layers belong to the model.
std::vector<NamedLoraLayer> LoraLayers(const torch::nn::Module& model);

// Gives an adapter to every LoraLayer that a target selects and no exclusion,
// and freezes the rest. Adapter parameters require grad afterwards; those on a
// real device have their initial values. The model itself is never adapted.
//
// Modules of other types are passed over; where those are linear layers of
// libtorch, which cannot take an adapter, a warning names them, and where a
// target selects no layer, a warning names the target.
//
// Errors, all of which leave the model as it was:
//   kInvalidArgument     rank, alpha or a pattern is out of range, or no layer
//                        can take an adapter
//   kFailedPrecondition  a layer of the model has an adapter already; the model
//                        is on the meta device and prepare_for_fsdp is false
//   kResourceExhausted   no memory for the adapters
absl::StatusOr<LoraTraining> EnableLoraTraining(
    torch::nn::Module& model, const LoraTrainingOptions& options);

// After loading: freezes every parameter but the adapters', which start to
// require grad, and puts the model in train mode. Returns the number of adapted
// layers. Errors, which leave the model as it was:
//   kInvalidArgument     the model has no adapted layer
//   kFailedPrecondition  an adapted layer lacks a factor, or a parameter is
//                        still on the meta device
absl::StatusOr<int64_t> FinalizeLoraTraining(torch::nn::Module& model);

// The parameters that require grad, each once under its first name, in the
// model's order: what an optimizer should get. (torch::nn::Module::parameters()
// lists a shared layer's twice, and an optimizer would step them twice.)
std::vector<NamedParameter> TrainableParameters(const torch::nn::Module& model);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_
