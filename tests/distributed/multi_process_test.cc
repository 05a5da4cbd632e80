// Ranks as real processes.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/status_matchers.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::ProcessRanks;
using ::trainer_lora::testutil::RankScenario;
using ::trainer_lora::testutil::StatusIs;

constexpr char kEndTogether[] = "end together";
constexpr char kRankOneIsKilled[] = "rank 1 is killed";
constexpr char kGrid[] = "grid";

TEST(MultiProcessTest, RanksAverageAndEndTogether) {
  ProcessRanks ranks(kEndTogether, 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST(MultiProcessTest, GroupsOfAMeshMeetInTheStoreOfTheJob) {
  ProcessRanks ranks(kGrid, 4);
  for (int rank = 0; rank < 4; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

void CheckGrid(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  LORA_ASSERT_OK_AND_ASSIGN(
      std::shared_ptr<const DeviceMesh> mesh,
      DeviceMesh::Create(std::move(group), {{"a", 2}, {"b", 2}}));
  for (int64_t dim = 0; dim < 2; ++dim) {
    LORA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const DeviceMesh> line,
                              DeviceMesh::Create(mesh->group(dim)));
    LORA_ASSERT_OK_AND_ASSIGN(double sum,
                              AllReduce(*line, mesh->rank(), ReduceOp::kSum));
    // (0 + 2) or (1 + 3); (0 + 1) or (2 + 3).
    EXPECT_EQ(sum, dim == 0 ? 2 + 2 * mesh->coordinate(1)
                            : 1 + 4 * mesh->coordinate(0));
  }
  EXPECT_THAT(Barrier(*mesh), IsOk());
}

TEST(MultiProcessTest, TheOthersSurviveAKilledRankAndEnd) {
  ProcessRanks ranks(kRankOneIsKilled, 3);
  const int status = ranks.Wait(1);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  for (const int rank : {0, 2}) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST(MultiProcessTest, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs in the other tests' processes";
  const std::string scenario = RankScenario();
  alarm(60);  // A rank that hangs ends with a signal, which is a failure.

  LORA_ASSERT_OK_AND_ASSIGN(config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  ProcessGroupOptions options;
  options.timeout = std::chrono::seconds(20);
  LORA_ASSERT_OK_AND_ASSIGN(auto group, InitProcessGroup(environment, options));
  if (scenario == kGrid) {
    CheckGrid(std::move(group));
    return;
  }
  LORA_ASSERT_OK_AND_ASSIGN(std::shared_ptr<const DeviceMesh> mesh,
                            DeviceMesh::Create(group));
  const std::vector<DistributedParameter> parameters = {
      {"q.lora_A", at::zeros({2}).set_requires_grad(true),
       ParameterLayout::Replicated(mesh)}};
  if (mesh->rank() != 2) {
    parameters[0].parameter.mutable_grad() = at::full({2}, mesh->rank() + 1.0f);
  }
  ASSERT_THAT(ReduceGradients(*mesh, parameters), IsOk());
  const at::Tensor average = at::full({2}, 1.0f);  // (1 + 2 + 0) / 3
  EXPECT_TRUE(at::equal(parameters[0].parameter.grad(), average));

  if (scenario == kEndTogether) {
    EXPECT_THAT(Barrier(*mesh), IsOk());
    return;
  }
  if (mesh->rank() == 1) raise(SIGKILL);
  EXPECT_THAT(
      ReduceGradients(*mesh, parameters),
      AnyOf(StatusIs(absl::StatusCode::kUnavailable, HasSubstr("q.lora_A")),
            StatusIs(absl::StatusCode::kDeadlineExceeded,
                     HasSubstr("q.lora_A"))));
  EXPECT_TRUE(at::equal(parameters[0].parameter.grad(), average));
}

}  // namespace
}  // namespace trainer_lora::distributed
