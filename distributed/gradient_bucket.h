// Plans the flat buffers in which gradients are reduced: which gradient lies in
// which buffer, and where. Knows no tensor and no process group.
//
//   const GradientBucketKey averaged = {"data", "", "Float", 4, "cpu"};
//   const GradientBucketKey summed = {"data", "tensor", "Float", 4, "cpu"};
//   LORA_ASSIGN_OR_RETURN(GradientBucketPlan plan,
//                         PlanGradientBuckets({{"q.lora_A", 100, summed},
//                                              {"q.lora_B", 200, averaged},
//                                              {"k.lora_B", 300, averaged}}));
//   plan.ToString();
//   // 2 buckets, 3 gradients, 2496 bytes
//   // bucket 0: average over data, Float on cpu, 2048 bytes
//   //   q.lora_B [0, 200)
//   //   k.lora_B [208, 508)
//   // bucket 1: average over data, sum over tensor, Float on cpu, 448 bytes
//   //   q.lora_A [0, 100)
#ifndef TRAINER_LORA_DISTRIBUTED_GRADIENT_BUCKET_H_
#define TRAINER_LORA_DISTRIBUTED_GRADIENT_BUCKET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "config/language_version.h"

namespace trainer_lora::distributed {

// What gradients must have in common to lie in one buffer. The strings mean
// nothing here: equal ones are the same.
struct GradientBucketKey {
  // The ranks over which the gradient is averaged, such as the names of mesh
  // dimensions. Empty for none.
  std::string average_over;
  // Those over which it is summed, likewise.
  std::string sum_over;
  // The type of an element, such as Float.
  std::string dtype;
  // The bytes of an element of `dtype`: 1, 2, 4, 8 or 16.
  int64_t element_size = 0;
  // Where the buffer is, such as cpu or cuda:0.
  std::string device;
};

// A gradient that is to be reduced.
struct GradientSpec {
  // The same on every rank, for ToString() alone.
  std::string name;
  // The number of elements, which may be 0.
  int64_t numel = 0;
  // It lies with others of the same key.
  GradientBucketKey key;
};

// Where a gradient lies in its buffer: elements [offset, offset + numel).
struct GradientSlice {
  // The index of the GradientSpec.
  int64_t index = 0;
  // In elements.
  int64_t offset = 0;
  // The elements of the gradient, without the padding behind it.
  int64_t numel = 0;
  // That of the GradientSpec.
  std::string name;
};

// One buffer.
struct GradientBucket {
  // What all of its gradients have in common.
  GradientBucketKey key;
  // In elements, with the padding after each slice. Whoever makes the buffer
  // fills it with zeros, so that the padding adds nothing to a sum or norm.
  int64_t numel = 0;
  // In the order of the specs.
  std::vector<GradientSlice> slices;
};

// All buffers.
struct GradientBucketPlan {
  // In the order in which their reductions start: the same on every rank, as
  // the ranks would else wait for each other.
  std::vector<GradientBucket> buckets;

  // A line for the plan, for each bucket and for each slice, as in the example
  // above. Ranks whose text is equal reduce the same buffers in the same order.
  std::string ToString() const;
};

// Each gradient starts on a multiple of this, counted from the start of its
// buffer: a cache line, and the widest vector register. at::empty aligns the
// buffer itself as much. Kernels then take their vectorized paths, which want
// 16 bytes on a GPU, and threads that write neighboring gradients share no
// line.
inline constexpr int64_t kGradientAlignmentBytes = 64;

// As in PyTorch's DistributedDataParallel: large enough for the bandwidth of
// the network, small enough to start while the backward pass still runs.
inline constexpr int64_t kDefaultBucketBytes = int64_t{25} << 20;

// Distributes the gradients of parameters, which are listed in the order in
// which the forward pass uses them, over buckets of at most `bucket_bytes`,
// padding included. A gradient that is larger has a bucket of its own.
//
// The backward pass finishes the last parameters first. So buckets are filled
// from the last gradient to the first, a bucket for each key at a time, and
// reduced in the order in which they become complete: one is when the first of
// its parameters is. The smaller bucket that is left over then holds the first
// parameters, whose reduction no backward pass can hide.
//
// Depends on the arguments alone; takes time linear in the number of gradients
// (for a bounded number of keys). kInvalidArgument, which names the gradient,
// for a negative number of elements, another element size than the key allows
// or more bytes than 2^62 in all; also for bucket_bytes < 1.
absl::StatusOr<GradientBucketPlan> PlanGradientBuckets(
    absl::Span<const GradientSpec> gradients,
    int64_t bucket_bytes = kDefaultBucketBytes);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_GRADIENT_BUCKET_H_
