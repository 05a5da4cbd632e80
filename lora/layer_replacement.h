// Turns a model into one that trains LoRA adapters: the selected linear layers
// take an adapter, everything else is frozen.
//
// For a model whose base weights come from a checkpoint (the path for new
// trainers, and the only one for models on the meta device):
//
//   config::LoraConfig config;  // or models.<role>.lora of a trainer's YAML
//   config.enable = true;
//   config.rank = 16;
//   LORA_ASSIGN_OR_RETURN(
//       LoraTraining training,
//       EnableLoraTraining(*model, config, {/*prepare_for_fsdp=*/true}));
//   // Load with training.checkpoint_key_aliases and
//   // training.missing_parameter_initializer
//   // (distributed/checkpoint/sharded_loader.h), then:
//   LORA_ASSIGN_OR_RETURN(int64_t layers, FinalizeLoraTraining(*model));
//   // TrainableParameters(*model) is for the optimizer.
//
// For a model that has its weights already, one call without prepare_for_fsdp
// does all of it.
#ifndef TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_
#define TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "lora/lora_adapter.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::config {
struct LoraConfig;
}  // namespace trainer_lora::config

namespace trainer_lora::lora {

// What EnableLoraTraining() takes beside the configuration.
struct LoraTrainingOptions {
  // True: base weights, and adapters with them, are loaded or made afterwards,
  // as for a model on the meta device; FinalizeLoraTraining() is then the
  // caller's to call. False: the model has its weights, and is ready to train
  // when the call returns.
  bool prepare_for_fsdp = false;
  // Empty, or the role: two roles with one seed then start differently.
  std::string initialization_scope;
  // Of the adapter: several may live on one model (lora/active_adapters.h), and
  // the new one alone is active afterwards, and trained. Not empty, no dots.
  std::string adapter_name = kDefaultAdapter;
  // What the model's architecture never adapts, whatever the configuration
  // says: modules whose name contains one of these, none of which is empty.
  std::vector<std::string> architecture_exclusions;
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

// A parameter of a model.
struct NamedParameter {
  std::string name;      // Full and dotted, such as blocks.0.to_q.lora_A.
  at::Tensor parameter;  // A handle to it.
};

// A layer of a model that can take an adapter, or has one.
struct NamedLoraLayer {
  std::string name;  // Full and dotted: the first that the model has for it.
  LoraLayer* layer;  // Not null; belongs to the model.
};

// Every LoraLayer below `model`, each once, in the model's order; not `model`
// itself, nor what is inside a LoraLayer, which belongs to it.
std::vector<NamedLoraLayer> LoraLayers(const torch::nn::Module& model);

// Gives an adapter to every LoraLayer that `config`, which must be enabled,
// selects, and freezes the rest. A layer is selected if one of its names is a
// target and none is excluded; the first pattern for ranks that matches one of
// its names gives it its LoRA rank, and likewise for alphas (alpha defaults to
// the layer's rank). Adapter parameters require grad afterwards; those on a
// real device have their initial values. What is frozen loses its gradient.
// The model itself is never adapted.
//
// Modules of other types are passed over; where those are linear layers of
// libtorch, which cannot take an adapter, a warning names them. So does one for
// a target that selects no layer, for an exclusion that matches none, and for a
// rank that is larger than the layer can use.
//
// Errors, all of which leave the model as it was:
//   kInvalidArgument     `config` or the adapter's name is not valid, `config`
//                        is disabled, no layer is selected, or a pattern for
//                        ranks or alphas has no effect
//   kFailedPrecondition  a layer of the model has an adapter of this name
//                        already, or is merged; the model is on the meta device
//                        and prepare_for_fsdp is false; DoRA, PiSSA or OLoRA on
//                        a layer that has no weight for it; PiSSA or OLoRA
//                        beside another adapter, on a weight that can't be
//                        written to (expanded, or made in inference mode), or
//                        on one whose memory is also that of another parameter
//                        or buffer, as tied embeddings have it; a bias that
//                        would be trained can't require grad
//   kUnimplemented       PiSSA or OLoRA on a layer that is split over ranks
//   kInternal            PiSSA could not decompose a weight: it has values that
//                        are not finite, mostly
//   kResourceExhausted   no memory for the adapters
//
// But for a peer that is lost while DoRA sums norms over ranks, and memory that
// runs out then, after which FinalizeLoraTraining() goes on.
absl::StatusOr<LoraTraining> EnableLoraTraining(
    torch::nn::Module& model, const config::LoraConfig& config,
    const LoraTrainingOptions& options = {});

// After loading: freezes every parameter but those of active adapters and the
// biases that are trained with them, which start to require grad; starts what
// starts from the base weights (LoraLayer::InitializeFromBase); and puts the
// model in train mode. What is frozen loses its gradient. Returns the number of
// layers with an active adapter. With DoRA on layers that are split over ranks
// along their input, collective over these. Errors, which leave the model as it
// was:
//   kInvalidArgument     no layer of the model has an active adapter
//   kFailedPrecondition  an adapted layer lacks a parameter or is merged, or a
//                        parameter is still on the meta device; one that would
//                        be trained is of an integer type or was made in
//                        inference mode; PiSSA or OLoRA on a weight that can't
//                        be written to, or that is tied
//   kInternal            PiSSA could not decompose a weight
//   kResourceExhausted   no memory for the start from the base weights
// But for a peer that is lost while DoRA sums norms over ranks, and memory that
// runs out then: the next call starts what has not started.
absl::StatusOr<int64_t> FinalizeLoraTraining(torch::nn::Module& model);

// The biases that are trained with an adapter, as its configuration's `bias`
// says, each once under its first name: those of the layers that have it, or
// all parameters of the model that are called bias.
std::vector<NamedParameter> TrainedBiases(
    const torch::nn::Module& model,
    absl::string_view adapter_name = kDefaultAdapter);

// The parameters that require grad, each once under its first name, in the
// model's order: what an optimizer should get. (torch::nn::Module::parameters()
// lists a shared layer's twice, and an optimizer would step them twice.)
std::vector<NamedParameter> TrainableParameters(const torch::nn::Module& model);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LAYER_REPLACEMENT_H_
