// Makes the gradients of distributed parameters complete, after the backward
// passes of a step and before clipping: averages over data, sums over tensor
// parallelism, as each parameter's layout says. No rank can skip it, whatever
// layers its loss used.
//
//   std::vector<DistributedParameter> parameters = {
//       {"to_q.lora_A", lora_a, ParameterLayout::Replicated(mesh)}};
//   LORA_RETURN_IF_ERROR(BroadcastParameters(*mesh, parameters));  // once
//   LORA_ASSIGN_OR_RETURN(auto sync, GradientSync::Create(mesh, parameters));
//   for (...) {
//     sync->ZeroGrad();  // instead of optimizer.zero_grad()
//     loss.backward();
//     LORA_ASSIGN_OR_RETURN(int64_t synchronized, sync->Sync());
//     // clip, optimizer step
//   }
//
// ReduceGradients() does the same once, and keeps nothing. Profilers see the
// range `trainer_lora::gradient_sync`, and `trainer_lora::gradient_sync::start`
// and `trainer_lora::gradient_sync::finish` of each buffer.
//
// All of these are collective over the whole mesh: every rank calls them in the
// same order, even if it has no parameter. Where the ranks' parameters differ,
// every rank returns the same kFailedPrecondition, which says what is on which
// ranks alone; so it does for a parameter that can't be sent, for which the
// rank that has it would alone return kInvalidArgument, and where a rank has no
// memory for the buffers, for which it would return kResourceExhausted. A peer
// that is lost or does not answer in the group's timeout: kUnavailable or
// kDeadlineExceeded with the mesh and the first parameter of the failed
// collective.
//
// A parameter takes part if it requires grad and its layout, which must be of
// the mesh that is passed, reduces its gradient over some dimension or has
// parts with several replicas. Others are skipped and not counted. One that is
// listed twice is reduced once.
//
// The rows of a part with replicas are summed over the ranks that hold them
// (and averaged over data as the others): they travel as the whole part, zero
// but for the rank's chunk, in buffers of their own behind the rest.
#ifndef TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_
#define TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_bucket.h"
#include "distributed/parameter_layout.h"

namespace trainer_lora::distributed {

// A parameter, and how it lies on a mesh.
struct DistributedParameter {
  // The same on every rank.
  std::string name;
  // A handle to this rank's parameter.
  at::Tensor parameter;
  // Where it lies, and what makes its gradient complete. Valid.
  ParameterLayout layout;
};

// How gradients are reduced: the same on every rank.
struct GradientSyncOptions {
  // The gradients lie in buffers of at most this size (distributed/
  // gradient_bucket.h), each of which is one collective.
  int64_t bucket_bytes = kDefaultBucketBytes;
  // Reduces gradients of a narrower type in float32, rounded once afterwards.
  bool reduce_in_float32 = false;
  // Starts the reduction of a buffer during the backward pass, as soon as all
  // of its gradients are there and those of the buffers before it; the order is
  // the same on every rank. The results are the same bits as without. Each
  // parameter then gets one backward pass between Sync() calls; further ones,
  // for accumulation, go before it into a NoSyncScope. From that pass to Sync()
  // the ranks make no other collective over the mesh: how much of the reduction
  // has started by then differs between them. So a pass outside of a
  // NoSyncScope is followed by Sync() on every rank, also where the step is
  // dropped.
  bool overlap_backward = false;
};

// What the last Sync() did on this rank.
struct GradientSyncStatistics {
  // Whose gradients were made complete: what Sync() returned.
  int64_t parameters = 0;
  // The sum over the collectives of what this rank passed to each.
  int64_t bytes = 0;
  // Those that reduced a buffer.
  int64_t collectives = 0;
  // Buffers whose reduction started during the backward pass.
  int64_t overlapped_buckets = 0;
  // Gradients that were no view of their buffer, and were copied into it.
  int64_t copied_gradients = 0;
  // Of the parameters that had no gradient, which counted as zero.
  std::vector<std::string> zero_filled;
  // From the call of Sync() to its return, on the host.
  double seconds = 0;
};

// Keeps the gradients of a set of parameters in a few flat buffers, and reduces
// these. A parameter's gradient is a view of its buffer after Create(),
// ZeroGrad() and Sync(): the backward pass accumulates in place, and nothing is
// copied. A gradient that was replaced meanwhile is copied into its place; one
// that was set to none counts as zero.
//
// Not thread-safe. Parameters keep their gradients when this is destroyed.
class GradientSync {
 public:
  // Collective. Compares the parameters over the mesh, plans the buffers and
  // gives each parameter that takes part its view, with the gradient that it
  // had. kInvalidArgument for a null mesh, a bucket size below 1 or a parameter
  // that has a hook for accumulated gradients already, which overlap needs.
  static absl::StatusOr<std::unique_ptr<GradientSync>> Create(
      std::shared_ptr<const DeviceMesh> mesh,
      absl::Span<const DistributedParameter> parameters,
      const GradientSyncOptions& options = {});

  ~GradientSync();
  GradientSync(const GradientSync&) = delete;
  GradientSync& operator=(const GradientSync&) = delete;

  // Collective. Reduces all gradients; afterwards each parameter has one, the
  // same on all ranks that hold it. Returns the number of parameters.
  //
  // A second call without ZeroGrad() in between averages again, which changes
  // nothing but rounding, and a micro-batch may be accumulated on top before
  // it. A summed gradient would be summed twice: kFailedPrecondition; not
  // noticed if a new tensor took the place of the view meanwhile, as it does
  // after `grad = grad + g` or a backward pass with create_graph.
  // kFailedPrecondition also if a parameter's shape, dtype, device or
  // requires_grad is another than at Create(): that wants Replace(). The ranks
  // that reduce a gradient with this one then get an error too, unless all of
  // its reductions have started with overlap: then at the next collective.
  // After any error the gradients are undefined, and all later calls fail until
  // Replace(), after which ZeroGrad() goes first.
  //
  // On CUDA it queues everything behind the current stream, and the host does
  // not wait for the device. What becomes known there alone is returned by the
  // next Sync(): the error of another rank, until which the gradients that it
  // reduced are NaN on all ranks, and that of a collective which the watchdog
  // of NCCL aborted. That call waits until the device has done the reductions
  // of the one before; with overlap_backward so does the backward pass before
  // it, which starts nothing where there is such an error.
  absl::StatusOr<int64_t> Sync();

  // Makes every gradient zero, as a view of its buffer. Not collective. With
  // overlap, Sync() goes before it where a backward pass may have started a
  // reduction. Without, this changes nothing and Sync() fails until Replace(),
  // which works only if all ranks had started the same buffers: the others
  // still wait for this rank.
  void ZeroGrad();

  // Collective. Goes on with another set of parameters, or with the same after
  // they changed; gradients, NoSyncScopes and statistics stay, but for the
  // gradient of a parameter that has another shape now, which becomes zero.
  // Works after an error too, as far as the process group does. Errors as in
  // Create(); this object is then as it was. On CUDA also what the next Sync()
  // would return of the last one, and this object is then as after that.
  absl::Status Replace(absl::Span<const DistributedParameter> parameters);

  // While one lives, backward passes accumulate alone, and start no reduction.
  class NoSyncScope {
   public:
    // `sync` must outlive the scope.
    explicit NoSyncScope(GradientSync& sync);
    ~NoSyncScope();
    NoSyncScope(const NoSyncScope&) = delete;
    NoSyncScope& operator=(const NoSyncScope&) = delete;

   private:
    GradientSync& sync_;
  };

  // Of the last Sync(); zero before the first.
  const GradientSyncStatistics& statistics() const;

  // The buffers, as GradientBucketPlan prints them.
  std::string ToString() const;

 private:
  class Impl;
  friend absl::StatusOr<int64_t> ReduceGradients(
      const DeviceMesh& mesh,
      absl::Span<const DistributedParameter> parameters);
  explicit GradientSync(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Collective. Reduces the gradients of `parameters` once, through buffers of
// its own. Writes into existing gradients, so views of them stay valid, and
// keeps their dtype. Averaging twice changes nothing but rounding; summing
// twice does, and is not noticed. Returns the number of parameters. After an
// error the gradients are what they were: on CUDA this waits for the device.
absl::StatusOr<int64_t> ReduceGradients(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters);

// Collective. Copies rank `root`'s values of the parameters that are replicated
// over the whole mesh into those of every other rank, in place, whether they
// require grad or not. One that is sharded over all dimensions is skipped, and
// one over some of them kInvalidArgument. One that can't be written in place,
// as it was made in inference mode or is expanded, is kFailedPrecondition.
// After an error the parameters are what they were: on CUDA this waits for the
// device. `root` is in [0, mesh.size()), else kInvalidArgument.
absl::Status BroadcastParameters(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    int root = 0);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_GRADIENT_SYNC_H_
