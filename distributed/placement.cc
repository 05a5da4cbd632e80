#include "distributed/placement.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace trainer_lora::distributed {

std::string Placement::ToString() const {
  if (!is_replicate()) return absl::StrCat("Shard(", shard_dim_, ")");
  switch (reduction_) {
    case GradientReduction::kNone:
      return "Replicate(none)";
    case GradientReduction::kAverage:
      return "Replicate(average)";
    case GradientReduction::kSum:
      return "Replicate(sum)";
  }
  return "";
}

Chunk ChunkOf(int64_t size, int64_t num_chunks, int64_t index) {
  const int64_t full_size = size / num_chunks + (size % num_chunks != 0);
  const int64_t offset = std::min(size, full_size * index);
  return {offset, std::min(full_size, size - offset)};
}

}  // namespace trainer_lora::distributed
