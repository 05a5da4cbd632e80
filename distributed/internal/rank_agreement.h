// Do all ranks mean the same? A collective over different parameters would
// pair the wrong tensors, hang, or end the process inside Gloo.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "distributed/device_mesh.h"

namespace trainer_lora::distributed::internal {

// Collective over a mesh of one dimension. Compares a digest of `lines`, which
// contain no newline; `what` names them, such as "comparing 2 parameters".
// Where the ranks differ, every rank gets the same kFailedPrecondition, which
// names the lines that only some ranks have and these ranks. Errors of
// RunCollective where a peer is lost.
absl::Status CheckRanksAgree(const DeviceMesh& mesh, const std::string& what,
                             const std::vector<std::string>& lines);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_RANK_AGREEMENT_H_
