#include "distributed/checkpoint/torch_dtype.h"

#include <optional>

#include "c10/core/ScalarType.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed {

std::optional<at::ScalarType> ToScalarType(TensorDtype dtype) {
  switch (dtype) {
    case TensorDtype::kF4:
    case TensorDtype::kF6E2M3:
    case TensorDtype::kF6E3M2:
      return std::nullopt;
    case TensorDtype::kBool:
      return at::kBool;
    case TensorDtype::kU8:
      return at::kByte;
    case TensorDtype::kI8:
      return at::kChar;
    case TensorDtype::kF8E5M2:
      return at::kFloat8_e5m2;
    case TensorDtype::kF8E4M3:
      return at::kFloat8_e4m3fn;
    case TensorDtype::kF8E8M0:
      return at::kFloat8_e8m0fnu;
    case TensorDtype::kF8E4M3Fnuz:
      return at::kFloat8_e4m3fnuz;
    case TensorDtype::kF8E5M2Fnuz:
      return at::kFloat8_e5m2fnuz;
    case TensorDtype::kI16:
      return at::kShort;
    case TensorDtype::kU16:
      return at::kUInt16;
    case TensorDtype::kF16:
      return at::kHalf;
    case TensorDtype::kBF16:
      return at::kBFloat16;
    case TensorDtype::kI32:
      return at::kInt;
    case TensorDtype::kU32:
      return at::kUInt32;
    case TensorDtype::kF32:
      return at::kFloat;
    case TensorDtype::kC64:
      return at::kComplexFloat;
    case TensorDtype::kF64:
      return at::kDouble;
    case TensorDtype::kI64:
      return at::kLong;
    case TensorDtype::kU64:
      return at::kUInt64;
  }
  return std::nullopt;
}

std::optional<TensorDtype> ToTensorDtype(at::ScalarType dtype) {
  for (const TensorDtype candidate : AllTensorDtypes()) {
    if (ToScalarType(candidate) == dtype) return candidate;
  }
  return std::nullopt;
}

}  // namespace trainer_lora::distributed
