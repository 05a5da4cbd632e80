// NCCL for the CUDA tensors of a process group, beside Gloo for its CPU
// tensors. InitProcessGroup adds it for a rank on a CUDA device:
//
//   ProcessGroupOptions options;
//   LORA_ASSIGN_OR_RETURN(options.device, GetLocalTorchDevice());
//   LORA_ASSIGN_OR_RETURN(auto group, InitProcessGroup(environment, options));
//
// A collective of CUDA tensors returns when it is queued on a stream of NCCL's
// own, and waiting for it makes the current stream wait, not the host. So what
// goes wrong on the device is known later: a collective that fails or outlasts
// the timeout is aborted by c10d's watchdog thread, after which the device goes
// on with undefined values, and every later collective of the group returns an
// error; the next GradientSync::Sync() says whether it was a timeout. What NCCL
// itself says of an error is in the message of the Status.
//
// c10d's environment variables (TORCH_NCCL_...) have their effect. It ends a
// process that keeps a failed group for long
// (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC).
//
// Letting go of the last reference to a group aborts what still runs on the
// device, and waits for no peer. c10d::ProcessGroup::shutdown() instead lets it
// finish: all ranks call it, and none does after an error.
#ifndef TRAINER_LORA_DISTRIBUTED_NCCL_PROCESS_GROUP_H_
#define TRAINER_LORA_DISTRIBUTED_NCCL_PROCESS_GROUP_H_

#include <chrono>

#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "distributed/libtorch_version.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed {

// How a rank uses NCCL.
struct NcclOptions {
  // Runs collectives on a stream of high priority, so that one which becomes
  // ready does not wait behind the kernels of a backward pass.
  bool high_priority_stream = true;

  // Lets the watchdog end the process after a failed collective, as c10d does
  // by default, for a launcher that then starts the job again. The environment
  // variable TORCH_NCCL_ASYNC_ERROR_HANDLING wins where it is set.
  bool end_process_on_error = false;
};

// Collective over `group`. Makes NCCL the backend of its CUDA tensors, binds it
// to `device`, which is this rank's alone, and connects to the other ranks, all
// before it returns. They meet in the group's store. `timeout` is that of each
// collective, and not of NCCL's connecting, which has none: a rank that is lost
// in it may leave the others waiting. What fails before is an error on every
// rank where the group has a backend for the CPU, that of the first rank which
// has one. After an error the group is as it was, but its store is used up:
// another try needs a group in another one.
//
//   kInvalidArgument     `device` is no CUDA device with an index
//   kFailedPrecondition  this machine has no GPU, or the group has a backend
//                        for CUDA already
//   kUnimplemented       this is a build for CPU
//   kUnavailable, kDeadlineExceeded  a peer is lost or does not come, or NCCL
//                        fails, such as for two ranks on one device
absl::Status AddNcclBackend(c10d::ProcessGroup& group, at::Device device,
                            std::chrono::milliseconds timeout,
                            const NcclOptions& options = {});

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_NCCL_PROCESS_GROUP_H_
