#include "distributed/checkpoint/internal/read_file.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace trainer_lora::distributed::internal {

namespace fs = std::filesystem;

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) return absl::ErrnoToStatus(error.value(), path);
  // Opening a pipe would wait for somebody to write to it.
  if (!fs::is_regular_file(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file"));
  }
  const uintmax_t size = fs::file_size(path, error);
  if (error) return absl::ErrnoToStatus(error.value(), path);
  // Before anything of this size is allocated.
  if (size > max_bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": it has ", size, " bytes, more than ", max_bytes));
  }
  std::string bytes(static_cast<size_t>(size), '\0');
  std::ifstream stream(path, std::ios::binary);
  if (!stream.read(&bytes[0], static_cast<std::streamsize>(bytes.size()))) {
    return absl::DataLossError(absl::StrCat(path, ": reading it failed"));
  }
  return bytes;
}

}  // namespace trainer_lora::distributed::internal
