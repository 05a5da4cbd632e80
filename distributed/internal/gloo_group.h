// Gloo process groups as they are made in every place: for a job, and for a
// part of its ranks.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_GLOO_GROUP_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_GLOO_GROUP_H_

#include <vector>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed::internal {

// A group of the `size` ranks that meet in `store`, for tensors on `devices`;
// returns when all have. No other group may use the same keys. Errors of
// StatusFromException.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> ConnectGlooGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options,
    const std::vector<at::Device>& devices);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_GLOO_GROUP_H_
