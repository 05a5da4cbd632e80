// WriteSafetensors of safetensors_file.h.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/safetensors_header.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed {
namespace {

// A tensor with its bytes.
struct Chunk {
  const TensorView* tensor;
  absl::string_view bytes;
};

absl::Status TensorError(const TensorView& tensor, absl::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", tensor.name, "\" ", message));
}

// The tensors in the order in which their bytes are written: the widest types
// first, so that each tensor is aligned to its type, then by name.
absl::StatusOr<std::vector<Chunk>> MakeChunks(
    absl::Span<const TensorView> tensors) {
  std::vector<Chunk> chunks;
  std::set<absl::string_view> names;
  for (const TensorView& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return TensorError(tensor, "is there twice");
    }
    if (tensor.name == "__metadata__") {
      return TensorError(tensor, "has a name that the format reserves");
    }
    const std::optional<uint64_t> size =
        internal::TensorByteSize(tensor.dtype, tensor.shape);
    if (!size.has_value()) {
      return TensorError(tensor,
                         absl::StrCat("has the impossible shape [",
                                      absl::StrJoin(tensor.shape, ", "), "]"));
    }
    if (*size > 0 && tensor.data == nullptr) {
      return TensorError(tensor, "has no data");
    }
    chunks.push_back(
        {&tensor, absl::string_view(static_cast<const char*>(tensor.data),
                                    static_cast<size_t>(*size))});
  }
  std::sort(chunks.begin(), chunks.end(), [](const Chunk& a, const Chunk& b) {
    if (a.tensor->dtype != b.tensor->dtype) {
      return a.tensor->dtype > b.tensor->dtype;
    }
    return a.tensor->name < b.tensor->name;
  });
  return chunks;
}

// A file can't say that two tensors are one: who loads it would get two.
absl::Status CheckNoSharedMemory(std::vector<Chunk> chunks) {
  std::stable_sort(chunks.begin(), chunks.end(),
                   [](const Chunk& a, const Chunk& b) {
                     return std::less<>()(a.bytes.data(), b.bytes.data());
                   });
  const Chunk* previous = nullptr;
  for (const Chunk& chunk : chunks) {
    if (chunk.bytes.empty()) continue;
    if (previous != nullptr &&
        std::less<>()(chunk.bytes.data(),
                      previous->bytes.data() + previous->bytes.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensors \"", previous->tensor->name, "\" and \"", chunk.tensor->name,
          "\" share memory: leave one of them out, or copy it"));
    }
    previous = &chunk;
  }
  return absl::OkStatus();
}

// `text` as a JSON string.
absl::StatusOr<std::string> Quote(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a name or an entry of the metadata is not UTF-8: ", error.what()));
  }
}

// The length and the header, padded so that the data begins at a multiple of 8.
absl::StatusOr<std::string> MakeHeader(
    const std::vector<Chunk>& chunks,
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> entries;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      LORA_ASSIGN_OR_RETURN(const std::string quoted_key, Quote(key));
      LORA_ASSIGN_OR_RETURN(const std::string quoted_value, Quote(value));
      pairs.push_back(absl::StrCat(quoted_key, ":", quoted_value));
    }
    entries.push_back(
        absl::StrCat("\"__metadata__\":{", absl::StrJoin(pairs, ","), "}"));
  }
  uint64_t offset = 0;
  for (const Chunk& chunk : chunks) {
    LORA_ASSIGN_OR_RETURN(const std::string name, Quote(chunk.tensor->name));
    const uint64_t end = offset + chunk.bytes.size();
    entries.push_back(absl::StrCat(
        name, ":{\"dtype\":\"", TensorDtypeName(chunk.tensor->dtype),
        "\",\"shape\":[", absl::StrJoin(chunk.tensor->shape, ","),
        "],\"data_offsets\":[", offset, ",", end, "]}"));
    offset = end;
  }
  std::string json = absl::StrCat("{", absl::StrJoin(entries, ","), "}");
  json.resize((json.size() + 7) / 8 * 8, ' ');
  const uint64_t size = json.size();
  if (size > internal::kMaxSafetensorsHeaderSize) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the header would have ", size, " bytes, more than the format's limit ",
        "of ", internal::kMaxSafetensorsHeaderSize));
  }
  return std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + json;
}

absl::Status FileError(absl::string_view action, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat(action, " ", path));
}

// A new file beside the one that it becomes, removed again unless it does.
class TemporaryFile {
 public:
  // In the folder of `target`, since a rename does not cross file systems.
  static absl::StatusOr<TemporaryFile> Create(const std::string& target) {
    static std::atomic<uint64_t> count{0};
    const std::string folder = Folder(target);
    // Another host or a killed process may have left a file of this name.
    for (int attempt = 0; attempt < 100; ++attempt) {
      std::string path = absl::StrCat(folder, "/.safetensors-", getpid(), "-",
                                      count++, ".tmp");
      const int descriptor =
          open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor >= 0) return TemporaryFile(std::move(path), descriptor);
      if (errno != EEXIST) break;
    }
    return FileError("creating a file in", folder);
  }

  TemporaryFile(TemporaryFile&& other) noexcept
      : path_(std::exchange(other.path_, "")),
        descriptor_(std::exchange(other.descriptor_, -1)) {}
  TemporaryFile& operator=(TemporaryFile&&) = delete;

  ~TemporaryFile() {
    if (descriptor_ >= 0) close(descriptor_);
    if (!path_.empty()) unlink(path_.c_str());
  }

  absl::Status Write(absl::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t count = write(descriptor_, bytes.data(), bytes.size());
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return FileError("writing", path_);
      bytes.remove_prefix(count);
    }
    return absl::OkStatus();
  }

  // Makes this file, safe on the disk, the one at `target`.
  absl::Status MoveTo(const std::string& target) {
    if (fsync(descriptor_) != 0) return FileError("flushing", path_);
    // Network file systems report a full disk here at the latest.
    if (close(std::exchange(descriptor_, -1)) != 0) {
      return FileError("closing", path_);
    }
    if (rename(path_.c_str(), target.c_str()) != 0) {
      return FileError("replacing", target);
    }
    path_.clear();
    return FlushFolder(Folder(target));
  }

 private:
  TemporaryFile(std::string path, int descriptor)
      : path_(std::move(path)), descriptor_(descriptor) {}

  static std::string Folder(const std::string& path) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return ".";
    return slash == 0 ? "/" : path.substr(0, slash);
  }

  // So that the rename outlives a loss of power.
  static absl::Status FlushFolder(const std::string& folder) {
    const int descriptor =
        open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return FileError("opening", folder);
    // EINVAL: a file system that does not flush folders.
    absl::Status status;
    if (fsync(descriptor) != 0 && errno != EINVAL) {
      status = FileError("flushing", folder);
    }
    close(descriptor);
    return status;
  }

  std::string path_;
  int descriptor_;
};

}  // namespace

absl::Status WriteSafetensors(
    const std::string& path, absl::Span<const TensorView> tensors,
    const std::map<std::string, std::string>& metadata) {
  LORA_ASSIGN_OR_RETURN(const std::vector<Chunk> chunks, MakeChunks(tensors));
  LORA_RETURN_IF_ERROR(CheckNoSharedMemory(chunks));
  LORA_ASSIGN_OR_RETURN(const std::string header, MakeHeader(chunks, metadata));

  LORA_ASSIGN_OR_RETURN(TemporaryFile file, TemporaryFile::Create(path));
  LORA_RETURN_IF_ERROR(file.Write(header));
  for (const Chunk& chunk : chunks) {
    LORA_RETURN_IF_ERROR(file.Write(chunk.bytes));
  }
  return file.MoveTo(path);
}

}  // namespace trainer_lora::distributed
