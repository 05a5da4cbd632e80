// Reads a small file that somebody else wrote:
//
//   LORA_ASSIGN_OR_RETURN(const std::string json,
//                         ReadFile(path, kMaxSafetensorsIndexSize));
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_READ_FILE_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_READ_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace trainer_lora::distributed::internal {

// The bytes of the file at `path`. Messages begin with the path.
//   kInvalidArgument  it is no regular file; a pipe is not waited for
//   kDataLoss         it has more than `max_bytes`, or reading fails
//   that of errno     it can't be opened, such as kNotFound, kPermissionDenied
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_READ_FILE_H_
