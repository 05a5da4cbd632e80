#include "distributed/checkpoint/torch_dtype.h"

namespace trainer_lora::distributed {

at::ScalarType ToScalarType(TensorDtype dtype) {
  switch (dtype) {
    case TensorDtype::kF16:
      return at::kHalf;
    case TensorDtype::kBF16:
      return at::kBFloat16;
    case TensorDtype::kF32:
      return at::kFloat;
    case TensorDtype::kI64:
      return at::kLong;
  }
  return at::ScalarType::Undefined;
}

std::optional<TensorDtype> ToTensorDtype(at::ScalarType dtype) {
  for (const TensorDtype candidate : {TensorDtype::kF16, TensorDtype::kBF16,
                                      TensorDtype::kF32, TensorDtype::kI64}) {
    if (ToScalarType(candidate) == dtype) return candidate;
  }
  return std::nullopt;
}

}  // namespace trainer_lora::distributed
