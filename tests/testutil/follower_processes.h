// The ranks of a job as processes, for what is to be timed as in a job: this
// program is rank 0 and starts itself again as the others.
//
//   int main(int argc, char** argv) {
//     if (IsFollower(argc, argv)) {
//       auto group = JoinAsFollower(argc, argv);
//       // collectives, until rank 0 says that it was the last
//       return group.ok() ? 0 : 1;
//     }
//     auto followers = FollowerProcesses::Start(2);
//     // the same collectives on (*followers)->group()
//   }
#ifndef TRAINER_LORA_TESTS_TESTUTIL_FOLLOWER_PROCESSES_H_
#define TRAINER_LORA_TESTS_TESTUTIL_FOLLOWER_PROCESSES_H_

#include <sys/types.h>

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/core/DeviceType.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::testutil {

// Whether this process was started by FollowerProcesses.
bool IsFollower(int argc, char** argv);

// The group, on loopback, of a process that FollowerProcesses started. The
// process is killed if the one that started it ends.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> JoinAsFollower(
    int argc, char** argv);

class FollowerProcesses {
 public:
  // Starts the ranks 1 to `world_size` - 1 and joins them. For CUDA, the group
  // of each rank is bound to the device of the rank's number, with NCCL beside
  // Gloo. Call it on the main thread.
  static absl::StatusOr<std::unique_ptr<FollowerProcesses>> Start(
      int world_size, at::DeviceType device_type = at::kCPU);

  // Lets go of the group and waits for the others, who by then are about to
  // end; kills those that do not.
  ~FollowerProcesses();
  FollowerProcesses(const FollowerProcesses&) = delete;
  FollowerProcesses& operator=(const FollowerProcesses&) = delete;

  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }

 private:
  FollowerProcesses() = default;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<pid_t> followers_;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_FOLLOWER_PROCESSES_H_
