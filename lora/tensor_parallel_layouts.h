// How a model of parallel layers lies over the ranks: what a loader needs to
// give each of them its part, and a saver to gather the whole.
//
//   distributed::LoadCheckpointOptions options;
//   options.mesh = mesh;
//   options.layouts = TensorParallelLayouts(*model);
#ifndef TRAINER_LORA_LORA_TENSOR_PARALLEL_LAYOUTS_H_
#define TRAINER_LORA_LORA_TENSOR_PARALLEL_LAYOUTS_H_

#include "config/language_version.h"
#include "distributed/state_layout.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {

// An entry for each parameter and buffer that a LoraLayer of `model` says to be
// split or replicated over a mesh (LoraLayer::LayoutOf): those of its base
// layer, under the names that they have now, and those of its adapters, if it
// has any. A layer that the model has under several names has entries under the
// first. What else the model has is whole on every rank.
distributed::StateLayouts TensorParallelLayouts(const torch::nn::Module& model);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_TENSOR_PARALLEL_LAYOUTS_H_
