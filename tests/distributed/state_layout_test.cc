#include "distributed/state_layout.h"

#include <cstdint>
#include <memory>
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
        {5, 4}, {mesh, {Placement::Replicate(), Placement::Shard(0)}}, {}};
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
    const StateLayout layout{
        {8, 3}, {mesh, {Placement::Shard(0)}}, /*parts=*/{4, 2, 2}};
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
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    EXPECT_THAT((StateLayout{{4}, {nullptr, {}}, {}}.Validate()),
                StatusIs(kInvalid, HasSubstr("has no mesh")));
    EXPECT_THAT((StateLayout{{4}, {mesh, {}}, {}}.Validate()),
                StatusIs(kInvalid, HasSubstr("0 placements for")));
    EXPECT_THAT((StateLayout{{}, rows, {}}.Validate()),
                StatusIs(kInvalid, HasSubstr("shards dimension 0 of a tensor "
                                             "of 0")));
    EXPECT_THAT((StateLayout{{4}, rows, {2, 1}}.Validate()),
                StatusIs(kInvalid, HasSubstr("parts (2, 1) don't sum")));
    EXPECT_THAT((StateLayout{{4}, rows, {5, -1}}.Validate()),
                StatusIs(kInvalid, HasSubstr("a part of size -1")));
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
