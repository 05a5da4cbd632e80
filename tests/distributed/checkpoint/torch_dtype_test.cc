#include "distributed/checkpoint/torch_dtype.h"

#include <map>
#include <optional>
#include <set>

#include "c10/core/ScalarType.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::UnorderedElementsAre;

TEST(TorchDtypeTest, MapsTheTypesOfThePythonLibrary) {
  // tests/parity/make_safetensors_fixture.py has the same pairs.
  const std::map<TensorDtype, at::ScalarType> pairs = {
      {TensorDtype::kBool, at::kBool},
      {TensorDtype::kU8, at::kByte},
      {TensorDtype::kI8, at::kChar},
      {TensorDtype::kF8E5M2, at::kFloat8_e5m2},
      {TensorDtype::kF8E4M3, at::kFloat8_e4m3fn},
      {TensorDtype::kF8E8M0, at::kFloat8_e8m0fnu},
      {TensorDtype::kF8E4M3Fnuz, at::kFloat8_e4m3fnuz},
      {TensorDtype::kF8E5M2Fnuz, at::kFloat8_e5m2fnuz},
      {TensorDtype::kI16, at::kShort},
      {TensorDtype::kU16, at::kUInt16},
      {TensorDtype::kF16, at::kHalf},
      {TensorDtype::kBF16, at::kBFloat16},
      {TensorDtype::kI32, at::kInt},
      {TensorDtype::kU32, at::kUInt32},
      {TensorDtype::kF32, at::kFloat},
      {TensorDtype::kC64, at::kComplexFloat},
      {TensorDtype::kF64, at::kDouble},
      {TensorDtype::kI64, at::kLong},
      {TensorDtype::kU64, at::kUInt64},
  };
  std::set<TensorDtype> unmapped;
  for (const TensorDtype dtype : AllTensorDtypes()) {
    SCOPED_TRACE(TensorDtypeName(dtype));
    const std::optional<at::ScalarType> mapped = ToScalarType(dtype);
    if (!mapped.has_value()) {
      unmapped.insert(dtype);
      continue;
    }
    EXPECT_EQ(*mapped, pairs.at(dtype));
    EXPECT_EQ(ToTensorDtype(*mapped), dtype);
    EXPECT_EQ(c10::elementSize(*mapped) * 8, TensorDtypeBits(dtype));
  }
  EXPECT_THAT(unmapped,
              UnorderedElementsAre(TensorDtype::kF4, TensorDtype::kF6E2M3,
                                   TensorDtype::kF6E3M2));
}

TEST(TorchDtypeTest, HasNothingForTypesThatFilesDoNotHave) {
  for (const at::ScalarType dtype :
       {at::kComplexDouble, at::kComplexHalf, at::kQInt8,
        at::ScalarType::Float4_e2m1fn_x2, at::ScalarType::Undefined}) {
    EXPECT_EQ(ToTensorDtype(dtype), std::nullopt) << c10::toString(dtype);
  }
}

}  // namespace
}  // namespace trainer_lora::distributed
