#include "distributed/state_layout.h"

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/tensor_slice.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/modules/batchnorm.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

const std::vector<MeshDim> kTwoByTwo = {{"replicate", 2}, {"shard", 2}};

TEST(StateLayoutTest, HasTheSliceOfEveryRank) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, kTwoByTwo));
    const StateLayout layout{
        {5, 4}, {mesh, {Placement::Replicate(), Placement::Shard(0)}}};
    EXPECT_THAT(layout.Validate(), IsOk());
    EXPECT_THAT(layout.SlicesOf(2), ElementsAre(TensorSlice{{0, 0}, {3, 4}}));
    EXPECT_THAT(layout.SlicesOf(3), ElementsAre(TensorSlice{{3, 0}, {2, 4}}));
    EXPECT_THAT(layout.LocalShape(), ElementsAre(rank % 2 == 0 ? 3 : 2, 4));
  });
}

// As the weight of merged q, k and v over tensor parallel ranks.
TEST(StateLayoutTest, ShardsEachPartByItself) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const StateLayout layout{{8, 3},
                             {mesh, {Placement::Shard(0)}, {{4}, {2}, {2}}}};
    EXPECT_THAT(layout.Validate(), IsOk());
    EXPECT_THAT(layout.SlicesOf(1), ElementsAre(TensorSlice{{2, 0}, {2, 3}},
                                                TensorSlice{{5, 0}, {1, 3}},
                                                TensorSlice{{7, 0}, {1, 3}}));
    EXPECT_THAT(layout.LocalShape(), ElementsAre(4, 3));
  });
}

TEST(StateLayoutTest, RefusesWhatDoesNotFit) {
  RunRanks(1, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ParameterLayout rows{mesh, {Placement::Shard(0)}};
    const auto parts = [&](std::vector<ShardedPart> parts) {
      return StateLayout{{4}, {mesh, {Placement::Shard(0)}, std::move(parts)}};
    };
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    EXPECT_THAT((StateLayout{{4}, {nullptr, {}}}.Validate()),
                StatusIs(kInvalid, HasSubstr("has no mesh")));
    EXPECT_THAT((StateLayout{{4}, {mesh, {}}}.Validate()),
                StatusIs(kInvalid, HasSubstr("0 placements for")));
    EXPECT_THAT((StateLayout{{}, rows}.Validate()),
                StatusIs(kInvalid, HasSubstr("shards dimension 0 of a tensor "
                                             "of 0")));
    EXPECT_THAT(parts({{2}, {1}}).Validate(),
                StatusIs(kInvalid, HasSubstr("Shard(0) in parts 2, 1) don't "
                                             "sum to dimension 0 of [4]")));
    EXPECT_THAT(parts({{5}, {-1}}).Validate(),
                StatusIs(kInvalid, HasSubstr("a part of size -1")));
    EXPECT_THAT(parts({{2}, {2, 0}}).Validate(),
                StatusIs(kInvalid, HasSubstr("a part with 0 replicas")));
  });
}

// As the weight of q, k and v with fewer heads for k and v than ranks.
TEST(StateLayoutTest, ConsecutiveRanksHoldTheReplicasOfAPart) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const StateLayout layout{
        {13, 3}, {mesh, {Placement::Shard(0)}, {{8}, {4, 2}, {1, 4}}}};
    EXPECT_THAT(layout.Validate(), IsOk());
    for (int64_t holder = 0; holder < 4; ++holder) {
      EXPECT_THAT(layout.SlicesOf(holder),
                  ElementsAre(TensorSlice{{2 * holder, 0}, {2, 3}},
                              TensorSlice{{8 + holder / 2 * 2, 0}, {2, 3}},
                              TensorSlice{{12, 0}, {1, 3}}));
    }
    EXPECT_THAT(layout.LocalShape(), ElementsAre(5, 3));
    EXPECT_EQ(layout.layout.ToString(),
              "replicate: Shard(0) in parts 8, 4 x 2, 1 x 4");

    const std::vector<Chunk> parts = layout.layout.LocalParts();
    ASSERT_EQ(parts.size(), 3);
    EXPECT_EQ(parts[0].offset, 2 * rank);
    EXPECT_EQ(parts[1].offset, rank / 2 * 2);
    EXPECT_EQ(parts[1].size, 2);
    EXPECT_EQ(parts[2].offset, 0);
    EXPECT_EQ(parts[2].size, 1);
  });
}

TEST(StateLayoutTest, ReplicasDivideTheOneDimensionThatShardsRows) {
  RunRanks(4, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                              DeviceMesh::Create(group, kTwoByTwo));
    const auto layout = [&](Placement first, Placement second,
                            int64_t replicas) {
      return StateLayout{{4}, {mesh, {first, second}, {{4, replicas}}}};
    };
    const Placement replicated = Placement::Replicate();
    const Placement rows = Placement::Shard(0);
    EXPECT_THAT(layout(replicated, rows, 2).Validate(), IsOk());
    const auto is_refused =
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("must divide the ranks of the one dimension of "
                           "DeviceMesh(replicate=2, shard=2) that shards"));
    EXPECT_THAT(layout(replicated, rows, 3).Validate(), is_refused);
    EXPECT_THAT(layout(replicated, replicated, 2).Validate(), is_refused);
    EXPECT_THAT(layout(rows, rows, 2).Validate(), is_refused);
  });
}

TEST(ShardedLayoutsTest, HasAnEntryForEachParameter) {
  RunRanks(1, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const torch::nn::BatchNorm1d norm(3);
    const StateLayouts layouts =
        ShardedLayouts(*norm, mesh, {Placement::Shard(0)});
    ASSERT_EQ(layouts.size(), 2);  // And not the buffers.
    EXPECT_THAT(layouts.at("weight").global_shape, ElementsAre(3));
    EXPECT_EQ(layouts.at("bias").layout.ToString(), "replicate: Shard(0)");
  });
}

TEST(ShardedLayoutsTest, ReplicatesATensorThatLacksTheDimension) {
  RunRanks(1, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const torch::nn::BatchNorm1d norm(3);
    const StateLayouts layouts =
        ShardedLayouts(*norm, mesh, {Placement::Shard(1)});
    EXPECT_EQ(layouts.at("weight").layout.ToString(),
              "replicate: Replicate(average)");
    EXPECT_THAT(layouts.at("weight").Validate(), IsOk());
  });
}

}  // namespace
}  // namespace trainer_lora::distributed
