// What a training loop agrees on over a mesh, one number at a time:
//
//   LORA_ASSIGN_OR_RETURN(double stop,
//                         AllReduce(*mesh, interrupted, ReduceOp::kMax));
//   LORA_ASSIGN_OR_RETURN(double loss_sum,
//                         AllReduce(*mesh, loss, ReduceOp::kSum));
#ifndef TRAINER_LORA_DISTRIBUTED_COLLECTIVES_H_
#define TRAINER_LORA_DISTRIBUTED_COLLECTIVES_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "distributed/device_mesh.h"

namespace trainer_lora::distributed {

// What becomes of the ranks' values.
enum class ReduceOp { kSum, kMax };

// The sum or the largest of every rank's `value`, the same bits on every rank.
// Integers are exact up to 2^53. With NaN among the values the sum is NaN; the
// largest is then unspecified. Every rank of the mesh calls it with the same
// `op`. kDeadlineExceeded or kUnavailable, with the mesh and the rank, if a
// peer does not answer in the group's timeout or is lost.
absl::StatusOr<double> AllReduce(const DeviceMesh& mesh, double value,
                                 ReduceOp op);

// Returns when every rank of the mesh has called it. Errors as in AllReduce.
absl::Status Barrier(const DeviceMesh& mesh);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_COLLECTIVES_H_
