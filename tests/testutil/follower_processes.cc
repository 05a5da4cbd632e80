#include "tests/testutil/follower_processes.h"

#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "config/internal/status_macros.h"
#include "distributed/nccl_process_group.h"
#include "distributed/process_group.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace trainer_lora::testutil {
namespace {

constexpr char kLoopback[] = "127.0.0.1";
constexpr std::chrono::minutes kTimeout(2);
constexpr std::chrono::seconds kTimeToEnd(10);

// How a follower is told its place.
constexpr char kFlagFormat[] =
    "--follower=rank %d of %d, store at port %d, cuda %d";

struct Place {
  int rank = 0;
  int world_size = 1;
  // 0: rank 0, which serves the store, takes any free port.
  int port = 0;
  int cuda = 0;  // Whether each rank has a CUDA device.
};

bool ParsePlace(int argc, char** argv, Place& place) {
  return argc == 2 &&
         std::sscanf(argv[1], kFlagFormat, &place.rank, &place.world_size,
                     &place.port, &place.cuda) == 4;
}

absl::Status StartFollower(const Place& place, pid_t& pid) {
  char flag[100];
  std::snprintf(flag, sizeof(flag), kFlagFormat, place.rank, place.world_size,
                place.port, place.cuda);
  std::string program = "/proc/self/exe";
  char* const arguments[] = {program.data(), flag, nullptr};
  if (posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments,
                  environ) != 0) {
    return absl::InternalError("can't start this program again");
  }
  return absl::OkStatus();
}

c10::intrusive_ptr<c10d::TCPStore> MakeStore(const Place& place) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(place.port);
  options.isServer = place.rank == 0;
  options.waitWorkers = false;
  options.timeout = kTimeout;
  return c10::make_intrusive<c10d::TCPStore>(kLoopback, options);
}

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> Join(
    const c10::intrusive_ptr<c10d::Store>& store, const Place& place) {
  distributed::ProcessGroupOptions options;
  options.timeout = kTimeout;
  options.bind_address = kLoopback;
  LORA_ASSIGN_OR_RETURN(auto group,
                        distributed::CreateGlooProcessGroup(
                            store, place.rank, place.world_size, options));
  if (place.cuda != 0) {
    const at::Device device(at::kCUDA,
                            static_cast<at::DeviceIndex>(place.rank));
    LORA_RETURN_IF_ERROR(distributed::AddNcclBackend(*group, device, kTimeout));
  }
  return group;
}

void EndFollower(pid_t pid, std::chrono::steady_clock::time_point deadline) {
  while (waitpid(pid, nullptr, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

bool IsFollower(int argc, char** argv) {
  Place place;
  return ParsePlace(argc, argv, place);
}

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> JoinAsFollower(
    int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Place place;
  if (!ParsePlace(argc, argv, place)) {
    return absl::InvalidArgumentError("not started as a follower");
  }
  try {
    return Join(MakeStore(place), place);
  } catch (const std::exception& exception) {
    return absl::UnavailableError(exception.what());
  }
}

absl::StatusOr<std::unique_ptr<FollowerProcesses>> FollowerProcesses::Start(
    int world_size, at::DeviceType device_type) {
  std::unique_ptr<FollowerProcesses> ranks(new FollowerProcesses);
  try {
    Place place = {0, world_size, 0, device_type == at::kCUDA};
    const c10::intrusive_ptr<c10d::TCPStore> store = MakeStore(place);
    place.port = store->getPort();
    for (int rank = 1; rank < world_size; ++rank) {
      pid_t pid = -1;
      const absl::Status started =
          StartFollower({rank, world_size, place.port, place.cuda}, pid);
      if (!started.ok()) return started;
      ranks->followers_.push_back(pid);
    }
    absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> group =
        Join(store, place);
    if (!group.ok()) return group.status();
    ranks->group_ = *std::move(group);
  } catch (const std::exception& exception) {
    return absl::UnavailableError(exception.what());
  }
  return ranks;
}

FollowerProcesses::~FollowerProcesses() {
  group_.reset();
  const auto deadline = std::chrono::steady_clock::now() + kTimeToEnd;
  for (const pid_t pid : followers_) EndFollower(pid, deadline);
}

}  // namespace trainer_lora::testutil
