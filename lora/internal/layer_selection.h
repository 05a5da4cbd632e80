// The layers of a model that a configuration gives an adapter, and what is
// noteworthy about the choice.
#ifndef TRAINER_LORA_LORA_INTERNAL_LAYER_SELECTION_H_
#define TRAINER_LORA_LORA_INTERNAL_LAYER_SELECTION_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "lora/lora_adapter.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora::internal {

// A LoraLayer of a model.
struct LayerInModel {
  LoraLayer* layer;
  // Every name that the model has for it, in the model's order.
  std::vector<std::string> names;
};

// Every LoraLayer below `model`, not `model` itself, in the model's order. What
// is inside a LoraLayer belongs to it.
std::vector<LayerInModel> FindLoraLayers(const torch::nn::Module& model);

// A layer that will take an adapter of this LoRA rank and alpha.
struct SelectedLayer {
  LoraLayer* layer;
  std::vector<std::string> names;
  int64_t rank;
  double alpha;
};

struct LayerSelection {
  // At least one, in the model's order.
  std::vector<SelectedLayer> layers;
  // Each a sentence for the log.
  std::vector<std::string> warnings;
};

// A layer is selected if a target matches one of its names, no exclusion does,
// and one of its names is in a layer (block) to transform; of the patterns for
// ranks and alphas, the first counts that matches one of its names. `config` is
// enabled and valid. kFailedPrecondition if a layer has an adapter
// `adapter_name` already or is merged, if one of several adapters would start
// from the base weights, or one for a layer that shares its weight;
// kInvalidArgument, with what to do, for a name that is none of an adapter, if
// nothing is selected, or if a pattern for ranks or alphas has no effect.
absl::StatusOr<LayerSelection> SelectLayers(
    const torch::nn::Module& model, const config::LoraConfig& config,
    const std::vector<std::string>& architecture_exclusions,
    const std::string& adapter_name = kDefaultAdapter);

// Layers of a model, each with its name.
using NamedLayers = std::vector<std::pair<std::string, LoraLayer*>>;

// For layers whose weights will be written: kFailedPrecondition if something
// else of `model` lies in one of them, as with tied embeddings: the weight of
// another of the layers, or any parameter or buffer beside these. With both
// names and `problem`: what would go wrong, and the way out. A tensor with gaps
// between its elements, such as columns of another, counts by its first.
absl::Status CheckWeightsAreNotShared(const torch::nn::Module& model,
                                      const NamedLayers& layers,
                                      absl::string_view problem);

// The same for layers whose adapters start from their weights.
absl::Status CheckStartsAreNotShared(const torch::nn::Module& model,
                                     const NamedLayers& layers);

}  // namespace trainer_lora::lora::internal

#endif  // TRAINER_LORA_LORA_INTERNAL_LAYER_SELECTION_H_
