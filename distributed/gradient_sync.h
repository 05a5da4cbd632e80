// Averages the gradients of replicated parameters over the ranks, after the
// backward passes of a step and before clipping:
//
//   std::vector<DistributedParameter> parameters = {
//       {"to_q.lora_A", lora_a, ParameterLayout::Replicated(mesh)}};
//   LORA_RETURN_IF_ERROR(BroadcastParameters(*mesh, parameters));  // once
//   loss.backward();
//   LORA_ASSIGN_OR_RETURN(int64_t synchronized,
//                         AverageReplicatedGradients(*mesh, parameters));
//
// Both functions are collective over the whole mesh: every rank calls them,
// whatever its loss used and even if it has no parameter. The ranks first
// compare the names, shapes, dtypes and kinds of device of what they are about
// to send, in order. Where these differ, every rank returns the same
// kFailedPrecondition, which says what is on which ranks alone; so does a
// parameter or gradient that can't be sent, for which the rank that has it
// would alone return kInvalidArgument. A peer that is lost or does not answer
// in the group's timeout: kUnavailable or kDeadlineExceeded with the mesh and
// the first parameter of the failed collective. After any error the parameters
// and gradients are what they were.
//
// A parameter takes part if its layout has a mesh and replicates it over some
// dimension; it then has to be the mesh that is passed, and all of its
// dimensions, else kInvalidArgument. Others are skipped. A parameter may be
// listed twice.
#ifndef TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_
#define TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"

namespace trainer_lora::distributed {

struct DistributedParameter {
  // The same on every rank.
  std::string name;
  // A handle to this rank's parameter.
  at::Tensor parameter;
  ParameterLayout layout;
};

// Replaces the gradient of each replicated parameter that requires one by its
// average over all ranks of the mesh: the sum, in the parameter's dtype,
// divided by their number. kInvalidArgument for a layout that asks for another
// reduction over one of the dimensions. A rank without the gradient contributes
// zeros, and has the gradient afterwards. Writes into existing gradients, so
// views of them stay valid, and keeps their dtype. Doing it twice changes
// nothing; a micro-batch may be accumulated on top in between. Returns the
// number of parameters that were synchronized, which is the same on every rank.
absl::StatusOr<int64_t> AverageReplicatedGradients(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters);

// Copies rank `root`'s values of the replicated parameters into those of every
// other rank, in place. `root` is in [0, mesh.size()), else kInvalidArgument.
absl::Status BroadcastParameters(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    int root = 0);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_
