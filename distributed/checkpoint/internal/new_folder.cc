#include "distributed/checkpoint/internal/new_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::distributed::internal {
namespace {

namespace fs = std::filesystem;

absl::Status ErrnoStatus(const std::string& what) {
  const std::error_code error(errno, std::generic_category());
  const std::string message = absl::StrCat(what, ": ", error.message());
  return error.value() == ENOSPC || error.value() == EDQUOT
             ? absl::ResourceExhaustedError(message)
             : absl::UnavailableError(message);
}

absl::Status SyncFolder(const std::string& folder) {
  const int descriptor =
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return ErrnoStatus(folder);
  // EINVAL: a file system that does not flush folders.
  const bool synced = fsync(descriptor) == 0 || errno == EINVAL;
  const absl::Status status = synced ? absl::OkStatus() : ErrnoStatus(folder);
  close(descriptor);
  return status;
}

}  // namespace

absl::StatusOr<NewFolder> NewFolder::Create(const std::string& target) {
  const std::string plain(absl::StripSuffix(target, "/"));
  std::error_code ignored;
  if (plain.empty() || fs::exists(fs::symlink_status(plain, ignored))) {
    return absl::AlreadyExistsError(
        absl::StrCat(target, " exists: choose another folder"));
  }
  std::string path = plain + ".tmp.XXXXXX";
  if (mkdtemp(path.data()) == nullptr) {
    return ErrnoStatus(absl::StrCat("cannot make a folder beside ", target));
  }
  return NewFolder(plain, std::move(path));
}

NewFolder::~NewFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

std::string NewFolder::PathOf(absl::string_view file) const {
  return absl::StrCat(path_, "/", file);
}

absl::Status NewFolder::CheckSpace(uint64_t bytes) const {
  struct statvfs space;
  if (statvfs(path_.c_str(), &space) != 0) return ErrnoStatus(path_);
  const uint64_t available = uint64_t{space.f_bavail} * space.f_frsize;
  if (bytes <= available) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(target_, " takes ", bytes, " bytes, and only ", available,
                   " are left on its file system"));
}

absl::Status NewFolder::WriteText(absl::string_view file,
                                  const std::string& text) const {
  const std::string path = PathOf(file);
  std::FILE* stream = std::fopen(path.c_str(), "we");
  if (stream == nullptr) return ErrnoStatus(path);
  const bool written =
      std::fwrite(text.data(), 1, text.size(), stream) == text.size() &&
      std::fflush(stream) == 0 && fsync(fileno(stream)) == 0;
  const absl::Status status = written ? absl::OkStatus() : ErrnoStatus(path);
  if (std::fclose(stream) != 0 && status.ok()) return ErrnoStatus(path);
  return status;
}

absl::Status NewFolder::MoveIntoPlace() {
  // mkdtemp made it for the owner alone.
  std::error_code ignored;
  fs::permissions(path_,
                  fs::perms::group_read | fs::perms::group_exec |
                      fs::perms::others_read | fs::perms::others_exec,
                  fs::perm_options::add, ignored);
  LORA_RETURN_IF_ERROR(SyncFolder(path_));
  // Fails where another process has put a file or a full folder meanwhile.
  if (std::rename(path_.c_str(), target_.c_str()) != 0) {
    return ErrnoStatus(absl::StrCat("cannot rename ", path_, " to ", target_));
  }
  path_.clear();
  const std::string parent = fs::path(target_).parent_path().string();
  return SyncFolder(parent.empty() ? "." : parent);
}

}  // namespace trainer_lora::distributed::internal
