#include "examples/sentence_encoder/retrieval.h"

#include <cmath>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"

namespace trainer_lora::examples {
namespace {

TEST(ContrastiveLossTest, IsTheCrossEntropyOfScaledCosines) {
  const at::Tensor queries =
      at::tensor({1., 0., 0.6, 0.8}, at::kDouble).view({2, 2});
  const at::Tensor candidates =
      at::tensor({0., 1., 1., 0.}, at::kDouble).view({2, 2});
  // Cosines: 0 (right) and 1 for the first query, 0.8 and 0.6 (right).
  const double expected = (std::log1p(std::exp(5 * (1 - 0.0))) +
                           std::log1p(std::exp(5 * (0.8 - 0.6)))) /
                          2;
  EXPECT_NEAR(ContrastiveLoss(queries, candidates, 5).item<double>(), expected,
              1e-12);
}

TEST(ContrastiveLossTest, ScalesByTwentyUnlessTold) {
  const at::Tensor points = at::eye(3, at::kDouble);
  EXPECT_NEAR(ContrastiveLoss(points, points).item<double>(),
              std::log1p(2 * std::exp(-20.)), 1e-12);
}

TEST(ContrastiveLossTest, HasNothingToChooseInABatchOfOne) {
  const at::Tensor point = at::ones({1, 1}, at::kDouble);
  EXPECT_EQ(ContrastiveLoss(point, point).item<double>(), 0);
}

TEST(EvaluateRetrievalTest, CountsFirstPlacesAndReciprocalRanks) {
  // Candidates on a quarter circle. The right one ranks first for the first
  // query, third for the second and second for the third.
  const at::Tensor candidates =
      at::tensor({1., 0., 0.6, 0.8, 0., 1.}, at::kFloat).view({3, 2});
  const at::Tensor queries =
      at::tensor({1., 0., -0.6, -0.8, 0.6, 0.8}, at::kFloat).view({3, 2});
  const RetrievalMetrics metrics = EvaluateRetrieval(queries, candidates);
  EXPECT_DOUBLE_EQ(metrics.recall_at_1, 1. / 3);
  EXPECT_DOUBLE_EQ(metrics.mean_reciprocal_rank, (1 + 1. / 3 + 1. / 2) / 3);
}

TEST(EvaluateRetrievalTest, FindsNothingWhenAllIsOnePoint) {
  const at::Tensor points = at::ones({4, 1}, at::kFloat);
  const RetrievalMetrics metrics = EvaluateRetrieval(points, points);
  EXPECT_EQ(metrics.recall_at_1, 0);
  EXPECT_EQ(metrics.mean_reciprocal_rank, 0.25);
}

TEST(RetrievalTest, RefusesDifferentNumbersOfQueriesAndCandidates) {
  EXPECT_THROW(EvaluateRetrieval(at::ones({2, 3}), at::ones({3, 3})),
               c10::Error);
  EXPECT_THROW(ContrastiveLoss(at::ones({2, 3}), at::ones({3, 3})), c10::Error);
}

}  // namespace
}  // namespace trainer_lora::examples
