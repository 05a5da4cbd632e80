#include "distributed/gradient_sync.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/operator_log.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::OperatorLog;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using Parameters = std::vector<DistributedParameter>;

// RunRanks with a mesh over each rank's group.
void RunMeshRanks(
    int world_size, const std::function<void(int rank, MeshPtr mesh)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  RunRanks(
      world_size,
      [&body](int rank, GroupPtr group) {
        LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh,
                                  DeviceMesh::Create(std::move(group)));
        body(rank, std::move(mesh));
      },
      timeout);
}

// A replicated parameter of zeros that requires grad.
DistributedParameter Replicated(const MeshPtr& mesh, const std::string& name,
                                at::IntArrayRef shape,
                                at::ScalarType dtype = at::kFloat) {
  return {name, at::zeros(shape, dtype).set_requires_grad(true),
          ParameterLayout::Replicated(mesh)};
}

void SetGradient(const DistributedParameter& parameter, at::Tensor gradient) {
  parameter.parameter.mutable_grad() = std::move(gradient);
}

const at::Tensor& Gradient(const DistributedParameter& parameter) {
  return parameter.parameter.grad();
}

// The gradient of parameter `i` on `rank`: no two ranks or parameters have the
// same, and the values use the whole mantissa. Undefined for some.
at::Tensor ExampleGradient(int rank, int i, at::IntArrayRef shape) {
  if ((rank + i) % 3 == 2) return at::Tensor();
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) + 100 * rank + i)
      .to(at::kFloat)
      .view(shape);
}

TEST(ReduceGradientsTest, ZeroFillsTheRankWithoutAGradient) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "q.lora_A", {1})};
    if (rank == 0) SetGradient(parameters[0], at::tensor({4.0f}));
    LORA_ASSERT_OK_AND_ASSIGN(int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 1);
    ASSERT_TRUE(Gradient(parameters[0]).defined());
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 2.0f);
  });
}

TEST(ReduceGradientsTest, AllRanksWithoutAGradientGetZeros) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "q.lora_A", {2, 3})};
    LORA_ASSERT_OK_AND_ASSIGN(int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 1);
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::zeros({2, 3})));
  });
}

TEST(ReduceGradientsTest, AccumulatesOnTopOfWhatWasSynchronized) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "q.lora_A", {2})};
    SetGradient(parameters[0], at::full({2}, rank == 0 ? 1.0f : 3.0f));
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));

    // The backward pass of a second micro-batch.
    parameters[0].parameter.sum().mul(rank == 0 ? 2.0f : 4.0f).backward();
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 5.0f)));

    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 5.0f)))
        << "a second call must change nothing";
  });
}

TEST(ReduceGradientsTest, IsTheMeanOnWorldsOfOneToFour) {
  const std::vector<std::vector<int64_t>> shapes = {
      {8, 16}, {16, 8}, {}, {0, 3}, {5}, {1000, 7}};
  for (int world_size = 1; world_size <= 4; ++world_size) {
    SCOPED_TRACE(world_size);
    std::vector<std::vector<at::Tensor>> results(world_size);
    RunMeshRanks(world_size, [&](int rank, MeshPtr mesh) {
      Parameters parameters;
      for (int i = 0; i < shapes.size(); ++i) {
        parameters.push_back(
            Replicated(mesh, "p" + std::to_string(i), shapes[i]));
        SetGradient(parameters[i], ExampleGradient(rank, i, shapes[i]));
      }
      LORA_ASSERT_OK_AND_ASSIGN(int64_t count,
                                ReduceGradients(*mesh, parameters));
      EXPECT_EQ(count, shapes.size());
      for (const DistributedParameter& parameter : parameters) {
        results[rank].push_back(Gradient(parameter));
      }
    });

    for (int i = 0; i < shapes.size(); ++i) {
      SCOPED_TRACE(i);
      at::Tensor mean = at::zeros(shapes[i], at::kDouble);
      for (int rank = 0; rank < world_size; ++rank) {
        const at::Tensor gradient = ExampleGradient(rank, i, shapes[i]);
        if (gradient.defined()) mean += gradient.to(at::kDouble) / world_size;
      }
      for (int rank = 0; rank < world_size; ++rank) {
        ASSERT_EQ(results[rank].size(), shapes.size());
        EXPECT_TRUE(at::allclose(results[rank][i].to(at::kDouble), mean,
                                 /*rtol=*/1e-6, /*atol=*/1e-7));
        EXPECT_TRUE(at::equal(results[rank][i], results[0][i]))
            << "every rank must have the same bits";
      }
    }
  }
}

TEST(ReduceGradientsTest, TwoRanksHaveTheBitsOfOneThatAccumulates) {
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    SCOPED_TRACE(c10::toString(dtype));
    const auto micro_batch = [dtype](int index) {
      return at::sin(at::arange(999, at::kDouble) + 1000 * index).to(dtype);
    };
    const at::Tensor accumulated = micro_batch(0).add_(micro_batch(1)).div_(2);
    RunMeshRanks(2, [&](int rank, MeshPtr mesh) {
      const Parameters parameters = {Replicated(mesh, "p", {999}, dtype)};
      SetGradient(parameters[0], micro_batch(rank));
      ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
      EXPECT_TRUE(at::equal(Gradient(parameters[0]), accumulated));
    });
  }
}

TEST(ReduceGradientsTest, SkipsWhatIsFrozenShardedOrOnNoMesh) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    Parameters parameters = {
        Replicated(mesh, "frozen", {1}), Replicated(mesh, "sharded", {1}),
        Replicated(mesh, "local", {1}), Replicated(mesh, "replicated", {1})};
    parameters[0].parameter.set_requires_grad(false);
    parameters[1].layout.placements = {Placement::Shard(0)};
    parameters[2].layout = ParameterLayout();
    for (const DistributedParameter& parameter : parameters) {
      SetGradient(parameter, at::full({1}, rank == 0 ? 1.0f : 5.0f));
    }
    LORA_ASSERT_OK_AND_ASSIGN(int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 1);
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(Gradient(parameters[i]).item<float>(), rank == 0 ? 1.0f : 5.0f)
          << parameters[i].name;
    }
    EXPECT_EQ(Gradient(parameters[3]).item<float>(), 3.0f);
  });
}

TEST(ReduceGradientsTest, NoParametersOnAnyRankAreZero) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    LORA_ASSERT_OK_AND_ASSIGN(int64_t count, ReduceGradients(*mesh, {}));
    EXPECT_EQ(count, 0);
  });
}

TEST(ReduceGradientsTest, WritesIntoStridedViews) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "p", {2, 3})};
    at::Tensor storage = at::full({3, 4}, -1.0f);
    storage.narrow(1, 1, 2).copy_(at::arange(6, at::kFloat).view({3, 2}) *
                                  (rank + 1));
    SetGradient(parameters[0], storage.narrow(1, 1, 2).t());
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());

    at::Tensor expected = at::full({3, 4}, -1.0f);
    expected.narrow(1, 1, 2).copy_(at::arange(6, at::kFloat).view({3, 2}) *
                                   1.5);
    EXPECT_TRUE(at::equal(storage, expected));
  });
}

TEST(ReduceGradientsTest, ReplacesAnExpandedGradient) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "p", {2})};
    SetGradient(parameters[0], rank == 0 ? at::tensor({2.0f}).expand({2})
                                         : at::tensor({0.0f, 4.0f}));
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::tensor({1.0f, 3.0f})));
  });
}

TEST(ReduceGradientsTest, ReplacesAGradientOfInferenceMode) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "p", {2})};
    at::Tensor gradient;
    {
      const c10::InferenceMode inference_mode;
      gradient = at::full({2}, 1.0f + 2 * rank);
    }
    SetGradient(parameters[0], gradient);
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));
    EXPECT_TRUE(at::equal(gradient, at::full({2}, 1.0f + 2 * rank)));
  });
}

TEST(ReduceGradientsTest, ReducesEachDtypeByItself) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {2}, at::kFloat),
                                   Replicated(mesh, "b", {3}, at::kBFloat16),
                                   Replicated(mesh, "c", {4}, at::kFloat)};
    for (const DistributedParameter& parameter : parameters) {
      SetGradient(parameter,
                  at::full_like(parameter.parameter, rank == 0 ? 1 : 2));
    }
    LORA_ASSERT_OK_AND_ASSIGN(int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 3);
    for (const DistributedParameter& parameter : parameters) {
      EXPECT_TRUE(at::equal(Gradient(parameter),
                            at::full_like(parameter.parameter, 1.5)));
    }
  });
}

TEST(ReduceGradientsTest, IsOverAllDimensionsOfAMesh) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh,
                              DeviceMesh::Create(group, {{"a", 2}, {"b", 2}}));
    const Parameters parameters = {Replicated(mesh, "p", {1})};
    SetGradient(parameters[0], at::full({1}, 1.0f + rank));
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 2.5f);

    parameters[0].parameter.detach().fill_(rank);
    ASSERT_THAT(BroadcastParameters(*mesh, parameters, /*root=*/2), IsOk());
    EXPECT_EQ(parameters[0].parameter.item<float>(), 2.0f);
  });
}

TEST(ReduceGradientsTest, SumsAndAveragesAsTheLayoutSays) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 2}, {"tensor", 2}}));
    const auto layout = [&mesh](Placement data, Placement tensor) {
      return ParameterLayout{mesh, {data, tensor}};
    };
    Parameters parameters = {Replicated(mesh, "summed", {1}),
                             Replicated(mesh, "complete", {1}),
                             // Two rows on the first tensor rank, one on the
                             // second.
                             Replicated(mesh, "sharded", {2 - rank % 2, 3})};
    parameters[0].layout = layout(
        Placement::Replicate(), Placement::Replicate(GradientReduction::kSum));
    parameters[1].layout = layout(
        Placement::Replicate(), Placement::Replicate(GradientReduction::kNone));
    parameters[2].layout = layout(Placement::Replicate(), Placement::Shard(0));
    for (const DistributedParameter& parameter : parameters) {
      SetGradient(parameter,
                  at::full_like(parameter.parameter.detach(), 1 << rank));
    }
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t count,
                              ReduceGradients(*mesh, parameters));
    EXPECT_EQ(count, 3);
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), (1 + 2 + 4 + 8) / 2.0f);
    // Ranks 0 and 2 have one coordinate on `tensor`, 1 and 3 the other.
    const float over_data = rank % 2 == 0 ? 2.5f : 5.0f;
    EXPECT_EQ(Gradient(parameters[1]).item<float>(), over_data);
    EXPECT_TRUE(at::equal(Gradient(parameters[2]),
                          at::full({2 - rank % 2, 3}, over_data)));
  });
}

// The ranks 1 and 3 reduce this shard with each other: they have the ranks 0
// and 1 of their group, which is no concern of who reads the error.
TEST(ReduceGradientsTest, NamesTheRanksOfTheMeshWhoseShardsDiffer) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 2}, {"tensor", 2}}));
    Parameters parameters = {Replicated(mesh, "p", {rank == 3 ? 4 : 5, 2})};
    parameters[0].layout.placements[1] = Placement::Shard(0);
    EXPECT_THAT(
        ReduceGradients(*mesh, parameters),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("rank 1: DeviceMesh(data=2, tensor=2): "),
                       HasSubstr("only on rank 1: p ([5, 2]); only on rank 3: "
                                 "p ([4, 2]) (2 ranks failed)"))));
  });
}

// --- GradientSync ------------------------------------------------------------

GradientSyncOptions WithBuckets(int64_t bytes, bool overlap = false) {
  GradientSyncOptions options;
  options.bucket_bytes = bytes;
  options.overlap_backward = overlap;
  return options;
}

TEST(GradientSyncTest, GradientsAreViewsOfAFewBuffersAndNothingIsCopied) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {3, 2}),
                                   Replicated(mesh, "b", {4})};
    SetGradient(parameters[1], at::full({4}, 7.0f));
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    // What was there is kept, and backward passes add to it in place.
    EXPECT_TRUE(at::equal(Gradient(parameters[1]), at::full({4}, 7.0f)));
    const at::Tensor view = Gradient(parameters[0]);
    EXPECT_TRUE(view.storage().is_alias_of(Gradient(parameters[1]).storage()));
    for (int step = 0; step < 2; ++step) {
      sync->ZeroGrad();
      (parameters[0].parameter.sum() * (1 + rank) +
       parameters[1].parameter.sum() * 4)
          .backward();
      LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, sync->Sync());
      EXPECT_EQ(count, 2);
      EXPECT_TRUE(Gradient(parameters[0]).is_same(view));
      EXPECT_TRUE(at::equal(view, at::full({3, 2}, 1.5f)));
      EXPECT_TRUE(at::equal(Gradient(parameters[1]), at::full({4}, 4.0f)));
      EXPECT_EQ(sync->statistics().parameters, 2);
      EXPECT_EQ(sync->statistics().collectives, 1);
      EXPECT_EQ(sync->statistics().copied_gradients, 0);
      EXPECT_TRUE(sync->statistics().zero_filled.empty());
    }
  });
}

TEST(GradientSyncTest, TakesWhatUsersDoToGradients) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {
        Replicated(mesh, "none", {2}), Replicated(mesh, "replaced", {2}),
        Replicated(mesh, "strided", {2, 3}), Replicated(mesh, "double", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    ASSERT_THAT(sync->Sync(), IsOk());
    // As optimizer.zero_grad() does on one rank.
    if (rank == 0) parameters[0].parameter.mutable_grad() = at::Tensor();
    if (rank == 1) SetGradient(parameters[0], at::full({2}, 6.0f));
    SetGradient(parameters[1], at::full({2}, 1.0f + rank));
    SetGradient(parameters[2], at::ones({3, 2}).t());
    parameters[3].parameter.mutable_grad() =
        at::full({2}, 2.0 * rank, at::kDouble);
    ASSERT_THAT(sync->Sync(), IsOk());
    const float expected[] = {3.0f, 1.5f, 1.0f, 1.0f};
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(
          Gradient(parameters[i]),
          at::full_like(parameters[i].parameter.detach(), expected[i])))
          << parameters[i].name;
    }
    EXPECT_EQ(sync->statistics().copied_gradients, rank == 0 ? 3 : 4);
    EXPECT_EQ(sync->statistics().zero_filled,
              rank == 0 ? std::vector<std::string>{"none"}
                        : std::vector<std::string>());
  });
}

TEST(GradientSyncTest, AMicroBatchMayBeAccumulatedOnTopOfAnAverage) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    (parameters[0].parameter.sum() * (1 + 2 * rank)).backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));
    (parameters[0].parameter.sum() * (2 + 2 * rank)).backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 5.0f)));
  });
}

TEST(GradientSyncTest, RefusesToSumTwice) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    Parameters parameters = {Replicated(mesh, "a", {1})};
    parameters[0].layout.placements[1] =
        Placement::Replicate(GradientReduction::kSum);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    // Zeroed either way, a gradient may be summed again.
    for (const bool sets_to_none : {false, true}) {
      if (sets_to_none) {
        parameters[0].parameter.mutable_grad() = at::Tensor();
      } else {
        sync->ZeroGrad();
      }
      (parameters[0].parameter * 3).backward();
      ASSERT_THAT(sync->Sync(), IsOk());
      EXPECT_EQ(Gradient(parameters[0]).item<float>(), 6.0f);
    }
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("the gradient of a is a sum over ranks "
                                   "already")));
  });
}

TEST(GradientSyncTest, Bfloat16IsReducedInFloat32OnRequest) {
  RunMeshRanks(4, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {1}, at::kBFloat16)};
    GradientSyncOptions options;
    options.reduce_in_float32 = true;
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters, options));
    // In bfloat16 256 + 1 is 256: the sum would lose the ones.
    SetGradient(parameters[0],
                at::full({1}, rank == 0 ? 256.0f : 4.0f).to(at::kBFloat16));
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(Gradient(parameters[0]).scalar_type(), at::kBFloat16);
    EXPECT_EQ(Gradient(parameters[0]).item<float>(),
              at::full({1}, (256.0f + 12) / 4).to(at::kBFloat16).item<float>());
  });
}

TEST(GradientSyncTest, AnUnannouncedChangeIsAnErrorOnEveryRank) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    Parameters parameters = {Replicated(mesh, "a", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    if (rank == 1) {
      parameters[0].parameter.set_data(at::zeros({2}, at::kDouble));
    }
    const absl::Status status = sync->Sync().status();
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr(rank == 1 ? "a has changed its shape, dtype"
                                             : "another rank could not")));
    // It stays the reason, whatever is called next.
    sync->ZeroGrad();
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr("after an error"),
                               HasSubstr(std::string(status.message())))));
  });
}

// A row parallel layer: the ranks reduce lora_B with each other, and not
// lora_A, whose buffer is the last.
TEST(GradientSyncTest, AnErrorInAnyBufferIsThatOfWhoeverReducesWithTheRank) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    Parameters parameters = {Replicated(mesh, "o.lora_A", {2, 2}),
                             Replicated(mesh, "o.lora_B", {2, 2})};
    parameters[0].layout.placements[1] = Placement::Shard(1);
    parameters[1].layout.placements[1] =
        Placement::Replicate(GradientReduction::kSum);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    if (rank == 0) parameters[0].parameter.set_requires_grad(false);
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr(rank == 0 ? "o.lora_A has changed its shape"
                                             : "another rank could not")));
  });
}

TEST(GradientSyncTest, ReplaceGoesOnWithOtherParameters) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    Parameters parameters = {Replicated(mesh, "a", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    SetGradient(parameters[0], at::full({2}, 1.0f + rank));
    // Ranks that differ leave everything as it was.
    Parameters more = parameters;
    if (rank == 0) more.push_back(Replicated(mesh, "b", {3}));
    EXPECT_THAT(sync->Replace(more),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("only on rank 0: b")));
    if (rank == 1) more.push_back(Replicated(mesh, "b", {3}));
    ASSERT_THAT(sync->Replace(more), IsOk());
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, sync->Sync());
    EXPECT_EQ(count, 2);
    EXPECT_TRUE(at::equal(Gradient(more[0]), at::full({2}, 1.5f)));
    sync->ZeroGrad();
    (more[0].parameter.sum() + more[1].parameter.sum()).backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(sync->statistics().overlapped_buckets, 2);
  });
}

// Ranks whose losses use different layers, in different orders.
TEST(GradientSyncTest, OverlapGivesTheBitsOfNoOverlap) {
  RunMeshRanks(3, [](int rank, MeshPtr mesh) {
    const auto make = [&mesh] {
      Parameters parameters;
      for (int i = 0; i < 8; ++i) {
        parameters.push_back(Replicated(mesh, "p" + std::to_string(i), {5}));
      }
      return parameters;
    };
    const auto backward = [rank](const Parameters& parameters, int step) {
      at::Tensor loss = at::zeros({});
      for (int i = 0; i < 8; ++i) {
        const int layer = rank == 1 ? 7 - i : i;
        if ((layer + rank + step) % 3 == 0) continue;
        loss =
            loss +
            (parameters[layer].parameter * (0.1 * (layer + rank))).exp().sum();
      }
      loss.backward();
    };
    const Parameters plain = make();
    const Parameters overlapped = make();
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto plain_sync,
        GradientSync::Create(mesh, plain, WithBuckets(64)));
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto overlap_sync,
        GradientSync::Create(mesh, overlapped, WithBuckets(64, true)));
    for (int step = 0; step < 4; ++step) {
      plain_sync->ZeroGrad();
      overlap_sync->ZeroGrad();
      {
        const GradientSync::NoSyncScope accumulate(*overlap_sync);
        backward(overlapped, step + 1);
      }
      backward(overlapped, step);
      ASSERT_THAT(overlap_sync->Sync(), IsOk());
      backward(plain, step + 1);
      backward(plain, step);
      ASSERT_THAT(plain_sync->Sync(), IsOk());
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE(at::equal(Gradient(overlapped[i]), Gradient(plain[i])))
            << "step " << step << ", " << plain[i].name << ": "
            << Gradient(overlapped[i]) << " against " << Gradient(plain[i]);
      }
    }
  });
}

TEST(GradientSyncTest, OverlapStartsBuffersDuringTheBackwardPass) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {16}),
                                   Replicated(mesh, "b", {16}),
                                   Replicated(mesh, "c", {16})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    // The buckets are c, b, a: without b, a has to wait.
    (parameters[0].parameter.sum() + parameters[2].parameter.sum()).backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(sync->statistics().overlapped_buckets, 1);
    EXPECT_EQ(sync->statistics().collectives, 3);
  });
}

TEST(GradientSyncTest, ProfilersSeeWhatStartsDuringTheBackwardPass) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {16}),
                                   Replicated(mesh, "b", {16})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    const OperatorLog log;
    parameters[1].parameter.sum().backward();
    EXPECT_EQ(log.Count("trainer_lora::gradient_sync"), 0);
    EXPECT_EQ(log.Count("trainer_lora::gradient_sync::start"), 1);
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(log.Count("trainer_lora::gradient_sync"), 1);
    EXPECT_EQ(log.Count("trainer_lora::gradient_sync::start"), 2);
    EXPECT_EQ(log.Count("trainer_lora::gradient_sync::finish"), 2);
  });
}

TEST(GradientSyncTest, OverlapTakesGradientsThatTheBackwardPassMakesAnew) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "p", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    for (int step = 0; step < 2; ++step) {
      SetGradient(parameters[0], at::Tensor());  // optimizer.zero_grad()
      parameters[0].parameter.sum().mul(rank == 0 ? 1.0f : 3.0f).backward();
      ASSERT_THAT(sync->Sync(), IsOk());
      EXPECT_EQ(sync->statistics().overlapped_buckets, 1);
      EXPECT_EQ(sync->statistics().copied_gradients, 1);
      EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));
    }
  });
}

// A gradient that is put in its place after the backward pass, before its
// buffer has started, is averaged as any other; small ones and large ones.
TEST(GradientSyncTest, OverlapTakesAGradientThatIsReplacedAfterwards) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    for (const int64_t numel : {16, 1 << 15}) {
      const Parameters parameters = {Replicated(mesh, "a", {numel}),
                                     Replicated(mesh, "b", {numel}),
                                     Replicated(mesh, "c", {numel})};
      LORA_ASSERT_OK_AND_ASSIGN(
          const auto sync,
          GradientSync::Create(mesh, parameters, WithBuckets(4 * numel, true)));
      {
        const GradientSync::NoSyncScope accumulate(*sync);
        (parameters[1].parameter.sum() + parameters[2].parameter.sum())
            .backward();
      }
      (parameters[0].parameter.sum() + parameters[2].parameter.sum())
          .backward();
      SetGradient(parameters[0], at::full({numel}, 1.0f + 4 * rank));
      ASSERT_THAT(sync->Sync(), IsOk());
      const float expected[] = {3, 1, 2};
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(
            at::equal(Gradient(parameters[i]), at::full({numel}, expected[i])))
            << parameters[i].name << " of " << numel;
      }
    }
  });
}

TEST(GradientSyncTest, OverlapRefusesASecondBackwardPass) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {16})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    for (int i = 0; i < 2; ++i) parameters[0].parameter.sum().backward();
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("a second backward pass reached a")));
  });
}

TEST(GradientSyncTest, OverlapRefusesZeroGradBeforeSync) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {2})};
    const auto backward = [&] {
      parameters[0].parameter.sum().mul(1 + 2 * rank).backward();
    };
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    backward();
    sync->ZeroGrad();
    for (int call = 0; call < 2; ++call) {
      EXPECT_THAT(sync->Sync(),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("ZeroGrad() was called between a backward "
                                     "pass that started a reduction and")));
    }
    // Both ranks had started the buffer.
    ASSERT_THAT(sync->Replace(parameters), IsOk());
    sync->ZeroGrad();
    backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));
  });
}

// The hooks go with the object, the gradients stay.
TEST(GradientSyncTest, ParametersOutliveIt) {
  RunMeshRanks(1, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {2})};
    {
      LORA_ASSERT_OK_AND_ASSIGN(
          const auto sync,
          GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
      parameters[0].parameter.sum().backward();
      EXPECT_THAT(GradientSync::Create(mesh, parameters, WithBuckets(64, true)),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           HasSubstr("a has a hook")));
      ASSERT_THAT(sync->Sync(), IsOk());
    }
    parameters[0].parameter.sum().backward();
    EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({2}, 2.0f)));
  });
}

TEST(GradientSyncTest, ReplaceKnowsWhatIsSummed) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    Parameters parameters = {Replicated(mesh, "a", {1}),
                             Replicated(mesh, "b", {1})};
    for (DistributedParameter& parameter : parameters) {
      parameter.layout.placements[1] =
          Placement::Replicate(GradientReduction::kSum);
    }
    const auto backward = [&parameters] {
      (parameters[0].parameter * 3 + parameters[1].parameter).backward();
    };
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, {parameters[0]}));
    backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    // One gradient is a sum now, the other is not.
    ASSERT_THAT(sync->Replace(parameters), IsOk());
    EXPECT_EQ(sync->statistics().parameters, 1);
    EXPECT_THAT(sync->Sync(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("the gradient of a is a sum over ranks "
                                   "already")));
    // It goes on after that error, and from zero.
    ASSERT_THAT(sync->Replace(parameters), IsOk());
    sync->ZeroGrad();
    backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 6.0f);
    EXPECT_EQ(Gradient(parameters[1]).item<float>(), 2.0f);
    // As it does where a sum was replaced by another gradient.
    for (const DistributedParameter& parameter : parameters) {
      SetGradient(parameter, at::full({1}, 5.0f));
    }
    ASSERT_THAT(sync->Replace(parameters), IsOk());
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 10.0f);
  });
}

TEST(GradientSyncTest, ReplaceTakesAParameterOfAnotherShape) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    Parameters parameters = {Replicated(mesh, "a", {2}),
                             Replicated(mesh, "b", {3})};
    parameters[0].layout.placements[1] =
        Placement::Replicate(GradientReduction::kSum);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, parameters));
    (parameters[0].parameter.sum() +
     parameters[1].parameter.sum() * (1 + 2 * rank))
        .backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    for (const int64_t size : {1, 4}) {  // The view has two elements at first.
      SCOPED_TRACE(size);
      parameters[0].parameter.set_data(at::zeros({size}));
      ASSERT_THAT(sync->Replace(parameters), IsOk());
      EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::zeros({size})));
      EXPECT_TRUE(at::equal(Gradient(parameters[1]), at::full({3}, 2.0f)));
      (parameters[0].parameter.sum() * 3).backward();
      ASSERT_THAT(sync->Sync(), IsOk());
      EXPECT_TRUE(at::equal(Gradient(parameters[0]), at::full({size}, 6.0f)));
    }
    // Any other gradient of another shape is not taken.
    SetGradient(parameters[0], at::zeros({2}));
    EXPECT_THAT(sync->Replace(parameters),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("the gradient of a must be a dense tensor "
                                   "of shape [4]")));
  });
}

TEST(GradientSyncTest, ReplaceKeepsNoSyncScopes) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    {
      const GradientSync::NoSyncScope accumulate(*sync);
      ASSERT_THAT(sync->Replace(parameters), IsOk());
      parameters[0].parameter.sum().backward();
      parameters[0].parameter.sum().backward();
    }
    for (int step = 0; step < 2; ++step) {
      // Inside a scope nothing starts, outside it does.
      {
        const GradientSync::NoSyncScope accumulate(*sync);
        parameters[0].parameter.sum().backward();
      }
      parameters[0].parameter.sum().backward();
      ASSERT_THAT(sync->Sync(), IsOk());
      EXPECT_EQ(sync->statistics().overlapped_buckets, 1);
      EXPECT_TRUE(at::equal(Gradient(parameters[0]),
                            at::full({2}, step == 0 ? 4.0f : 2.0f)));
      sync->ZeroGrad();
    }
  });
}

// Which a tensor has one of: whose it is keeps it.
TEST(GradientSyncTest, ReplaceLeavesTheHooksOfOthers) {
  struct CountingHook : torch::autograd::PostAccumulateGradHook {
    explicit CountingHook(int* count) : count(count) {}
    void operator()(const torch::autograd::Variable&) override { ++*count; }
    int* count;
  };
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    Parameters parameters = {Replicated(mesh, "a", {2})};
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync,
        GradientSync::Create(mesh, parameters, WithBuckets(64, true)));
    ASSERT_THAT(sync->Replace(parameters), IsOk());

    int count = 0;
    parameters.push_back(Replicated(mesh, "b", {2}));
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameters[1].parameter, std::make_unique<CountingHook>(&count));
    EXPECT_THAT(sync->Replace(parameters),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("b has a hook")));
    parameters[1].parameter.sum().backward();
    EXPECT_EQ(count, 1);
    // Another object's is not this one's either.
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto other,
        GradientSync::Create(mesh, {}, WithBuckets(64, true)));
    EXPECT_THAT(other->Replace({parameters[0]}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("a has a hook")));
    parameters[0].parameter.sum().backward();
    ASSERT_THAT(sync->Sync(), IsOk());
    EXPECT_EQ(sync->statistics().overlapped_buckets, 1);
  });
}

// Rank 0 has a shard for whose gradient no machine has memory.
TEST(GradientSyncTest, ARankWithoutMemoryIsAnErrorOnEveryRank) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        MeshPtr mesh, DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    const int64_t rows = rank == 0 ? int64_t{1} << 50 : 1;
    Parameters parameters = {Replicated(mesh, "a", {1}),
                             Replicated(mesh, "b", {1})};
    parameters[1].layout.placements[1] = Placement::Shard(0);
    parameters[1].parameter =
        at::zeros({1}).expand({rows}).set_requires_grad(true);
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync,
                              GradientSync::Create(mesh, {parameters[0]}));
    const absl::Status statuses[] = {
        GradientSync::Create(mesh, parameters).status(),
        sync->Replace(parameters),
        ReduceGradients(*mesh, parameters).status(),
    };
    for (const absl::Status& status : statuses) {
      EXPECT_THAT(status,
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           AllOf(HasSubstr("only on rank 0: making the buffers "
                                           "for gradients"),
                                 HasSubstr("can't allocate memory"))));
    }
    EXPECT_THAT(sync->Sync(), IsOk());
  });
}

TEST(GradientSyncTest, RefusesBadArguments) {
  EXPECT_THAT(
      GradientSync::Create(nullptr, {}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("null mesh")));
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    EXPECT_THAT(GradientSync::Create(mesh, {}, WithBuckets(0)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("bucket_bytes must be at least 1")));
    // Ranks without parameters may synchronize nothing.
    LORA_ASSERT_OK_AND_ASSIGN(const auto sync, GradientSync::Create(mesh, {}));
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, sync->Sync());
    EXPECT_EQ(count, 0);
  });
}

TEST(BroadcastParametersTest, RefusesShards) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(MeshPtr mesh,
                              DeviceMesh::Create(group, {{"a", 2}, {"b", 1}}));
    Parameters parameters = {Replicated(mesh, "p", {1})};
    parameters[0].layout.placements = {Placement::Replicate(),
                                       Placement::Shard(0)};
    EXPECT_THAT(
        BroadcastParameters(*mesh, parameters),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("p must be replicated over all of DeviceMesh(a=2, "
                           "b=1), is a: Replicate(average), b: Shard(0)")));
  });
}

// As Module::to(dtype) leaves it, on the rank that had a gradient.
TEST(ReduceGradientsTest, TakesAGradientOfAnotherDtype) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "p", {1}, at::kBFloat16)};
    if (rank == 0) SetGradient(parameters[0], at::tensor({3.0f}));
    ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 1.5f);
    EXPECT_EQ(Gradient(parameters[0]).scalar_type(),
              rank == 0 ? at::kFloat : at::kBFloat16);
  });
}

TEST(ReduceGradientsTest, AParameterMayBeListedTwice) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const DistributedParameter parameter = Replicated(mesh, "p", {1});
    SetGradient(parameter, at::full({1}, rank == 0 ? 1.0f : 3.0f));
    ASSERT_THAT(ReduceGradients(*mesh, {parameter, parameter}), IsOk());
    EXPECT_EQ(Gradient(parameter).item<float>(), 2.0f);
  });
}

struct DifferenceCase {
  const char* name;
  std::function<Parameters(int rank, const MeshPtr& mesh)> parameters;
  std::vector<std::string> in_message;
};

class RanksThatDifferTest : public ::testing::TestWithParam<DifferenceCase> {};

TEST_P(RanksThatDifferTest, EveryRankSaysAtOnceWhatDiffers) {
  const auto start = std::chrono::steady_clock::now();
  const DifferenceCase& test_case = GetParam();
  RunMeshRanks(3, [&test_case](int rank, MeshPtr mesh) {
    const Parameters parameters = test_case.parameters(rank, mesh);
    const absl::Status status = ReduceGradients(*mesh, parameters).status();
    for (const std::string& text : test_case.in_message) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr(text)));
    }
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("DeviceMesh(replicate=3)"));
    for (const DistributedParameter& parameter : parameters) {
      if (parameter.name == "same") {
        EXPECT_FALSE(Gradient(parameter).defined());
      }
    }
    // The group still works.
    EXPECT_THAT(ReduceGradients(*mesh, {}), IsOk());
  });
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

INSTANTIATE_TEST_SUITE_P(
    Differences, RanksThatDifferTest,
    ::testing::Values(
        DifferenceCase{"OneTargetMoreOnOneRank",
                       [](int rank, const MeshPtr& mesh) {
                         Parameters parameters = {
                             Replicated(mesh, "same", {2})};
                         if (rank == 1)
                           parameters.push_back(Replicated(mesh, "k", {3}));
                         return parameters;
                       },
                       {"only on rank 1: k (Float [3] on cpu)"}},
        DifferenceCase{
            "ThreeAgainstNone",
            [](int rank, const MeshPtr& mesh) {
              if (rank == 0) return Parameters();
              return Parameters{Replicated(mesh, "a", {1}),
                                Replicated(mesh, "b", {1}),
                                Replicated(mesh, "c", {1})};
            },
            {"only on ranks 1, 2: a (Float [1] on cpu), b (Float [1] on cpu), "
             "c (Float [1] on cpu)"}},
        DifferenceCase{
            "ManyAgainstNone",
            [](int rank, const MeshPtr& mesh) {
              Parameters parameters;
              for (int i = 0; rank == 0 && i < 128; ++i) {
                parameters.push_back(
                    Replicated(mesh, "layer" + std::to_string(i), {1}));
              }
              return parameters;
            },
            {"only on rank 0: layer0 (", "layer9 (", " and 118 more"}},
        DifferenceCase{"AnotherShapeOfTheSameSize",
                       [](int rank, const MeshPtr& mesh) {
                         if (rank == 0)
                           return Parameters{Replicated(mesh, "a", {2, 3})};
                         return Parameters{Replicated(mesh, "a", {3, 2})};
                       },
                       {"only on rank 0: a (Float [2, 3] on cpu)",
                        "only on ranks 1, 2: a (Float [3, 2] on cpu)"}},
        DifferenceCase{"AnotherDtype",
                       [](int rank, const MeshPtr& mesh) {
                         return Parameters{
                             Replicated(mesh, "a", {1},
                                        rank == 2 ? at::kDouble : at::kFloat)};
                       },
                       {"only on rank 2: a (Double [1] on cpu)"}},
        DifferenceCase{
            "AnotherOrder",
            [](int rank, const MeshPtr& mesh) {
              Parameters parameters = {Replicated(mesh, "a", {1}),
                                       Replicated(mesh, "b", {1})};
              if (rank == 2) std::swap(parameters[0], parameters[1]);
              return parameters;
            },
            {"order differs from entry 1: rank 0 has a (Float [1] on cpu), "
             "rank 2 has b (Float [1] on cpu)"}},
        DifferenceCase{"FrozenOnOneRank",
                       [](int rank, const MeshPtr& mesh) {
                         Parameters parameters = {Replicated(mesh, "a", {1})};
                         if (rank == 1)
                           parameters[0].parameter.set_requires_grad(false);
                         return parameters;
                       },
                       {"only on ranks 0, 2: a (Float [1] on cpu)"}},
        DifferenceCase{
            "AGradientOfAnotherShape",
            [](int rank, const MeshPtr& mesh) {
              Parameters parameters = {Replicated(mesh, "a", {2})};
              if (rank == 1) SetGradient(parameters[0], at::zeros({3}));
              return parameters;
            },
            {"only on rank 1: the gradient of a must be a dense tensor of "
             "shape [2]"}},
        DifferenceCase{
            "AnotherMeshOnOneRank",
            [](int rank, const MeshPtr& mesh) {
              Parameters parameters = {Replicated(mesh, "a", {1})};
              if (rank == 1) {
                parameters[0].layout = ParameterLayout::Replicated(
                    *DeviceMesh::Create(mesh->group(0), "other"));
              }
              return parameters;
            },
            {"only on rank 1: a lies on another mesh, DeviceMesh(other=3)"}},
        DifferenceCase{
            "APlacementPastTheMeshOnOneRank",
            [](int rank, const MeshPtr& mesh) {
              Parameters parameters = {Replicated(mesh, "a", {1})};
              if (rank == 1) {
                parameters[0].layout.placements.push_back(Placement::Shard(0));
              }
              return parameters;
            },
            {"only on rank 1: a (Float shard on cpu, replicate: "
             "Replicate(average), ?: Shard(0)), a: the layout has 2 placements "
             "for DeviceMesh(replicate=3)"}}),
    [](const ::testing::TestParamInfo<DifferenceCase>& info) {
      return info.param.name;
    });

TEST(ReduceGradientsTest, ReportsAParameterThatNoRankCanSend) {
  RunMeshRanks(2, [](int, MeshPtr mesh) {
    Parameters parameters = {Replicated(mesh, "a", {1})};
    parameters[0].parameter = at::empty({1}, at::kMeta).set_requires_grad(true);
    EXPECT_THAT(ReduceGradients(*mesh, parameters),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("a must be a dense tensor with values")));
  });
}

TEST(ReduceGradientsTest, ReportsAPeerThatNeverCalls) {
  const auto check = [](const MeshPtr& mesh) {
    const Parameters parameters = {Replicated(mesh, "q.lora_A", {1}),
                                   Replicated(mesh, "q.lora_B", {1})};
    SetGradient(parameters[0], at::tensor({4.0f}));
    EXPECT_THAT(ReduceGradients(*mesh, parameters),
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         AllOf(HasSubstr("DeviceMesh(replicate=2), rank 0"),
                               HasSubstr("of 2 parameters, the first q.lora_A"),
                               Not(HasSubstr("Exception raised")))));
    EXPECT_EQ(Gradient(parameters[0]).item<float>(), 4.0f);
    EXPECT_FALSE(Gradient(parameters[1]).defined());
  };
  // Rank 1 keeps its group, so that the connection stays open.
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  RunMeshRanks(
      2,
      [&](int rank, MeshPtr mesh) {
        std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
        if (rank == 0) {
          check(mesh);
          lock.lock();
          done = true;
          changed.notify_all();
        } else {
          lock.lock();
          changed.wait(lock, [&done] { return done; });
        }
      },
      std::chrono::seconds(1));
}

TEST(ReduceGradientsTest, ReportsAPeerThatLeft) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    if (rank == 1) return;
    const Parameters parameters = {Replicated(mesh, "q.lora_A", {1})};
    EXPECT_THAT(ReduceGradients(*mesh, parameters),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr("DeviceMesh(replicate=2), rank 0"),
                               HasSubstr("q.lora_A"))));
    EXPECT_FALSE(Gradient(parameters[0]).defined());
  });
}

TEST(BroadcastParametersTest, GivesEveryRankTheRootsValuesInPlace) {
  for (int root = 0; root < 3; ++root) {
    SCOPED_TRACE(root);
    RunMeshRanks(3, [root](int rank, MeshPtr mesh) {
      const Parameters parameters = {Replicated(mesh, "a", {2, 3}),
                                     Replicated(mesh, "frozen", {4}),
                                     Replicated(mesh, "b", {5}, at::kBFloat16)};
      for (const DistributedParameter& parameter : parameters) {
        parameter.parameter.detach().fill_(rank + 1);
      }
      parameters[1].parameter.set_requires_grad(false);
      const void* const data = parameters[0].parameter.data_ptr();

      EXPECT_THAT(BroadcastParameters(*mesh, parameters, root), IsOk());
      for (const DistributedParameter& parameter : parameters) {
        EXPECT_TRUE(
            at::equal(parameter.parameter.detach(),
                      at::full_like(parameter.parameter.detach(), root + 1)))
            << parameter.name;
      }
      EXPECT_EQ(parameters[0].parameter.data_ptr(), data);
      EXPECT_TRUE(parameters[0].parameter.is_leaf());
    });
  }
}

TEST(BroadcastParametersTest, SkipsWhatIsShardedOrOnNoMesh) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    Parameters parameters = {Replicated(mesh, "sharded", {1}),
                             Replicated(mesh, "local", {1})};
    parameters[0].layout.placements = {Placement::Shard(0)};
    parameters[1].layout = ParameterLayout();
    for (const DistributedParameter& parameter : parameters) {
      parameter.parameter.detach().fill_(rank);
    }
    EXPECT_THAT(BroadcastParameters(*mesh, parameters), IsOk());
    EXPECT_EQ(parameters[0].parameter.item<float>(), rank);
    EXPECT_EQ(parameters[1].parameter.item<float>(), rank);
  });
}

TEST(BroadcastParametersTest, WritesNothingWhereOneRankCantBeWritten) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    at::Tensor inference_tensor;
    {
      const c10::InferenceMode inference_mode;
      inference_tensor = at::full({2}, rank);
    }
    const std::pair<at::Tensor, std::string> cases[] = {
        {inference_tensor, "was made in inference mode"},
        {at::full({1}, rank).expand({2}), "has several elements in one place"}};
    for (const auto& [tensor, problem] : cases) {
      Parameters parameters = {Replicated(mesh, "a", {2}),
                               Replicated(mesh, "b", {2})};
      for (DistributedParameter& parameter : parameters) {
        parameter.parameter = at::full({2}, rank);
      }
      if (rank == 1) parameters[1].parameter = tensor;
      EXPECT_THAT(BroadcastParameters(*mesh, parameters),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("only on rank 1: b can't be written: it " +
                                     problem)));
      EXPECT_TRUE(at::equal(parameters[0].parameter, at::full({2}, rank)));
    }
  });
}

TEST(BroadcastParametersTest, RefusesARootThatIsNoRank) {
  for (const int root : {-1, 2}) {
    RunMeshRanks(2, [root](int, MeshPtr mesh) {
      EXPECT_THAT(BroadcastParameters(*mesh, {}, root),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           HasSubstr("root must be a rank of "
                                     "DeviceMesh(replicate=2)")));
    });
  }
}

TEST(BroadcastParametersTest, NamesRanksThatDisagree) {
  RunMeshRanks(2, [](int rank, MeshPtr mesh) {
    const Parameters parameters = {Replicated(mesh, "a", {1})};
    EXPECT_THAT(BroadcastParameters(*mesh, parameters, /*root=*/rank),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("only on rank 0: the broadcast from rank 0; "
                                   "only on rank 1: the broadcast from rank "
                                   "1")));

    const absl::Status status =
        rank == 0 ? BroadcastParameters(*mesh, parameters)
                  : ReduceGradients(*mesh, parameters).status();
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("only on rank 1: the reduction of "
                                           "gradients")));
  });
}

}  // namespace
}  // namespace trainer_lora::distributed
