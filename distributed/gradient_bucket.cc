#include "distributed/gradient_bucket.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::distributed {
namespace {

constexpr int64_t kMaxTotalBytes = int64_t{1} << 62;

struct KeyLess {
  static auto Tie(const GradientBucketKey& key) {
    return std::tie(key.average_over, key.sum_over, key.dtype, key.element_size,
                    key.device);
  }
  bool operator()(const GradientBucketKey& a,
                  const GradientBucketKey& b) const {
    return Tie(a) < Tie(b);
  }
};

// The bytes of the gradient with the padding after it. Correct for what
// CheckGradients() lets through.
int64_t PaddedBytes(const GradientSpec& gradient) {
  const int64_t bytes = gradient.numel * gradient.key.element_size;
  return (bytes + kGradientAlignmentBytes - 1) / kGradientAlignmentBytes *
         kGradientAlignmentBytes;
}

absl::Status CheckGradients(absl::Span<const GradientSpec> gradients) {
  int64_t bytes_left = kMaxTotalBytes;
  for (const GradientSpec& gradient : gradients) {
    const int64_t element_size = gradient.key.element_size;
    if (element_size != 1 && element_size != 2 && element_size != 4 &&
        element_size != 8 && element_size != 16) {
      return absl::InvalidArgumentError(absl::StrCat(
          gradient.name, ": the size of an element must be 1, 2, 4, 8 or 16 ",
          "bytes, is ", element_size));
    }
    if (gradient.numel < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          gradient.name, " can't have ", gradient.numel, " elements"));
    }
    if (gradient.numel > bytes_left / element_size ||
        PaddedBytes(gradient) > bytes_left) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the gradients up to ", gradient.name, " exceed 2^62 bytes"));
    }
    bytes_left -= PaddedBytes(gradient);
  }
  return absl::OkStatus();
}

// Distributes the gradients, last one first; the slices have no offsets yet.
std::vector<GradientBucket> FillBuckets(
    absl::Span<const GradientSpec> gradients, int64_t bucket_bytes) {
  struct OpenBucket {
    int64_t index = -1;
    int64_t bytes = 0;
  };
  std::vector<GradientBucket> buckets;
  std::map<GradientBucketKey, OpenBucket, KeyLess> open_buckets;
  for (int64_t i = static_cast<int64_t>(gradients.size()) - 1; i >= 0; --i) {
    const GradientSpec& gradient = gradients[i];
    const int64_t bytes = PaddedBytes(gradient);
    OpenBucket alone;
    OpenBucket& open =
        bytes > bucket_bytes ? alone : open_buckets[gradient.key];
    if (open.index < 0 || bytes > bucket_bytes - open.bytes) {
      open = {static_cast<int64_t>(buckets.size()), 0};
      buckets.emplace_back().key = gradient.key;
    }
    open.bytes += bytes;
    buckets[open.index].slices.push_back(
        {i, /*offset=*/0, gradient.numel, gradient.name});
  }
  return buckets;
}

// Lays the slices one after the other, in the order of the gradients.
void SetOffsets(GradientBucket& bucket) {
  std::reverse(bucket.slices.begin(), bucket.slices.end());
  const int64_t alignment = kGradientAlignmentBytes / bucket.key.element_size;
  for (GradientSlice& slice : bucket.slices) {
    slice.offset = bucket.numel;
    bucket.numel += (slice.numel + alignment - 1) / alignment * alignment;
  }
}

int64_t Bytes(const GradientBucket& bucket) {
  return bucket.numel * bucket.key.element_size;
}

}  // namespace

absl::StatusOr<GradientBucketPlan> PlanGradientBuckets(
    absl::Span<const GradientSpec> gradients, int64_t bucket_bytes) {
  if (bucket_bytes < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the bytes of a bucket must be at least 1, are ", bucket_bytes));
  }
  LORA_RETURN_IF_ERROR(CheckGradients(gradients));
  GradientBucketPlan plan;
  plan.buckets = FillBuckets(gradients, bucket_bytes);
  for (GradientBucket& bucket : plan.buckets) SetOffsets(bucket);
  std::sort(plan.buckets.begin(), plan.buckets.end(),
            [](const GradientBucket& a, const GradientBucket& b) {
              return a.slices.front().index > b.slices.front().index;
            });
  return plan;
}

std::string GradientBucketPlan::ToString() const {
  int64_t gradients = 0;
  int64_t bytes = 0;
  std::string lines;
  for (int64_t i = 0; i < buckets.size(); ++i) {
    const GradientBucket& bucket = buckets[i];
    gradients += bucket.slices.size();
    bytes += Bytes(bucket);
    absl::StrAppend(&lines, "\nbucket ", i, ": ");
    if (!bucket.key.average_over.empty()) {
      absl::StrAppend(&lines, "average over ", bucket.key.average_over, ", ");
    }
    if (!bucket.key.sum_over.empty()) {
      absl::StrAppend(&lines, "sum over ", bucket.key.sum_over, ", ");
    }
    absl::StrAppend(&lines, bucket.key.dtype, " on ", bucket.key.device, ", ",
                    Bytes(bucket), " bytes");
    for (const GradientSlice& slice : bucket.slices) {
      absl::StrAppend(&lines, "\n  ", slice.name, " [", slice.offset, ", ",
                      slice.offset + slice.numel, ")");
    }
  }
  return absl::StrCat(buckets.size(), " buckets, ", gradients, " gradients, ",
                      bytes, " bytes", lines);
}

}  // namespace trainer_lora::distributed
