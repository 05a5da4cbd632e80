// Do all ranks mean the same? A collective over different parameters would
// pair the wrong tensors, hang, or end the process inside Gloo.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// Collective over `group`, which errors call `group_name`. Compares a digest of
// `lines`, which contain no newline; `what` names them, such as "comparison of
// 2 parameters". Where the ranks differ, every rank gets the same
// kFailedPrecondition, which names the lines that only some ranks have and
// these ranks. Errors of RunCollective where a peer is lost.
absl::Status CheckRanksAgree(c10d::ProcessGroup& group,
                             const std::string& group_name,
                             const std::string& what,
                             const std::vector<std::string>& lines);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
