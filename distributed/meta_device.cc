#include "distributed/meta_device.h"

#include <cstddef>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/function_schema.h"
#include "ATen/core/jit_type.h"
#include "ATen/core/stack.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/DispatchKeySet.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "torch/library.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

// Libtorch has a dispatch key for deferring construction, above every other
// one that a factory function goes through, and leaves it unused.
constexpr c10::DispatchKey kMetaKey = c10::DispatchKey::DeferredInit;

bool IsMetaTensor(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().is_meta() &&
         value.toTensor().has_storage();
}

// Runs any operator with its device arguments replaced by meta.
void CallOnMeta(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    // Device or Device?.
    if (c10::DeviceObjType::get()->isSubtypeOf(*arguments[i].type())) {
      (*stack)[first + i] = c10::Device(c10::kMeta);
    }
  }
  {
    // What the operator itself creates is where its inputs are: a CPU kernel
    // could not use a buffer on meta.
    const c10::impl::ExcludeDispatchKeyGuard not_within(kMetaKey);
    op.redispatchBoxed(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kMetaKey),
        stack);
  }
  // The data pointer of a meta tensor is null: code that writes through it,
  // which a caller that did not ask for meta may well do, must not crash.
  for (size_t i = first; i < stack->size(); ++i) {
    if (IsMetaTensor((*stack)[i])) {
      (*stack)[i]
          .toTensor()
          .storage()
          .unsafeGetStorageImpl()
          ->set_throw_on_mutable_data_ptr();
    }
  }
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&CallOnMeta>());
}

absl::Status MaterializeError(absl::string_view message) {
  return absl::FailedPreconditionError(
      absl::StrCat("can't materialize a tensor ", message));
}

absl::Status Materialize(const at::Tensor& meta_tensor, const at::Tensor& value,
                         bool shape_fits) {
  if (!meta_tensor.is_meta()) {
    return MaterializeError("that is not on the meta device");
  }
  if (meta_tensor.grad().defined()) {
    return MaterializeError("that has a gradient already");
  }
  if (value.is_meta()) {
    return MaterializeError("with a value that is on the meta device itself");
  }
  if (value.is_inference()) {
    return MaterializeError("with a value that was made in inference mode");
  }
  if (!shape_fits || value.scalar_type() != meta_tensor.scalar_type()) {
    return MaterializeError(
        absl::StrCat("of shape ", c10::str(meta_tensor.sizes()), " and type ",
                     c10::toString(meta_tensor.scalar_type()),
                     " with a value of shape ", c10::str(value.sizes()),
                     " and type ", c10::toString(value.scalar_type())));
  }
  // Unlike set_data, this does not ask for the same kind of device; and it
  // leaves the tensor's autograd state alone.
  meta_tensor.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
  return absl::OkStatus();
}

}  // namespace

// Not inline: the fallback is linked in with it.
MetaDeviceGuard::MetaDeviceGuard() : guard_(kMetaKey) {}

absl::Status MaterializeInPlace(const at::Tensor& meta_tensor,
                                const at::Tensor& value) {
  return Materialize(meta_tensor, value, value.sizes() == meta_tensor.sizes());
}

absl::Status MaterializeShardInPlace(const at::Tensor& meta_tensor,
                                     const at::Tensor& shard) {
  return Materialize(meta_tensor, shard, shard.dim() == meta_tensor.dim());
}

absl::Status CheckMaterialized(const torch::nn::Module& model) {
  constexpr size_t kMostNames = 10;
  std::vector<std::string> names;
  size_t count = 0;
  const auto check = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.is_meta()) return;
    ++count;
    if (names.size() < kMostNames) names.push_back(name);
  };
  for (const auto& item : model.named_parameters()) {
    check(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) {
    check(item.key(), item.value());
  }
  if (count == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(absl::StrJoin(names, ", "),
                   count > names.size()
                       ? absl::StrCat(" and ", count - names.size(), " more")
                       : "",
                   count == 1 ? " is" : " are", " on the meta device"));
}

}  // namespace trainer_lora::distributed
