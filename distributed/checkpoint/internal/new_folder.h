// Folders that appear whole or not at all.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_NEW_FOLDER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_NEW_FOLDER_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::distributed::internal {

// A folder that is written aside, and removed again unless it was renamed into
// its place.
class NewFolder {
 public:
  // Beside `target`, whose parent must exist, and which may end in slashes, for
  // those whom the umask lets in. kAlreadyExists, which says what to do, if
  // something is at `target`; kUnavailable or kResourceExhausted if no folder
  // can be made.
  static absl::StatusOr<NewFolder> Create(const std::string& target);

  NewFolder(NewFolder&& other) noexcept
      : target_(std::move(other.target_)),
        path_(std::exchange(other.path_, {})) {}
  NewFolder& operator=(NewFolder&&) = delete;
  ~NewFolder();

  // Where `file`, a plain name, is to be written.
  std::string PathOf(absl::string_view file) const;

  // kResourceExhausted if the file system has fewer bytes left.
  absl::Status CheckSpace(uint64_t bytes) const;

  // Writes the file `file` through to the disk.
  absl::Status WriteText(absl::string_view file, const std::string& text) const;

  // Makes it `target`. kAlreadyExists if something is there meanwhile, but
  // where the file system can't tell, an empty folder is replaced. After an
  // error nothing has changed; but if the last step fails, flushing the parent,
  // the folder is in its place, and a loss of power may undo it.
  absl::Status MoveIntoPlace();

 private:
  NewFolder(std::string target, std::string path)
      : target_(std::move(target)), path_(std::move(path)) {}

  std::string target_;
  std::string path_;  // Empty after a move.
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_NEW_FOLDER_H_
