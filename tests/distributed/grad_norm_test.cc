#include "distributed/grad_norm.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::RunRanks;
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

// A vector over three kinds of placement: each of its values counts once.
TEST(DistributedClipGradNormTest, EachValueCountsOnceWhereverItLies) {
  RunRanks(4, [](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto mesh,
        DeviceMesh::Create(group, {{"data", 2}, {"tensor", 2}}));
    const auto parameter = [&](const std::vector<float>& gradient,
                               Placement data, Placement tensor) {
      return DistributedParameter{"p", ParameterWithGradient(gradient),
                                  ParameterLayout{mesh, {data, tensor}}};
    };
    const Placement replicated = Placement::Replicate();
    const Placement summed = Placement::Replicate(GradientReduction::kSum);
    const float tensor = static_cast<float>(rank % 2);
    const std::vector<DistributedParameter> parameters = {
        parameter({1, 2}, replicated, replicated),
        parameter({2}, replicated, summed),
        // [4, 6] in two shards, on both data ranks.
        parameter({4 + 2 * tensor}, replicated, Placement::Shard(0)),
        // [1, 2, 3, 4] in four.
        parameter({1.0f + rank}, Placement::Shard(0), Placement::Shard(0))};
    const double expected = std::sqrt(1 + 4 + 4 + 16 + 36 + 1 + 4 + 9 + 16.0);
    LORA_ASSERT_OK_AND_ASSIGN(const double norm,
                              ClipGradNorm(*mesh, parameters, 1.0));
    EXPECT_DOUBLE_EQ(norm, expected);
    EXPECT_FLOAT_EQ(parameters[2].parameter.grad().item<float>(),
                    (4 + 2 * tensor) / (expected + 1e-6));
  });
}

TEST(DistributedClipGradNormTest, OneRanksNanIsEveryRanksNan) {
  RunRanks(2, [](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(const auto mesh, DeviceMesh::Create(group));
    const std::vector<DistributedParameter> parameters = {
        {"p", ParameterWithGradient({rank == 0 ? std::nanf("") : 3.0f}),
         ParameterLayout{mesh, {Placement::Shard(0)}}}};
    LORA_ASSERT_OK_AND_ASSIGN(const double norm,
                              ClipGradNorm(*mesh, parameters, 1.0));
    EXPECT_FALSE(std::isfinite(norm));
    if (rank == 1) {
      EXPECT_EQ(parameters[0].parameter.grad().item<float>(), 3);
    }
  });
}

TEST(DistributedClipGradNormTest, AnErrorOnOneRankKeepsNobodyWaiting) {
  RunRanks(2, [](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(const auto mesh, DeviceMesh::Create(group));
    std::vector<DistributedParameter> parameters = {
        {"p", ParameterWithGradient({1}), ParameterLayout::Replicated(mesh)}};
    if (rank == 0) parameters[0].layout.mesh = nullptr;
    const absl::StatusOr<double> norm = ClipGradNorm(*mesh, parameters, 1.0);
    if (rank == 0) {
      EXPECT_THAT(norm, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("p does not lie on DeviceMesh")));
    } else {
      ASSERT_TRUE(norm.ok()) << norm.status();
      EXPECT_TRUE(std::isnan(*norm));
    }
  });
}

TEST(DistributedClipGradNormTest, ALayoutThatDoesNotFitKeepsNobodyWaiting) {
  struct Case {
    const char* name;
    std::vector<Placement> placements;
    std::vector<ShardedPart> parts;
    const char* message;
  };
  const Placement replicated = Placement::Replicate();
  const Placement rows = Placement::Shard(0);
  for (const Case& c : std::vector<Case>{
           {"too many placements",
            {replicated, replicated},
            {},
            "2 placements"},
           {"too few placements", {}, {}, "0 placements"},
           {"too few rows", {rows}, {{2, 1}, {4, 2}}, "must have 5 rows"},
           {"replicas of no shard", {replicated}, {{1, 2}}, "2 replicas"}}) {
    SCOPED_TRACE(c.name);
    RunRanks(2, [&](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
      LORA_ASSERT_OK_AND_ASSIGN(const auto mesh, DeviceMesh::Create(group));
      std::vector<DistributedParameter> parameters = {
          {"p", ParameterWithGradient({1}), ParameterLayout::Replicated(mesh)}};
      if (rank == 0) {
        parameters[0].layout = ParameterLayout{mesh, c.placements, c.parts};
      }
      const absl::StatusOr<double> norm = ClipGradNorm(*mesh, parameters, 1.0);
      if (rank == 0) {
        EXPECT_THAT(norm,
                    StatusIs(absl::StatusCode::kInvalidArgument,
                             AllOf(HasSubstr("p"), HasSubstr(c.message))));
      } else {
        ASSERT_TRUE(norm.ok()) << norm.status();
        EXPECT_TRUE(std::isnan(*norm));
      }
    });
  }
}

}  // namespace
}  // namespace trainer_lora::distributed
