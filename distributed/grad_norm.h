// Clips gradients to a total norm, after they were synchronized:
//
//   LORA_ASSIGN_OR_RETURN(double norm, ClipGradNorm(parameters, 1.0));
//   if (!std::isfinite(norm)) { /* skip this step, on every rank alike */ }
#ifndef TRAINER_LORA_DISTRIBUTED_GRAD_NORM_H_
#define TRAINER_LORA_DISTRIBUTED_GRAD_NORM_H_

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"

namespace trainer_lora::distributed {

// Returns the L2 norm, summed up in double precision, of the gradients of
// `parameters` as one vector, as it was before clipping. Above `max_norm` the
// gradients are scaled in place by max_norm / (norm + 1e-6), as PyTorch's
// clip_grad_norm_ does. Parameters without a gradient are skipped; each is
// listed once.
//
// A norm that is infinite or NaN leaves the gradients as they are; the caller
// then skips the optimizer step. For replicated gradients all ranks get the
// same result without a collective, if they run with equal thread counts.
//
// kInvalidArgument unless max_norm > 0; infinity only measures.
absl::StatusOr<double> ClipGradNorm(absl::Span<const at::Tensor> parameters,
                                    double max_norm);

// The same for parameters that lie on a mesh, sharded or not: the norm is that
// of the whole gradient, in which a value that several ranks hold counts once,
// and it is the same bits on every rank. So every rank scales by the same
// factor; and if a gradient of any rank is infinite or NaN, every rank gets a
// norm that is not finite, and can skip the step. Gradients are complete, as
// GradientSync leaves them.
//
// Collective over the mesh: every rank calls it, even if it has no parameter.
// kInvalidArgument also for a parameter whose layout is not of `mesh`, not
// valid or not that of the gradient's rows: the other ranks then get NaN.
// kUnavailable or kDeadlineExceeded if a peer is lost or does not answer.
absl::StatusOr<double> ClipGradNorm(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    double max_norm);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_GRAD_NORM_H_
