#include "distributed/collectives.h"

#include <atomic>

#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

TEST(AllReduceTest, GivesEveryRankTheSumAndTheLargest) {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    SCOPED_TRACE(world_size);
    RunRanks(world_size, [world_size](int rank, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
      const double value = rank + 0.5;
      LORA_ASSERT_OK_AND_ASSIGN(double sum,
                                AllReduce(*mesh, value, ReduceOp::kSum));
      EXPECT_EQ(sum, world_size * (world_size - 1) / 2 + 0.5 * world_size);
      LORA_ASSERT_OK_AND_ASSIGN(double max,
                                AllReduce(*mesh, value, ReduceOp::kMax));
      EXPECT_EQ(max, world_size - 0.5);
    });
  }
}

TEST(AllReduceTest, TheLargestOfNegativeNumbersIsNegative) {
  RunRanks(2, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
    LORA_ASSERT_OK_AND_ASSIGN(double max,
                              AllReduce(*mesh, -1.0 - rank, ReduceOp::kMax));
    EXPECT_EQ(max, -1.0);
  });
}

TEST(AllReduceTest, IsOverAllDimensionsOfAMesh) {
  RunRanks(4, [](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(auto mesh,
                              DeviceMesh::Create(group, {{"a", 2}, {"b", 2}}));
    LORA_ASSERT_OK_AND_ASSIGN(double sum,
                              AllReduce(*mesh, rank, ReduceOp::kSum));
    EXPECT_EQ(sum, 6);
  });
}

TEST(BarrierTest, NobodyPassesBeforeEverybodyCame) {
  constexpr int kRanks = 3;
  std::atomic<int> arrived = 0;
  RunRanks(kRanks, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
    ++arrived;
    EXPECT_THAT(Barrier(*mesh), IsOk());
    EXPECT_EQ(arrived, kRanks);
  });
}

TEST(BarrierTest, ReportsAPeerThatLeft) {
  RunRanks(2, [](int rank, GroupPtr group) {
    if (rank == 1) return;
    LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
    EXPECT_THAT(Barrier(*mesh),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr("DeviceMesh(replicate=2), rank 0"),
                               HasSubstr("barrier"))));
  });
}

}  // namespace
}  // namespace trainer_lora::distributed
