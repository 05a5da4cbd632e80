#include "distributed/checkpoint/internal/write_error.h"

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::distributed::internal {

absl::Status WriteError(absl::string_view what) {
  const int error = errno;
  const absl::Status status = absl::ErrnoToStatus(error, what);
  return absl::IsResourceExhausted(status) || error == EFBIG
             ? absl::ResourceExhaustedError(status.message())
             : absl::UnavailableError(status.message());
}

}  // namespace trainer_lora::distributed::internal
