// Executes the copies of a load plan: each rank for itself, with several
// threads, or the ranks of a group together, each byte once.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_READER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_READER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "distributed/checkpoint/internal/shard_destination.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"

namespace c10d {
class ProcessGroup;
}  // namespace c10d

namespace trainer_lora::distributed::internal {

// Hears of bytes as they reach their destination; called by one thread at a
// time, but by different ones.
using BytesCallback = std::function<void(int64_t bytes)>;

// Reads `copies` of `checkpoint` into `destinations`, by their targets.
// Memory: at most kMaxSpannedBytes a thread. `meanwhile` runs on the calling
// thread while the others read; its error counts as one of the reading. After
// an error the destinations hold anything.
absl::Status ReadShards(const SafetensorsCheckpoint& checkpoint,
                        absl::Span<const PlannedCopy> copies,
                        absl::Span<const ShardDestination> destinations,
                        int num_threads, const BytesCallback& on_bytes,
                        const std::function<absl::Status()>& meanwhile);

// Collective over `group`, which has a backend for the CPU, and whose errors
// begin with `group_name`. `copies` has what each rank of the group wants, the
// same on all of them; this rank's go to `destinations`. Every byte that
// somebody wants is read by one of those who want it, and sent to the others.
// An error on one rank ends the reading on all, with kAborted on the others.
// Memory: 1 MiB for each rank of the group, of 16 of them at most, and as much
// to pack what ranks want of it in pieces: more if these overlap. It is taken
// before a rank counts on another, so that one that has none left is such an
// error. Returns the bytes that this rank read.
absl::StatusOr<int64_t> ReadShardsOnce(
    const SafetensorsCheckpoint& checkpoint,
    const std::vector<std::vector<PlannedCopy>>& copies,
    absl::Span<const ShardDestination> destinations, c10d::ProcessGroup& group,
    const std::string& group_name, const BytesCallback& on_bytes);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SHARD_READER_H_
