// What a loader asks for parameters that a checkpoint lacks.
//
//   MissingParameterInitializer zeros_for_gates =
//       [](absl::string_view name, at::IntArrayRef global_shape,
//          at::ScalarType dtype, const TensorSlice& slice)
//       -> std::optional<at::Tensor> {
//     if (!absl::StrContains(name, "gate_compress")) return std::nullopt;
//     return at::zeros(slice.sizes, dtype);
//   };
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_MISSING_PARAMETER_INITIALIZER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_MISSING_PARAMETER_INITIALIZER_H_

#include <functional>
#include <optional>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"
#include "distributed/tensor_slice.h"

namespace trainer_lora::distributed {

// Makes a slice of the parameter `name`, whose shape over all ranks is
// `global_shape`: a contiguous CPU tensor of shape `slice.sizes` and type
// `dtype`; or nothing if it does not know the name. Must give the same values
// for the same element on every rank, and be safe to call from several threads.
// Loaders ask with a slice of no elements (of a scalar: of its one element) to
// learn whether a name is known.
using MissingParameterInitializer = std::function<std::optional<at::Tensor>(
    absl::string_view name, at::IntArrayRef global_shape, at::ScalarType dtype,
    const TensorSlice& slice)>;

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_MISSING_PARAMETER_INITIALIZER_H_
