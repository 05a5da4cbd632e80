#include "distributed/process_group.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/status/status.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

ProcessGroupOptions TimeoutOf(std::chrono::milliseconds timeout) {
  ProcessGroupOptions options;
  options.timeout = timeout;
  return options;
}

// A store as torchrun's agent hosts it, on a port that the system picks.
c10::intrusive_ptr<c10d::TCPStore> HostAgentStore() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

config::LaunchEnvironment Environment(int rank, int world_size, uint16_t port) {
  config::LaunchEnvironment environment;
  environment.rank = rank;
  environment.world_size = world_size;
  environment.local_rank = rank;
  environment.local_world_size = world_size;
  environment.master_addr = "127.0.0.1";
  environment.master_port = port;
  return environment;
}

// A port on loopback that is taken, and on which nobody answers.
class TakenPort {
 public:
  TakenPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(socket_, generic, length), 0);
    EXPECT_EQ(getsockname(socket_, generic, &length), 0);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { close(socket_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;

  void Listen() { EXPECT_EQ(listen(socket_, 1), 0); }
  uint16_t port() const { return port_; }

 private:
  int socket_;
  uint16_t port_;
};

class InitProcessGroupTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { testutil::AllowRanksOnThreads(); }
};

TEST_F(InitProcessGroupTest, AWorldOfOneNeedsNoLauncher) {
  LORA_ASSERT_OK_AND_ASSIGN(auto group,
                            InitProcessGroup(config::LaunchEnvironment()));
  EXPECT_EQ(group->getRank(), 0);
  EXPECT_EQ(group->getSize(), 1);
  std::vector<at::Tensor> tensors = {at::tensor({3.0f})};
  group->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].item<float>(), 3.0f);
}

TEST_F(InitProcessGroupTest, RanksMeetInTheStoreOfTheAgent) {
  const auto store = HostAgentStore();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&store, rank] {
      config::LaunchEnvironment environment =
          Environment(rank, 3, store->getPort());
      environment.agent_hosts_store = true;
      LORA_ASSERT_OK_AND_ASSIGN(auto group, InitProcessGroup(environment));
      EXPECT_EQ(group->getRank(), rank);
      EXPECT_EQ(group->getSize(), 3);
      LORA_ASSERT_OK_AND_ASSIGN(auto mesh, DeviceMesh::Create(group));
      LORA_ASSERT_OK_AND_ASSIGN(const double sum,
                                AllReduce(*mesh, rank + 1, ReduceOp::kSum));
      EXPECT_EQ(sum, 6);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Starts a job of two, makes a mesh, and leaves what it left in the store.
void RunAttempt(int restart_count, uint16_t port) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([=] {
      config::LaunchEnvironment environment = Environment(rank, 2, port);
      environment.agent_hosts_store = true;
      environment.restart_count = restart_count;
      // Rank 0 is there first, and looks for rank 1.
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      LORA_ASSERT_OK_AND_ASSIGN(
          auto group,
          InitProcessGroup(environment, TimeoutOf(std::chrono::seconds(20))));
      LORA_ASSERT_OK_AND_ASSIGN(
          auto mesh, DeviceMesh::Create(group, {{"a", 2}, {"b", 1}}));
      LORA_ASSERT_OK_AND_ASSIGN(const double sum,
                                AllReduce(*mesh, rank + 1, ReduceOp::kSum));
      EXPECT_EQ(sum, 3);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(InitProcessGroupTest, AnAttemptDoesNotMeetTheOneBefore) {
  const auto store = HostAgentStore();
  for (int restart_count = 0; restart_count < 3; ++restart_count) {
    SCOPED_TRACE(restart_count);
    RunAttempt(restart_count, store->getPort());
  }
}

TEST_F(InitProcessGroupTest, ACallDoesNotMeetTheOneBefore) {
  const auto store = HostAgentStore();
  for (int call = 0; call < 3; ++call) {
    SCOPED_TRACE(call);
    RunAttempt(/*restart_count=*/0, store->getPort());
  }
}

// Some containers have none.
bool HasIpv6Loopback() {
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  const bool has =
      fd >= 0 && bind(fd, reinterpret_cast<const sockaddr*>(&address),
                      sizeof(address)) == 0;
  if (fd >= 0) close(fd);
  return has;
}

// Without loopback, Gloo would ask for an interface that is not there.
TEST_F(InitProcessGroupTest, StaysOnLoopbackWithAMasterThere) {
  ASSERT_EQ(setenv("GLOO_SOCKET_IFNAME", "no_such_if", /*overwrite=*/1), 0);
  const auto store = HostAgentStore();
  std::vector<std::string> addresses = {"127.0.0.1", "localhost"};
  if (HasIpv6Loopback()) addresses.emplace_back("::1");
  int restart_count = 0;  // Each of them meets by itself.
  for (const std::string& address : addresses) {
    SCOPED_TRACE(address);
    ++restart_count;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        config::LaunchEnvironment environment =
            Environment(rank, 2, store->getPort());
        environment.master_addr = address;
        environment.agent_hosts_store = true;
        environment.restart_count = restart_count;
        EXPECT_THAT(
            InitProcessGroup(environment, TimeoutOf(std::chrono::seconds(20))),
            IsOk());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ASSERT_EQ(unsetenv("GLOO_SOCKET_IFNAME"), 0);
}

TEST_F(InitProcessGroupTest, NobodyAtTheAddress) {
  const TakenPort silent;
  EXPECT_THAT(
      InitProcessGroup(Environment(1, 2, silent.port()),
                       TimeoutOf(std::chrono::milliseconds(500))),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr("rank 1 of 2"),
                     HasSubstr("127.0.0.1:" + std::to_string(silent.port())),
                     HasSubstr("check that rank 0 is running"),
                     Not(HasSubstr("Exception raised")))));
}

TEST_F(InitProcessGroupTest, RankZeroFindsThePortTaken) {
  TakenPort taken;
  taken.Listen();
  EXPECT_THAT(
      InitProcessGroup(Environment(0, 2, taken.port()),
                       TimeoutOf(std::chrono::seconds(5))),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr("rank 0 of 2"),
                     HasSubstr("127.0.0.1:" + std::to_string(taken.port())),
                     HasSubstr("the port is free"))));
}

TEST_F(InitProcessGroupTest, APeerThatNeverComes) {
  const auto store = HostAgentStore();
  config::LaunchEnvironment environment = Environment(0, 2, store->getPort());
  environment.agent_hosts_store = true;
  EXPECT_THAT(
      InitProcessGroup(environment, TimeoutOf(std::chrono::milliseconds(500))),
      StatusIs(
          absl::StatusCode::kDeadlineExceeded,
          AllOf(HasSubstr("rank 0 of 2"),
                HasSubstr("127.0.0.1:" + std::to_string(store->getPort())))));
}

TEST_F(InitProcessGroupTest, ACudaDeviceNeedsABuildForCudaAndAGpu) {
  if (at::detail::getCUDAHooks().deviceCount() > 0) {
    GTEST_SKIP() << "this machine has a GPU";
  }
  ProcessGroupOptions options;
  options.device = at::Device(at::kCUDA, 0);
#ifdef USE_C10D_NCCL
  EXPECT_THAT(
      InitProcessGroup(config::LaunchEnvironment(), options),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("rank 0 of 1: connecting NCCL on cuda:0"),
                     HasSubstr("no GPUs found"))));
#else
  EXPECT_THAT(
      InitProcessGroup(config::LaunchEnvironment(), options),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("--config=cuda")));
#endif
}

TEST(CreateGlooProcessGroupTest, RefusesARankOutsideTheGroup) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const int rank : {-1, 2}) {
    EXPECT_THAT(CreateGlooProcessGroup(store, rank, /*size=*/2),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("got " + std::to_string(rank))));
  }
}

TEST(CreateGlooProcessGroupTest, ReportsAnAddressThatIsNotThisMachines) {
  ProcessGroupOptions options = TimeoutOf(std::chrono::seconds(1));
  options.bind_address = "192.0.2.1";  // Reserved for documentation.
  EXPECT_THAT(
      CreateGlooProcessGroup(c10::make_intrusive<c10d::HashStore>(),
                             /*rank=*/0, /*size=*/1, options),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("192.0.2.1")));
}

}  // namespace
}  // namespace trainer_lora::distributed
