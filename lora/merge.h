// Adds the active adapters of a model to its base weights, and takes them out
// again:
//
//   LORA_RETURN_IF_ERROR(MergeAdapters(*model));
//   model->eval();  // A merged layer refuses to train.
//   ... // Validation at the base model's speed.
//   LORA_RETURN_IF_ERROR(UnmergeAdapters(*model));
#ifndef TRAINER_LORA_LORA_MERGE_H_
#define TRAINER_LORA_LORA_MERGE_H_

#include "absl/status/status.h"
#include "config/language_version.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// How adapters are merged.
struct MergeOptions {
  // Refuse sums that are infinite or NaN, as after an adapter that has
  // diverged. Reads each weight once more.
  bool check_finite = false;
};

// Adds the active adapters to the base weight of every layer that has one, in
// float32 (float64 for float64 weights), rounded once. Each rank merges what it
// holds, slices of layers that are split over ranks too, without a collective
// (but DoRA on a layer whose input is split, for its norms). The weights are
// kept meanwhile: base weights of merged layers take twice their memory. After
// an error the model is as it was:
//   kInvalidArgument     no layer has an active adapter
//   kFailedPrecondition  a layer is merged already, or its weight is of no
//                        floating point type, on the meta device, expanded or
//                        made in inference mode; a parameter or buffer of the
//                        model shares its memory, as tied embeddings do
//   kDataLoss            check_finite, and a sum is not finite
//   kResourceExhausted   no memory for the weights
absl::Status MergeAdapters(torch::nn::Module& model,
                           const MergeOptions& options = {});

// Gives every merged layer its base weight back, bit by bit: what was kept, not
// a difference. kFailedPrecondition if no layer is merged.
absl::Status UnmergeAdapters(torch::nn::Module& model);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_MERGE_H_
