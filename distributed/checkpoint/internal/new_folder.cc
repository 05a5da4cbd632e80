#include "distributed/checkpoint/internal/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
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
#include "distributed/checkpoint/internal/open_folder.h"
#include "distributed/checkpoint/internal/write_error.h"

namespace trainer_lora::distributed::internal {
namespace {

namespace fs = std::filesystem;

absl::Status ExistsError(const std::string& target) {
  return absl::AlreadyExistsError(
      absl::StrCat(target, " exists: choose another folder"));
}

// False, with errno, if something is at `to`.
bool RenameToNew(const std::string& from, const std::string& to) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(),
                RENAME_NOREPLACE) == 0) {
    return true;
  }
  // Some network file systems can't. There, an empty folder is replaced.
  if (errno != EINVAL && errno != ENOSYS) return false;
  return std::rename(from.c_str(), to.c_str()) == 0;
}

}  // namespace

absl::StatusOr<NewFolder> NewFolder::Create(const std::string& target) {
  absl::string_view rest = target;
  while (absl::ConsumeSuffix(&rest, "/")) {
  }
  const std::string plain(rest);
  std::error_code ignored;
  if (plain.empty() || fs::exists(fs::symlink_status(plain, ignored))) {
    return ExistsError(target);
  }
  static std::atomic<uint64_t> count{0};
  // Another host or a killed process may have left a folder of this name.
  for (int attempt = 0; attempt < 100; ++attempt) {
    std::string path = absl::StrCat(plain, ".tmp-", getpid(), "-", count++);
    if (mkdir(path.c_str(), 0777) == 0) {
      return NewFolder(plain, std::move(path));
    }
    if (errno != EEXIST) break;
  }
  return WriteError(absl::StrCat("cannot make a folder beside ", target));
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
  if (statvfs(path_.c_str(), &space) != 0) return WriteError(path_);
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
  if (stream == nullptr) return WriteError(path);
  const bool written =
      std::fwrite(text.data(), 1, text.size(), stream) == text.size() &&
      std::fflush(stream) == 0 && fsync(fileno(stream)) == 0;
  const absl::Status status = written ? absl::OkStatus() : WriteError(path);
  if (std::fclose(stream) != 0 && status.ok()) return WriteError(path);
  return status;
}

absl::Status NewFolder::MoveIntoPlace() {
  const OpenFolder folder(path_);
  if (!folder.is_open() || !folder.Flush()) return WriteError(path_);
  std::string parent_path = fs::path(target_).parent_path().string();
  if (parent_path.empty()) parent_path = ".";
  const OpenFolder parent(parent_path);
  if (!parent.is_open()) return WriteError(parent_path);
  if (!RenameToNew(path_, target_)) {
    if (errno == EEXIST || errno == ENOTEMPTY) return ExistsError(target_);
    return WriteError(absl::StrCat("cannot rename ", path_, " to ", target_));
  }
  path_.clear();
  return parent.Flush() ? absl::OkStatus() : WriteError(parent_path);
}

}  // namespace trainer_lora::distributed::internal
