#include "lora/merge.h"

#include <vector>

#include "config/internal/status_macros.h"
#include "lora/internal/layer_selection.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {

absl::Status MergeAdapters(torch::nn::Module& model,
                           const MergeOptions& options) {
  internal::NamedLayers active;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    if (!item.layer->active_adapters().empty()) {
      active.emplace_back(item.name, item.layer);
    }
  }
  if (active.empty()) {
    return absl::InvalidArgumentError(
        "no layer of the model has an active LoRA adapter to merge");
  }
  LORA_RETURN_IF_ERROR(internal::CheckWeightsAreNotShared(
      model, active,
      "merging would change it under the other too; give each a weight of its "
      "own, or leave the adapters unmerged"));
  std::vector<LoraLayer*> merged;
  for (const auto& [name, layer] : active) {
    const absl::Status status = layer->Merge(options.check_finite);
    if (!status.ok()) {
      for (LoraLayer* other : merged) other->Unmerge().IgnoreError();
      return status;
    }
    merged.push_back(layer);
  }
  return absl::OkStatus();
}

absl::Status UnmergeAdapters(torch::nn::Module& model) {
  bool is_merged = false;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    if (!item.layer->is_merged()) continue;
    is_merged = true;
    if (absl::Status status = item.layer->Unmerge(); !status.ok()) {
      return status;
    }
  }
  if (is_merged) return absl::OkStatus();
  return absl::FailedPreconditionError("no layer of the model is merged");
}

}  // namespace trainer_lora::lora
