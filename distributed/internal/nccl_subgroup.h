// NCCL for a group of some ranks of another.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_NCCL_SUBGROUP_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_NCCL_SUBGROUP_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// As AddNcclBackend, for a group of some ranks of `parent`, with the device and
// options of the backend that `parent` has for CUDA: kUnimplemented unless that
// is NCCL. `global_ranks` names the ranks of `group` in c10d's logs. A parent
// that is bound to no device, as a trainer's own may be, gives a group that
// connects at its first collective.
absl::Status AddNcclBackendOf(c10d::ProcessGroup& parent,
                              const std::vector<uint64_t>& global_ranks,
                              c10d::ProcessGroup& group);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_NCCL_SUBGROUP_H_
