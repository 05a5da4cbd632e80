// The one place where c10d's exceptions become statuses.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_RUN_COLLECTIVE_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_RUN_COLLECTIVE_H_

#include <exception>
#include <functional>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// Calls `start`, which starts a collective of `group` and returns at once. Use
// it for every collective: c10d's dispatch of one corrupts the heap, once in
// some thousands of calls, when threads of one process start collectives of
// different groups at the same time. Groups of the CPU alone start one after
// the other here. Others are not held up: NCCL may wait for its peers within
// `start`, and threads would then wait for each other.
c10::intrusive_ptr<c10d::Work> StartCollective(
    const c10d::ProcessGroup& group,
    const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

// Calls `call`, which starts a collective or waits for one. `what` says in an
// error who wanted what, such as "DeviceMesh(replicate=2), rank 1: all-reduce
// of 2 gradients". kFailedPrecondition for what the group can't do at all (or
// no longer, as its resources were released), else as StatusFromException;
// after an error the group is broken on this rank.
absl::Status CallCollective(const std::string& what,
                            const std::function<void()>& call);

// Starts a collective of `group` and waits for it. Errors as CallCollective.
absl::Status RunCollective(
    const c10d::ProcessGroup& group, const std::string& what,
    const std::function<c10::intrusive_ptr<c10d::Work>()>& start);

// Whether CUDA tensors of `group` go through NCCL.
bool HasNccl(c10d::ProcessGroup& group);

// What became of the collectives of CUDA tensors that were queued, if they go
// through NCCL: OK until c10d's watchdog has found one that failed
// (kUnavailable) or outlasted the timeout (kDeadlineExceeded) and aborted the
// group. `what` as in CallCollective.
absl::Status CheckCudaBackend(c10d::ProcessGroup& group,
                              const std::string& what);

// What a collective of `group` wrote to `result`, on the CPU: waits for the
// device. Errors of CheckCudaBackend, as the device goes on with undefined
// values after an abort.
absl::StatusOr<at::Tensor> ReadResult(c10d::ProcessGroup& group,
                                      const std::string& what,
                                      const at::Tensor& result);

// What the exception says, without a backtrace; with the last error of NCCL
// where c10d quotes it.
std::string ErrorMessage(const std::exception& exception);

// What an exception of c10d, its store or Gloo says of the peers:
// kDeadlineExceeded for a timeout, kUnavailable for all else, such as a lost
// connection. The message starts with `context`.
absl::Status StatusFromException(const std::exception& exception,
                                 const std::string& context);

// The device on which `group` can exchange small facts: the CPU where it has a
// backend for it.
at::Device MetadataDevice(const c10d::ProcessGroup& group);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_RUN_COLLECTIVE_H_
