// A folder into which something is renamed that must outlive a loss of power.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_OPEN_FOLDER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_OPEN_FOLDER_H_

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace trainer_lora::distributed::internal {

// Opened before the rename, which nothing undoes, and flushed after it.
class OpenFolder {
 public:
  explicit OpenFolder(const std::string& path)
      : descriptor_(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {}
  OpenFolder(const OpenFolder&) = delete;
  OpenFolder& operator=(const OpenFolder&) = delete;
  ~OpenFolder() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  // Just after it was made: false with errno.
  bool is_open() const { return descriptor_ >= 0; }

  // False with errno.
  bool Flush() const {
    // EINVAL: a file system that does not flush folders.
    return fsync(descriptor_) == 0 || errno == EINVAL;
  }

 private:
  const int descriptor_;
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_OPEN_FOLDER_H_
