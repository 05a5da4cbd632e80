// Do all ranks mean the same? A collective over different parameters would
// pair the wrong tensors, hang, or end the process inside Gloo.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// Collective over `group`, which errors call `group_name`. Compares a digest of
// `lines`, which contain no newline; `what` names them, such as "comparison of
// 2 parameters". Where the ranks differ, every rank gets the same
// kFailedPrecondition, which names the lines that only some ranks have and
// these ranks: by `names`, an entry a rank, such as mesh.RanksOver(dims) for a
// part of a mesh; without, as `group` does. Errors of RunCollective where a
// peer is lost.
absl::Status CheckRanksAgree(c10d::ProcessGroup& group,
                             const std::string& group_name,
                             const std::string& what,
                             const std::vector<std::string>& lines,
                             std::vector<int64_t> names = {});

// Collective over `group`, which errors call `group_name`: whether `value` is
// true on any rank. `what` names what was tried, for the errors of
// RunCollective where a peer is lost.
absl::StatusOr<bool> IsTrueOnAnyRank(c10d::ProcessGroup& group,
                                     const std::string& group_name,
                                     const std::string& what, bool value);

// Collective over `group`, with names as above. OK if `status` is on every
// rank; else every rank gets the error of the first rank that has one, with
// "rank N: " before its message. kAborted is the status of a rank that stopped
// as another one failed, and counts where no rank has another error.
absl::Status AgreeOnStatus(c10d::ProcessGroup& group,
                           const std::string& group_name,
                           const std::string& what, const absl::Status& status);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
