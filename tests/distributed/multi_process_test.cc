// Ranks as real processes: this test starts itself once a rank, with torchrun's
// variables, as the disabled test at the end.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
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
#include "tests/testutil/status_matchers.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

constexpr char kScenario[] = "MULTI_PROCESS_TEST_SCENARIO";
constexpr char kEndTogether[] = "end together";
constexpr char kRankOneIsKilled[] = "rank 1 is killed";
constexpr char kGrid[] = "grid";

// A port that was free a moment ago.
uint16_t PickPort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(bind(fd, generic, length), 0);
  EXPECT_EQ(getsockname(fd, generic, &length), 0);
  close(fd);
  return ntohs(address.sin_port);
}

pid_t StartRank(const std::string& scenario, int rank, int world_size,
                uint16_t port) {
  std::vector<std::string> arguments = {"/proc/self/exe",
                                        "--gtest_filter=*DISABLED_Rank",
                                        "--gtest_also_run_disabled_tests"};
  std::vector<std::string> environment = {
      std::string(kScenario) + "=" + scenario,
      "RANK=" + std::to_string(rank),
      "LOCAL_RANK=" + std::to_string(rank),
      "WORLD_SIZE=" + std::to_string(world_size),
      "LOCAL_WORLD_SIZE=" + std::to_string(world_size),
      "MASTER_ADDR=127.0.0.1",
      "MASTER_PORT=" + std::to_string(port),
      "OMP_NUM_THREADS=1"};
  std::vector<char*> argv, envp;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  for (std::string& variable : environment) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  pid_t pid = -1;
  EXPECT_EQ(
      posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), envp.data()),
      0);
  return pid;
}

// Runs the ranks to their end; returns their wait statuses.
std::vector<int> RunProcesses(const std::string& scenario, int world_size) {
  const uint16_t port = PickPort();
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world_size; ++rank) {
    pids.push_back(StartRank(scenario, rank, world_size, port));
  }
  std::vector<int> statuses;
  for (const pid_t pid : pids) {
    int status = -1;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    statuses.push_back(status);
  }
  return statuses;
}

TEST(MultiProcessTest, RanksAverageAndEndTogether) {
  const std::vector<int> statuses = RunProcesses(kEndTogether, 3);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_TRUE(WIFEXITED(statuses[rank]) && WEXITSTATUS(statuses[rank]) == 0)
        << "rank " << rank << " ended with wait status " << statuses[rank];
  }
}

TEST(MultiProcessTest, GroupsOfAMeshMeetInTheStoreOfTheJob) {
  const std::vector<int> statuses = RunProcesses(kGrid, 4);
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(WIFEXITED(statuses[rank]) && WEXITSTATUS(statuses[rank]) == 0)
        << "rank " << rank << " ended with wait status " << statuses[rank];
  }
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
  const std::vector<int> statuses = RunProcesses(kRankOneIsKilled, 3);
  EXPECT_TRUE(WIFSIGNALED(statuses[1]) && WTERMSIG(statuses[1]) == SIGKILL);
  for (const int rank : {0, 2}) {
    EXPECT_TRUE(WIFEXITED(statuses[rank]) && WEXITSTATUS(statuses[rank]) == 0)
        << "rank " << rank << " ended with wait status " << statuses[rank];
  }
}

TEST(MultiProcessTest, DISABLED_Rank) {
  const char* const scenario = std::getenv(kScenario);
  if (scenario == nullptr) GTEST_SKIP() << "runs in the other tests' processes";
  alarm(60);  // A rank that hangs ends with a signal, which is a failure.

  LORA_ASSERT_OK_AND_ASSIGN(config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  ProcessGroupOptions options;
  options.timeout = std::chrono::seconds(20);
  LORA_ASSERT_OK_AND_ASSIGN(auto group, InitProcessGroup(environment, options));
  if (scenario == std::string(kGrid)) {
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

  if (scenario == std::string(kEndTogether)) {
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
