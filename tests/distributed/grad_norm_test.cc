#include "distributed/grad_norm.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor ParameterWithGradient(const std::vector<float>& gradient) {
  at::Tensor parameter = at::zeros({static_cast<int64_t>(gradient.size())})
                             .set_requires_grad(true);
  parameter.mutable_grad() = at::tensor(gradient);
  return parameter;
}

TEST(ClipGradNormTest, ScalesToTheMaximumNormLikePyTorch) {
  const std::vector<at::Tensor> parameters = {ParameterWithGradient({3, 0}),
                                              ParameterWithGradient({-4})};
  LORA_ASSERT_OK_AND_ASSIGN(double norm, ClipGradNorm(parameters, 1.0));
  EXPECT_DOUBLE_EQ(norm, 5.0);
  const double coefficient = 1.0 / (5.0 + 1e-6);
  EXPECT_FLOAT_EQ(parameters[0].grad()[0].item<float>(), 3 * coefficient);
  EXPECT_FLOAT_EQ(parameters[0].grad()[1].item<float>(), 0);
  EXPECT_FLOAT_EQ(parameters[1].grad()[0].item<float>(), -4 * coefficient);
}

TEST(ClipGradNormTest, LeavesAGradientWithinTheNorm) {
  for (const double max_norm : {5.0, 6.0, kInfinity}) {
    SCOPED_TRACE(max_norm);
    const std::vector<at::Tensor> parameters = {ParameterWithGradient({3, 4})};
    LORA_ASSERT_OK_AND_ASSIGN(double norm, ClipGradNorm(parameters, max_norm));
    EXPECT_DOUBLE_EQ(norm, 5.0);
    EXPECT_TRUE(at::equal(parameters[0].grad(), at::tensor({3.0f, 4.0f})));
  }
}

TEST(ClipGradNormTest, SkipsParametersWithoutAGradient) {
  const std::vector<at::Tensor> parameters = {
      at::ones({3}).set_requires_grad(true), ParameterWithGradient({2})};
  LORA_ASSERT_OK_AND_ASSIGN(double norm, ClipGradNorm(parameters, 1.0));
  EXPECT_DOUBLE_EQ(norm, 2.0);
  EXPECT_FALSE(parameters[0].grad().defined());

  LORA_ASSERT_OK_AND_ASSIGN(double none, ClipGradNorm({}, 1.0));
  EXPECT_EQ(none, 0.0);
}

TEST(ClipGradNormTest, ReportsANormThatIsNotFiniteAndScalesNothing) {
  for (const float bad : {std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    SCOPED_TRACE(bad);
    const std::vector<at::Tensor> parameters = {ParameterWithGradient({bad}),
                                                ParameterWithGradient({8})};
    LORA_ASSERT_OK_AND_ASSIGN(double norm, ClipGradNorm(parameters, 1.0));
    EXPECT_FALSE(std::isfinite(norm));
    EXPECT_EQ(parameters[1].grad().item<float>(), 8);
  }
}

// The squares of these overflow float32, the sum of the others underflows it.
TEST(ClipGradNormTest, SumsInDoublePrecision) {
  for (const float value : {1e30f, 1e-30f}) {
    SCOPED_TRACE(value);
    const std::vector<at::Tensor> parameters = {
        ParameterWithGradient({value, value, value, value})};
    LORA_ASSERT_OK_AND_ASSIGN(double norm, ClipGradNorm(parameters, kInfinity));
    EXPECT_DOUBLE_EQ(norm, 2.0 * value);
  }
}

TEST(ClipGradNormTest, RefusesAMaximumThatIsNotPositive) {
  for (const double max_norm :
       {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(
        ClipGradNorm({}, max_norm),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("max_norm")));
  }
}

}  // namespace
}  // namespace trainer_lora::distributed
