// Keeps the adapters of data-parallel ranks alike: they start from the same
// values, and every step averages their gradients.
//
//   LORA_RETURN_IF_ERROR(ReplicateLoraParameters(*model, mesh));  // once
//   for (...) {
//     loss.backward();
//     LORA_RETURN_IF_ERROR(SyncReplicatedLoraGradients(*model).status());
//     // clip, optimizer step, zero_grad
//   }
//
// A hook on each parameter would not do: it fires on ranks whose loss used the
// layer, and the ranks would then wait for each other with different tensors.
#ifndef TRAINER_LORA_LORA_LORA_GRADIENT_SYNC_H_
#define TRAINER_LORA_LORA_LORA_GRADIENT_SYNC_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// Declares the adapter parameters of `model`, and the biases that are trained
// with them, replicated over `mesh`, but for those whose layer is split over
// ranks, and gives every rank the values of the mesh's rank 0; with them the
// weights that PiSSA and OLoRA took a part out of, as ranks with different
// processors decompose them differently. Collective: every rank of the mesh
// calls it, after loading and before training. Errors, on every rank alike
// where the ranks disagree, after which the model is as it was; but where a
// peer is lost, some of these weights may have rank 0's values:
//   kInvalidArgument     `mesh` is null, or the model has no adapter
//   kFailedPrecondition  the ranks' adapters differ in name, shape or dtype, or
//                        one has no values yet (all that differs is named)
//   kUnavailable, kDeadlineExceeded  a peer is lost or does not answer
absl::Status ReplicateLoraParameters(
    torch::nn::Module& model,
    std::shared_ptr<const distributed::DeviceMesh> mesh);

// The adapter parameters of `model` that have a layout, in the model's order,
// and the biases that are trained with them, as distributed::GradientSync wants
// them. `prefix`, such as "student.", goes before each name: several models or
// roles can then share one GradientSync. A warning says if some have a layout
// and others none, as in a model with split layers that was not replicated.
std::vector<distributed::DistributedParameter> LoraParameters(
    const torch::nn::Module& model, absl::string_view prefix = "");

// Completes the gradient of every adapter parameter that requires grad, as its
// layout says: the average over its mesh, for one that was replicated. A rank
// without the gradient contributes zeros and has it afterwards. Call it on
// every rank, after the backward passes of a step and before clipping.
// Averaging twice changes rounding alone, and gradients of a further
// micro-batch may be accumulated on top in between. Returns the number of
// parameters synchronized: 0, without a collective, for a model that was not
// replicated. Errors as above, and kFailedPrecondition where some parameters
// have a layout and others none; the gradients are then as they were.
//
// This plans and copies anew each time; a distributed::GradientSync of
// LoraParameters(model), made once, does neither.
absl::StatusOr<int64_t> SyncReplicatedLoraGradients(
    const torch::nn::Module& model);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LORA_GRADIENT_SYNC_H_
