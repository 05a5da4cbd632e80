// One flat buffer of gradients on its way through the collectives that complete
// them.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_REDUCTION_BUCKET_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_REDUCTION_BUCKET_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/gradient_bucket.h"
#include "distributed/parameter_layout.h"

namespace c10d {
class ProcessGroup;
class Work;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// The sums, one after the other, and the division that complete a gradient.
struct Reduction {
  // None has a single rank. One where the mesh has a group over all that is
  // reduced; else one for the sum and one for the average, or one a dimension.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  int64_t divisor = 1;
};

Reduction ReductionOf(const ParameterLayout& layout);

// For each slice of `bucket` its view of `flat`, of the shape of
// like[slice.index].
std::vector<at::Tensor> SliceViews(const GradientBucket& bucket,
                                   const at::Tensor& flat,
                                   const std::vector<at::Tensor>& like);

// Not thread-safe.
class ReductionBucket {
 public:
  // `like` has, for each index of a slice, a tensor of the gradient's shape,
  // dtype and device. Errors name the bucket by its `index`; `context` says in
  // them who reduces, such as "DeviceMesh(replicate=2), rank 1".
  ReductionBucket(size_t index, GradientBucket bucket, Reduction reduction,
                  const std::vector<at::Tensor>& like, bool reduce_in_float32,
                  const std::string& context);

  const GradientBucket& bucket() const { return bucket_; }
  // In the order of the bucket's slices. They stay the same tensors.
  const std::vector<at::Tensor>& views() const { return views_; }

  void Zero() { flat_.zero_(); }

  // What each gradient is divided by before its sum; 1 if the sum is divided
  // afterwards, in Finish(). Before is as exact where it only lowers exponents,
  // by a power of two and in a type with the exponents of float32 (subnormal
  // numbers aside), and has the gradient in the cache where it has just been
  // made.
  int64_t divisor_before() const { return divisor_before_; }

  // Starts the first collective, with gradients that are divided already if
  // `is_divided`. `healthy` is false on a rank that can't answer
  // for its gradients: it takes part all the same, so that no other waits for
  // it, and they all learn of it.
  absl::Status Start(bool healthy, bool is_divided);

  // Waits, goes through the other collectives and divides. Returns whether
  // every rank was healthy. Start() must have gone before.
  //
  // On CUDA all of this is queued, and the host waits for nothing: the answer
  // is true, and LastFinish() has the right one. The gradients are NaN then.
  absl::StatusOr<bool> Finish();

  // What the last Finish() would have returned if it had waited, errors on the
  // device included. Waits for what it queued, so call it a step later. True if
  // Finish() gave its answer itself, or was not called.
  absl::StatusOr<bool> LastFinish();

  // To be called where a kernel that writes one of the gradients was queued.
  void NoteStream();
  // Makes the current stream wait for the streams of all such calls: before
  // Start(), and before what else reads or writes the gradients there.
  void WaitForStreams();

  int64_t num_collectives() const {
    return static_cast<int64_t>(reduction_.groups.size());
  }
  // What one collective sends.
  int64_t bytes() const {
    return reduced_.numel() * static_cast<int64_t>(reduced_.element_size());
  }

 private:
  absl::Status StartStage(size_t stage);

  GradientBucket bucket_;
  Reduction reduction_;
  std::string what_;
  int64_t divisor_before_;
  // The gradients, and after them the number of ranks that are not healthy.
  at::Tensor flat_;
  std::vector<at::Tensor> views_;
  // What is sent: flat_ itself, or a copy of it in float32.
  at::Tensor reduced_;
  at::Tensor unhealthy_ranks_;  // A view of reduced_.
  c10::intrusive_ptr<c10d::Work> work_;
  // NCCL averages on the way: as exact as divisor_before_, and no pass over the
  // buffer.
  bool is_averaged_by_nccl_ = false;

  // On CUDA alone: the streams on which gradients were written, and a copy of
  // unhealthy_ranks_ in pinned memory, which is there after the event.
  std::vector<c10::Stream> streams_;
  at::Tensor host_unhealthy_ranks_;
  std::optional<c10::Event> answered_;
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_REDUCTION_BUCKET_H_
