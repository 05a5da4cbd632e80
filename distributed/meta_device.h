// Builds models without memory for their parameters, and gives parameters
// their memory later.
//
//   std::shared_ptr<Transformer> model;
//   {
//     MetaDeviceGuard meta_device;
//     model = std::make_shared<Transformer>(config);  // Takes no memory.
//   }
//   for (at::Tensor parameter : model->parameters()) {
//     absl::Status status = MaterializeInPlace(
//         parameter, at::zeros(parameter.sizes(), parameter.dtype()));
//   }
//
// distributed/checkpoint/sharded_loader.h does the second part from a file.
#ifndef TRAINER_LORA_DISTRIBUTED_META_DEVICE_H_
#define TRAINER_LORA_DISTRIBUTED_META_DEVICE_H_

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::distributed {

// While one lives, every tensor that its thread makes with a factory function
// (empty, rand, ones_like, to) is on the meta device, whatever device the call
// asks for: it has shape and type, but no memory. Real tensors compute as ever.
// Initialization functions (torch::nn::init, uniform_, fill_) do nothing to a
// meta tensor, and draw nothing from a generator. Access to its elements by
// item() or by a mutable pointer throws c10::Error, and so does torch::tensor
// with a list of values. Guards nest.
class MetaDeviceGuard {
 public:
  MetaDeviceGuard();

  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard guard_;
};

// Gives `meta_tensor`, which is on the meta device, the memory, device and
// strides of `value`, without copying. Every handle to `meta_tensor` (a
// module's registered parameter and its typed member alike) sees the change;
// requires_grad stays as it is. `meta_tensor` must not have been used in a
// graph of autograd: one that has a gradient is refused. kFailedPrecondition,
// with nothing changed, for that, if `meta_tensor` is not on meta or `value`
// is, if `value` was made in inference mode, or if shape or dtype differ. Not
// safe while other threads use `meta_tensor`.
absl::Status MaterializeInPlace(const at::Tensor& meta_tensor,
                                const at::Tensor& value);

// The same, with a part of the tensor, whose shape becomes that of `shard`. It
// may differ in every dimension, but not in their number.
absl::Status MaterializeShardInPlace(const at::Tensor& meta_tensor,
                                     const at::Tensor& shard);

// Ok if every parameter and buffer of `model` has memory; else
// kFailedPrecondition with the names of those on the meta device (ten at most).
// For code that is about to use a model: many operators take a tensor on meta
// without a word, and their result has no values.
absl::Status CheckMaterialized(const torch::nn::Module& model);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_META_DEVICE_H_
