// The process group of a job, from what its launcher says:
//
//   LORA_ASSIGN_OR_RETURN(config::LaunchEnvironment environment,
//                         config::ReadLaunchEnvironment());
//   LORA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::ProcessGroup> group,
//                         InitProcessGroup(environment));
//
// A group is shut down by letting go of its last reference: that closes the
// connections and, on rank 0, the store, without a word to the peers. So ranks
// that end normally meet in a Barrier first. After an error, just let go: the
// peers get kUnavailable from the collective that they are in. Letting go
// inside a collective that still runs waits until that ends or times out.
#ifndef TRAINER_LORA_DISTRIBUTED_PROCESS_GROUP_H_
#define TRAINER_LORA_DISTRIBUTED_PROCESS_GROUP_H_

#include <chrono>
#include <string>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/libtorch_version.h"
#include "distributed/nccl_process_group.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed {

// How a rank joins.
struct ProcessGroupOptions {
  // How long a rank waits for the others, in the start and in each collective.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);

  // A name or address of this machine on which its peers reach it. Empty:
  // 127.0.0.1 in InitProcessGroup if the master is localhost, 127.* or ::1;
  // else the interfaces in the environment variable GLOO_SOCKET_IFNAME if that
  // is set, else the address of the machine's host name, or loopback if it has
  // none. InitProcessGroup makes a world of one on 127.0.0.1 whatever this is.
  std::string bind_address;

  // The device on which this rank computes, as GetLocalTorchDevice() says. The
  // ranks are all on the CPU, or each on a CUDA device of its own.
  at::Device device = at::kCPU;
  // For a CUDA device.
  NcclOptions nccl;
};

// Joins the job with a group of Gloo for CPU tensors and, on a CUDA device, of
// NCCL for CUDA tensors, which is bound to it; returns when all ranks have.
// They meet in a TCP store at the master's address, which rank 0 serves unless
// the launcher's agent does. With a loopback master and no `bind_address`, Gloo
// stays on loopback as well. A world of one needs neither master nor network.
//
// The agent's store outlives a restart, so the ranks of each attempt meet under
// keys of their own, by restart_count, and by how often a rank has called this
// in the attempt. On several hosts the agents may count differently: the ranks
// then don't meet, kDeadlineExceeded; nor do they after a call that only some
// ranks made. One that failed counts as well if it reached the store.
//
// Errors name the address and the rank. kUnavailable: no store at the address,
// or rank 0 can't serve one there. kDeadlineExceeded or kUnavailable: not all
// ranks came in time, or one was lost on the way. kFailedPrecondition: no
// address of this machine is where the options say. For a CUDA device also
// those of AddNcclBackend.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> InitProcessGroup(
    const config::LaunchEnvironment& environment,
    const ProcessGroupOptions& options = {});

// A Gloo group of the `size` ranks that meet in `store`; returns when all have.
// No other group may use the same keys (c10d::PrefixStore gives each its own).
// The store's timeout is set to that of the options, whose `device` does not
// count: AddNcclBackend() adds NCCL. kInvalidArgument unless 0 <= rank < size;
// else errors as in InitProcessGroup.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> CreateGlooProcessGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const ProcessGroupOptions& options = {});

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_PROCESS_GROUP_H_
