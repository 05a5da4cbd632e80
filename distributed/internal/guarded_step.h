// Steps whose exceptions are statuses, and that all ranks end alike.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_GUARDED_STEP_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_GUARDED_STEP_H_

#include <exception>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "distributed/device_mesh.h"

namespace trainer_lora::distributed::internal {

// Whether one of ATen's allocators threw it, as memory ran out. That of the CPU
// throws no type of its own.
bool IsOutOfMemory(const std::exception& error);

// Calls `step`. An exception becomes kInternal, or kResourceExhausted where
// memory ran out, also that of a device, with `context` before its message.
absl::Status GuardedStep(const std::string& context,
                         const std::function<absl::Status()>& step);

// The same and, unless `mesh` is null, collective over it: all ranks return the
// error of the first that has one. `what` names the step where a peer is lost.
absl::Status AgreedStep(const DeviceMesh* mesh, const std::string& what,
                        const std::string& context,
                        const std::function<absl::Status()>& step);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_GUARDED_STEP_H_
