#include "distributed/checkpoint/internal/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace trainer_lora::distributed::internal {

namespace {

absl::StatusOr<std::string> ReadOpen(int descriptor, const std::string& path,
                                     uint64_t max_bytes) {
  struct stat file_status;
  if (fstat(descriptor, &file_status) != 0) {
    return absl::ErrnoToStatus(errno, path);
  }
  if (!S_ISREG(file_status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file"));
  }
  const uint64_t size = file_status.st_size;
  // Before anything of this size is allocated.
  if (size > max_bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": it has ", size, " bytes, more than ", max_bytes));
  }
  std::string bytes(size, '\0');
  for (size_t i = 0; i < bytes.size();) {
    const ssize_t count = read(descriptor, &bytes[i], bytes.size() - i);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      return absl::DataLossError(absl::StrCat(path, ": reading it failed"));
    }
    i += count;
  }
  return bytes;
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes) {
  // Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return absl::ErrnoToStatus(errno, path);
  absl::StatusOr<std::string> bytes = ReadOpen(descriptor, path, max_bytes);
  close(descriptor);
  return bytes;
}

}  // namespace trainer_lora::distributed::internal
