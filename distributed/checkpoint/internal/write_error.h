// What went wrong with a file or folder that is being written.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_WRITE_ERROR_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_WRITE_ERROR_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::distributed::internal {

// Of the system call that has just failed, from errno: kResourceExhausted where
// the disk, a quota or a limit of the process is full, else kUnavailable, so
// that the codes that tell of the tensors tell of nothing else.
absl::Status WriteError(absl::string_view what);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_WRITE_ERROR_H_
