// Process groups of a part of a group's ranks.
//
// c10d's own ProcessGroup::splitGroup is not used: with Gloo it gives the new
// group the parent's options object and writes the part's ranks into it, so
// that the next split of the parent reads past the end of that list; and two
// splits with the same ranks meet under the same keys of the store.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed::internal {

// Makes groups of some ranks of `parent`, which outlives it. Every rank of the
// parent has as many makers, one after the other, and each makes the same kinds
// of groups. They meet in the parent's store, under the number of the maker: an
// error in one group leaves the numbers of the next maker in step.
class SubgroupMaker {
 public:
  explicit SubgroupMaker(c10d::ProcessGroup& parent) : parent_(parent) {}

  // A group of `ranks` of the parent, ascending and with this process among
  // them, on the same devices and with copies of its options. The groups of one
  // `kind` have no rank in common. Returns when all of `ranks` have called.
  // kUnimplemented for a parent with another backend than Gloo and, for CUDA,
  // NCCL; kFailedPrecondition for one without a store or backend; else errors
  // of StatusFromException.
  absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> Create(
      const std::string& kind, const std::vector<int64_t>& ranks);

 private:
  c10d::ProcessGroup& parent_;
  // Where the ranks meet, null before the first group.
  c10::intrusive_ptr<c10d::Store> place_;
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_SUBGROUP_H_
