#include "distributed/checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <limits>
#include <map>
#include <memory>
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
#include "distributed/checkpoint/internal/open_folder.h"
#include "distributed/checkpoint/internal/safetensors_header.h"
#include "distributed/checkpoint/internal/write_error.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed {
namespace {

absl::Status TensorError(absl::string_view name, absl::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", name, "\" ", message));
}

absl::Status CheckNames(const std::vector<TensorSpec>& tensors) {
  std::set<absl::string_view> names;
  for (const TensorSpec& tensor : tensors) {
    if (!names.insert(tensor.name).second) {
      return TensorError(tensor.name, "is there twice");
    }
    if (tensor.name == internal::kMetadataName) {
      return TensorError(tensor.name, "has a name that the format reserves");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ByteSize(const std::string& name, TensorDtype dtype,
                                  const std::vector<int64_t>& shape) {
  absl::StatusOr<uint64_t> size = internal::TensorByteSize(dtype, shape);
  if (size.ok()) return size;
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", name, "\": ", size.status().message()));
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

// What comes before the tensors, and how much they are.
struct Preamble {
  std::string bytes;  // The length and the header.
  uint64_t data_size;
};

// Padded so that the data begins at a multiple of 8.
absl::StatusOr<Preamble> MakePreamble(
    const std::vector<TensorSpec>& sorted_tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> entries;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      LORA_ASSIGN_OR_RETURN(const std::string quoted_key, Quote(key));
      LORA_ASSIGN_OR_RETURN(const std::string quoted_value, Quote(value));
      pairs.push_back(absl::StrCat(quoted_key, ":", quoted_value));
    }
    entries.push_back(absl::StrCat("\"", internal::kMetadataName, "\":{",
                                   absl::StrJoin(pairs, ","), "}"));
  }
  uint64_t offset = 0;
  for (const TensorSpec& tensor : sorted_tensors) {
    LORA_ASSIGN_OR_RETURN(const std::string name, Quote(tensor.name));
    LORA_ASSIGN_OR_RETURN(const uint64_t size,
                          ByteSize(tensor.name, tensor.dtype, tensor.shape));
    const uint64_t end = offset + size;
    if (end > std::numeric_limits<int64_t>::max()) {
      return TensorError(tensor.name, "makes the file larger than 2^63 bytes");
    }
    entries.push_back(
        absl::StrCat(name, ":{\"dtype\":\"", TensorDtypeName(tensor.dtype),
                     "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
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
  return Preamble{
      std::string(reinterpret_cast<const char*>(&size), sizeof(size)) + json,
      offset};
}

// Checks and sorts `tensors`.
absl::StatusOr<Preamble> Prepare(
    std::vector<TensorSpec>& tensors,
    const std::map<std::string, std::string>& metadata) {
  LORA_RETURN_IF_ERROR(CheckNames(tensors));
  std::sort(tensors.begin(), tensors.end(), IsWrittenBefore);
  return MakePreamble(tensors, metadata);
}

absl::Status FileError(absl::string_view action, const std::string& path) {
  return internal::WriteError(absl::StrCat(action, " ", path));
}

absl::StatusOr<absl::string_view> Bytes(const TensorView& tensor) {
  LORA_ASSIGN_OR_RETURN(const uint64_t size,
                        ByteSize(tensor.name, tensor.dtype, tensor.shape));
  if (size > 0 && tensor.data == nullptr) {
    return TensorError(tensor.name, "has no data");
  }
  return absl::string_view(static_cast<const char*>(tensor.data),
                           static_cast<size_t>(size));
}

using BytesByName = std::map<absl::string_view, absl::string_view>;

// A file can't say that two tensors are one: who loads it would get two.
absl::Status CheckNoSharedMemory(const BytesByName& tensors) {
  std::vector<const BytesByName::value_type*> by_address;
  for (const auto& tensor : tensors) {
    if (!tensor.second.empty()) by_address.push_back(&tensor);
  }
  std::stable_sort(by_address.begin(), by_address.end(),
                   [](const auto* a, const auto* b) {
                     return std::less<>()(a->second.data(), b->second.data());
                   });
  const BytesByName::value_type* previous = nullptr;
  for (const auto* tensor : by_address) {
    if (previous != nullptr &&
        std::less<>()(tensor->second.data(),
                      previous->second.data() + previous->second.size())) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensors \"", previous->first, "\" and \"", tensor->first,
          "\" share memory: leave one of them out, or copy it"));
    }
    previous = tensor;
  }
  return absl::OkStatus();
}

}  // namespace

// A new file beside the one that it becomes, removed again unless it does.
class SafetensorsWriter::TemporaryFile {
 public:
  // In the folder of `target`, since a rename does not cross file systems.
  static absl::StatusOr<std::unique_ptr<TemporaryFile>> Create(
      const std::string& target) {
    static std::atomic<uint64_t> count{0};
    const std::string folder = Folder(target);
    // Another host or a killed process may have left a file of this name.
    for (int attempt = 0; attempt < 100; ++attempt) {
      std::string path = absl::StrCat(folder, "/.safetensors-", getpid(), "-",
                                      count++, ".tmp");
      const int descriptor =
          open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor >= 0) {
        return std::unique_ptr<TemporaryFile>(
            new TemporaryFile(std::move(path), descriptor));
      }
      if (errno != EEXIST) break;
    }
    return FileError("creating a file in", folder);
  }

  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

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
    const std::string folder_path = Folder(target);
    const internal::OpenFolder folder(folder_path);
    if (!folder.is_open()) return FileError("opening", folder_path);
    if (rename(path_.c_str(), target.c_str()) != 0) {
      return FileError("replacing", target);
    }
    path_.clear();
    return folder.Flush() ? absl::OkStatus()
                          : FileError("flushing", folder_path);
  }

 private:
  TemporaryFile(std::string path, int descriptor)
      : path_(std::move(path)), descriptor_(descriptor) {}

  static std::string Folder(const std::string& path) {
    const size_t slash = path.rfind('/');
    if (slash == std::string::npos) return ".";
    return slash == 0 ? "/" : path.substr(0, slash);
  }

  std::string path_;
  int descriptor_;
};

absl::StatusOr<uint64_t> SafetensorsFileSize(
    std::vector<TensorSpec> tensors,
    const std::map<std::string, std::string>& metadata) {
  LORA_ASSIGN_OR_RETURN(const Preamble preamble, Prepare(tensors, metadata));
  return preamble.bytes.size() + preamble.data_size;
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, std::vector<TensorSpec> tensors,
    const std::map<std::string, std::string>& metadata) {
  LORA_ASSIGN_OR_RETURN(const Preamble preamble, Prepare(tensors, metadata));
  LORA_ASSIGN_OR_RETURN(std::unique_ptr<TemporaryFile> file,
                        TemporaryFile::Create(path));
  LORA_RETURN_IF_ERROR(file->Write(preamble.bytes));
  return SafetensorsWriter(path, std::move(tensors), preamble.data_size,
                           std::move(file));
}

SafetensorsWriter::SafetensorsWriter(std::string path,
                                     std::vector<TensorSpec> tensors,
                                     uint64_t data_size,
                                     std::unique_ptr<TemporaryFile> file)
    : path_(std::move(path)),
      tensors_(std::move(tensors)),
      bytes_left_(data_size),
      file_(std::move(file)) {}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept =
    default;
SafetensorsWriter& SafetensorsWriter::operator=(
    SafetensorsWriter&& other) noexcept = default;
SafetensorsWriter::~SafetensorsWriter() = default;

absl::Status SafetensorsWriter::Append(absl::string_view bytes) {
  LORA_RETURN_IF_ERROR(CheckOpen());
  if (bytes.size() > bytes_left_) {
    return absl::OutOfRangeError(
        absl::StrCat(path_, ": ", bytes.size(), " bytes were appended where ",
                     "the tensors have ", bytes_left_, " left"));
  }
  absl::Status status = file_->Write(bytes);
  if (!status.ok()) {
    file_.reset();
    return status;
  }
  bytes_left_ -= bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  LORA_RETURN_IF_ERROR(CheckOpen());
  if (bytes_left_ > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(path_, " lacks ", bytes_left_, " bytes, from tensor \"",
                     FirstIncomplete(), "\" on: append them first"));
  }
  return std::exchange(file_, nullptr)->MoveTo(path_);
}

const std::string& SafetensorsWriter::FirstIncomplete() const {
  uint64_t bytes_left = bytes_left_;
  auto tensor = tensors_.rbegin();
  for (;; ++tensor) {
    const uint64_t size =
        internal::TensorByteSize(tensor->dtype, tensor->shape).value();
    if (bytes_left <= size) return tensor->name;
    bytes_left -= size;
  }
}

absl::Status SafetensorsWriter::CheckOpen() const {
  if (file_ != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the writer of ", path_, " is done, or failed before"));
}

absl::Status WriteSafetensors(
    const std::string& path, absl::Span<const TensorView> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  BytesByName bytes;
  for (const TensorView& tensor : tensors) {
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
    LORA_ASSIGN_OR_RETURN(bytes[tensor.name], Bytes(tensor));
  }
  LORA_RETURN_IF_ERROR(CheckNoSharedMemory(bytes));
  LORA_ASSIGN_OR_RETURN(
      SafetensorsWriter writer,
      SafetensorsWriter::Create(path, std::move(specs), metadata));
  for (const TensorSpec& tensor : writer.tensors()) {
    LORA_RETURN_IF_ERROR(writer.Append(bytes.at(tensor.name)));
  }
  return writer.Finish();
}

bool IsWrittenBefore(const TensorSpec& a, const TensorSpec& b) {
  return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
}

}  // namespace trainer_lora::distributed
