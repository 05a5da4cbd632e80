// The factored norm against that of the dense sum.
#include "lora/dora.h"

#include <cstdint>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "gtest/gtest.h"

namespace trainer_lora::lora {
namespace {

at::Tensor DenseSquaredNorms(const at::Tensor& weight, const at::Tensor& a,
                             const at::Tensor& b, double scale) {
  return (weight.to(at::kDouble) +
          scale * at::matmul(b.to(at::kDouble), a.to(at::kDouble)))
      .square()
      .sum(1);
}

TEST(DoraTest, FactoredNormsAreThoseOfTheDenseSum) {
  at::manual_seed(1);
  for (const auto& [out, in, rank] :
       {std::tuple<int64_t, int64_t, int64_t>{7, 5, 2},
        {5, 7, 9},
        {1, 3, 1},
        {64, 33, 16}}) {
    const at::Tensor weight = at::randn({out, in}, at::kDouble);
    const at::Tensor a = at::randn({rank, in}, at::kDouble);
    const at::Tensor b = at::randn({out, rank}, at::kDouble);
    const at::Tensor norms = DoraSquaredNorms(weight, a, b, 0.75);
    EXPECT_EQ(norms.scalar_type(), at::kDouble);
    EXPECT_TRUE(
        at::allclose(norms, DenseSquaredNorms(weight, a, b, 0.75), 1e-12));
    EXPECT_TRUE(at::equal(
        norms, DoraSquaredNorms(weight, a, b, 0.75, SquaredRowNorms(weight))));
  }
}

TEST(DoraTest, NarrowWeightsGiveFloat32Norms) {
  at::manual_seed(1);
  const at::Tensor weight = at::randn({32, 48}).to(at::kBFloat16);
  const at::Tensor a = at::randn({4, 48}) * 0.1;
  const at::Tensor b = at::randn({32, 4}) * 0.1;
  const at::Tensor norms = DoraSquaredNorms(weight, a, b, 2);
  EXPECT_EQ(norms.scalar_type(), at::kFloat);
  // The product with the weight alone is rounded to bfloat16.
  EXPECT_TRUE(at::allclose(norms.to(at::kDouble),
                           DenseSquaredNorms(weight, a, b, 2), 1e-3));
}

TEST(DoraTest, ASumThatIsZeroHasNoNegativeNorm) {
  at::manual_seed(1);
  const at::Tensor a = at::randn({3, 50});
  const at::Tensor b = at::randn({40, 3});
  const at::Tensor norms = DoraSquaredNorms(-at::matmul(b, a), a, b, 1);
  EXPECT_TRUE((norms >= 0).all().item<bool>());
  EXPECT_LT(norms.max().item<float>(), 1e-3);
}

TEST(DoraTest, NoGradientFlowsThroughTheNorms) {
  const at::Tensor a = at::randn({3, 5}).requires_grad_();
  const at::Tensor b = at::randn({4, 3}).requires_grad_();
  EXPECT_FALSE(DoraSquaredNorms(at::randn({4, 5}), a, b, 1).requires_grad());
}

}  // namespace
}  // namespace trainer_lora::lora
