#include "distributed/device_mesh.h"

#include <memory>

#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/parameter_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

TEST(DeviceMeshTest, IsOneDimensionOverAGroup) {
  RunRanks(3, [](int rank, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const DeviceMesh> mesh,
                              DeviceMesh::Create(group));
    EXPECT_EQ(mesh->ndim(), 1);
    EXPECT_THAT(mesh->dim_names(), ElementsAre("replicate"));
    EXPECT_EQ(mesh->size(), 3);
    EXPECT_EQ(mesh->size(0), 3);
    EXPECT_EQ(mesh->rank(), rank);
    EXPECT_EQ(mesh->group(0), group);
    EXPECT_EQ(mesh->ToString(), "DeviceMesh(replicate=3)");
  });
}

TEST(DeviceMeshTest, TakesTheNameOfItsDimension) {
  RunRanks(1, [](int, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const DeviceMesh> mesh,
                              DeviceMesh::Create(group, "data"));
    EXPECT_EQ(mesh->ToString(), "DeviceMesh(data=1)");
  });
}

TEST(DeviceMeshTest, RefusesANullGroupAndANamelessDimension) {
  EXPECT_THAT(
      DeviceMesh::Create(nullptr),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("process group")));
  RunRanks(1, [](int, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    EXPECT_THAT(
        DeviceMesh::Create(group, ""),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("name")));
  });
}

TEST(ParameterLayoutTest, ReplicatesOverEveryDimensionOfTheMesh) {
  RunRanks(1, [](int, c10::intrusive_ptr<c10d::ProcessGroup> group) {
    LORA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const DeviceMesh> mesh,
                              DeviceMesh::Create(group));
    const ParameterLayout layout = ParameterLayout::Replicated(mesh);
    EXPECT_EQ(layout.mesh, mesh);
    ASSERT_EQ(layout.placements.size(), 1);
    EXPECT_TRUE(layout.placements[0].is_replicate());
  });
}

TEST(PlacementTest, ShardKnowsItsTensorDimension) {
  EXPECT_FALSE(Placement::Shard(0).is_replicate());
  EXPECT_EQ(Placement::Shard(1).shard_dim(), 1);
}

}  // namespace
}  // namespace trainer_lora::distributed
