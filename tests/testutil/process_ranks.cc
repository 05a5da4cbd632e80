#include "tests/testutil/process_ranks.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace trainer_lora::testutil {
namespace {

constexpr char kScenario[] = "PROCESS_RANKS_SCENARIO";

// Where a rank finds the write end of its pipe: beyond what else is open.
constexpr int kMarksDescriptor = 200;

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
                uint16_t port, int marks) {
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
  // Where the machine's GPU driver is, which GPUs the test may use, and where
  // tools/coverage.sh has programs count.
  for (const char* const name : {"CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH",
                                 "GCOV_PREFIX", "GCOV_PREFIX_STRIP"}) {
    const char* const value = std::getenv(name);
    if (value != nullptr)
      environment.push_back(std::string(name) + "=" + value);
  }
  std::vector<char*> argv, envp;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  for (std::string& variable : environment) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, marks, kMarksDescriptor);
  pid_t pid = -1;
  EXPECT_EQ(
      posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), envp.data()),
      0);
  posix_spawn_file_actions_destroy(&actions);
  return pid;
}

}  // namespace

ProcessRanks::ProcessRanks(const std::string& scenario, int world_size) {
  const uint16_t port = PickPort();
  for (int rank = 0; rank < world_size; ++rank) {
    int ends[2] = {-1, -1};
    EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
    Rank process;
    process.pid = StartRank(scenario, rank, world_size, port, ends[1]);
    process.marks = ends[0];
    close(ends[1]);
    ranks_.push_back(process);
  }
}

ProcessRanks::~ProcessRanks() {
  for (int rank = 0; rank < ranks_.size(); ++rank) Signal(rank, SIGKILL);
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    Wait(rank);
    close(ranks_[rank].marks);
  }
}

void ProcessRanks::WaitForMark(int rank) {
  char mark = 0;
  EXPECT_EQ(read(ranks_.at(rank).marks, &mark, 1), 1)
      << "rank " << rank << " ended";
}

void ProcessRanks::Signal(int rank, int signal) {
  const Rank& process = ranks_.at(rank);
  // A pid below 1 would mean a whole group of processes.
  if (process.ended || process.pid < 1) return;
  EXPECT_EQ(kill(process.pid, signal), 0);
}

void ProcessRanks::WaitUntilStopped(int rank) {
  int status = 0;
  EXPECT_EQ(waitpid(ranks_.at(rank).pid, &status, WUNTRACED),
            ranks_.at(rank).pid);
  EXPECT_TRUE(WIFSTOPPED(status)) << "rank " << rank << " ended";
}

int ProcessRanks::Wait(int rank) {
  Rank& process = ranks_.at(rank);
  if (process.ended || process.pid < 1) return process.status;
  EXPECT_EQ(waitpid(process.pid, &process.status, 0), process.pid);
  process.ended = true;
  return process.status;
}

testing::AssertionResult ProcessRanks::EndedWell(int rank) {
  const int status = Wait(rank);
  if (ranks_.at(rank).ended && WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure()
         << "rank " << rank << " ended with wait status " << status;
}

bool IsRankProcess() { return std::getenv(kScenario) != nullptr; }

std::string RankScenario() {
  const char* const scenario = std::getenv(kScenario);
  return scenario == nullptr ? "" : scenario;
}

void MakeMark() {
  const char mark = 1;
  EXPECT_EQ(write(kMarksDescriptor, &mark, 1), 1);
}

}  // namespace trainer_lora::testutil
