// Process groups of a part of a group's ranks.
//
// c10d's own ProcessGroup::splitGroup is not used: with Gloo it gives the new
// group the parent's options object and writes the part's ranks into it, so
// that the next split of the parent reads past the end of that list; and two
// splits with the same ranks meet under the same keys of the store.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// A group of the `ranks` of `parent`, ascending and with this process among
// them, on the same devices and with copies of its options. Every rank of the
// parent calls it equally often, each for its own part of one partition of the
// ranks: the parts meet in the parent's store, under the number of the call.
// Returns when all of `ranks` have called. kUnimplemented for a parent with
// another backend than Gloo and, for CUDA, NCCL; kFailedPrecondition for one
// without a store or backend; else errors of StatusFromException.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> CreateSubgroup(
    c10d::ProcessGroup& parent, const std::vector<int64_t>& ranks);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_
