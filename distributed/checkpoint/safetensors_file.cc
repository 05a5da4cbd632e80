#include "distributed/checkpoint/safetensors_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/json_handler.h"
#include "distributed/checkpoint/internal/safetensors_header.h"

namespace trainer_lora::distributed {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "safetensors files are little-endian, and are read as they are");

constexpr TensorDtype kTensorDtypes[] = {
    TensorDtype::kBool,       TensorDtype::kF4,         TensorDtype::kF6E2M3,
    TensorDtype::kF6E3M2,     TensorDtype::kU8,         TensorDtype::kI8,
    TensorDtype::kF8E5M2,     TensorDtype::kF8E4M3,     TensorDtype::kF8E8M0,
    TensorDtype::kF8E4M3Fnuz, TensorDtype::kF8E5M2Fnuz, TensorDtype::kI16,
    TensorDtype::kU16,        TensorDtype::kF16,        TensorDtype::kBF16,
    TensorDtype::kI32,        TensorDtype::kU32,        TensorDtype::kF32,
    TensorDtype::kC64,        TensorDtype::kF64,        TensorDtype::kI64,
    TensorDtype::kU64,
};

// Fills `destination` from byte `offset` of the file on.
absl::Status ReadAt(const std::string& path, int descriptor, uint64_t offset,
                    absl::Span<char> destination) {
  while (!destination.empty()) {
    const ssize_t count = pread(descriptor, destination.data(),
                                destination.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      return absl::DataLossError(absl::StrCat(path, ": reading failed at byte ",
                                              offset, ": ", strerror(errno)));
    }
    if (count == 0) {
      return absl::DataLossError(
          absl::StrCat(path, ": the file ends at byte ", offset, ", where ",
                       destination.size(), " more bytes were expected"));
    }
    offset += count;
    destination.remove_prefix(count);
  }
  return absl::OkStatus();
}

absl::Status HeaderError(const std::string& path, absl::string_view message) {
  return absl::DataLossError(
      absl::StrCat(path, " is not a valid safetensors file: ", message));
}

}  // namespace

absl::Span<const TensorDtype> AllTensorDtypes() { return kTensorDtypes; }

absl::string_view TensorDtypeName(TensorDtype dtype) {
  switch (dtype) {
    case TensorDtype::kBool:
      return "BOOL";
    case TensorDtype::kF4:
      return "F4";
    case TensorDtype::kF6E2M3:
      return "F6_E2M3";
    case TensorDtype::kF6E3M2:
      return "F6_E3M2";
    case TensorDtype::kU8:
      return "U8";
    case TensorDtype::kI8:
      return "I8";
    case TensorDtype::kF8E5M2:
      return "F8_E5M2";
    case TensorDtype::kF8E4M3:
      return "F8_E4M3";
    case TensorDtype::kF8E8M0:
      return "F8_E8M0";
    case TensorDtype::kF8E4M3Fnuz:
      return "F8_E4M3FNUZ";
    case TensorDtype::kF8E5M2Fnuz:
      return "F8_E5M2FNUZ";
    case TensorDtype::kI16:
      return "I16";
    case TensorDtype::kU16:
      return "U16";
    case TensorDtype::kF16:
      return "F16";
    case TensorDtype::kBF16:
      return "BF16";
    case TensorDtype::kI32:
      return "I32";
    case TensorDtype::kU32:
      return "U32";
    case TensorDtype::kF32:
      return "F32";
    case TensorDtype::kC64:
      return "C64";
    case TensorDtype::kF64:
      return "F64";
    case TensorDtype::kI64:
      return "I64";
    case TensorDtype::kU64:
      return "U64";
  }
  return "unknown";
}

std::optional<TensorDtype> ParseTensorDtype(absl::string_view name) {
  for (const TensorDtype dtype : kTensorDtypes) {
    if (name == TensorDtypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

int64_t TensorDtypeBits(TensorDtype dtype) {
  switch (dtype) {
    case TensorDtype::kF4:
      return 4;
    case TensorDtype::kF6E2M3:
    case TensorDtype::kF6E3M2:
      return 6;
    case TensorDtype::kBool:
    case TensorDtype::kU8:
    case TensorDtype::kI8:
    case TensorDtype::kF8E5M2:
    case TensorDtype::kF8E4M3:
    case TensorDtype::kF8E8M0:
    case TensorDtype::kF8E4M3Fnuz:
    case TensorDtype::kF8E5M2Fnuz:
      return 8;
    case TensorDtype::kI16:
    case TensorDtype::kU16:
    case TensorDtype::kF16:
    case TensorDtype::kBF16:
      return 16;
    case TensorDtype::kI32:
    case TensorDtype::kU32:
    case TensorDtype::kF32:
      return 32;
    case TensorDtype::kC64:
    case TensorDtype::kF64:
    case TensorDtype::kI64:
    case TensorDtype::kU64:
      return 64;
  }
  return 0;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("opening ", path));
  }
  SafetensorsFile file(path, descriptor);
  LORA_RETURN_IF_ERROR(file.ReadHeader());
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      tensors_(std::move(other.tensors_)),
      by_name_(std::move(other.by_name_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  path_.swap(other.path_);
  std::swap(descriptor_, other.descriptor_);
  tensors_.swap(other.tensors_);
  by_name_.swap(other.by_name_);
  metadata_.swap(other.metadata_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::Status SafetensorsFile::ReadHeader() {
  struct stat file_status;
  if (fstat(descriptor_, &file_status) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("opening ", path_));
  }
  if (!S_ISREG(file_status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, " is not a regular file"));
  }
  const uint64_t file_size = file_status.st_size;
  if (file_size < internal::kSafetensorsPrefixSize) {
    return HeaderError(path_,
                       absl::StrCat("it has only ", file_size, " bytes"));
  }

  char prefix[internal::kSafetensorsPrefixSize];
  LORA_RETURN_IF_ERROR(ReadAt(path_, descriptor_, 0, absl::MakeSpan(prefix)));
  uint64_t header_size;
  std::memcpy(&header_size, prefix, sizeof(header_size));
  // Before anything of this size is allocated.
  if (header_size > file_size - sizeof(prefix)) {
    return HeaderError(path_,
                       absl::StrCat("its header has a length of ", header_size,
                                    " bytes, but the file only ", file_size));
  }
  if (header_size > internal::kMaxSafetensorsHeaderSize) {
    return HeaderError(path_,
                       absl::StrCat("its header has a length of ", header_size,
                                    " bytes, more than the format's limit of ",
                                    internal::kMaxSafetensorsHeaderSize));
  }

  std::string json(header_size, '\0');
  LORA_RETURN_IF_ERROR(ReadAt(path_, descriptor_, sizeof(prefix),
                              absl::MakeSpan(&json[0], json.size())));
  const uint64_t data_begin = sizeof(prefix) + header_size;
  absl::StatusOr<internal::SafetensorsHeader> header =
      internal::ParseSafetensorsHeader(json, data_begin,
                                       file_size - data_begin);
  if (!header.ok()) return HeaderError(path_, header.status().message());
  tensors_ = std::move(header->tensors);
  by_name_ = std::move(header->by_name);
  metadata_ = std::move(header->metadata);
  return absl::OkStatus();
}

const TensorInfo* SafetensorsFile::Find(absl::string_view name) const {
  const auto found =
      std::lower_bound(by_name_.begin(), by_name_.end(), name,
                       [this](size_t i, absl::string_view sought) {
                         return tensors_[i].name < sought;
                       });
  if (found == by_name_.end() || tensors_[*found].name != name) return nullptr;
  return &tensors_[*found];
}

absl::Status SafetensorsFile::Read(const TensorInfo& tensor,
                                   uint64_t byte_offset,
                                   absl::Span<char> destination) const {
  if (byte_offset > tensor.byte_size ||
      destination.size() > tensor.byte_size - byte_offset) {
    return absl::OutOfRangeError(absl::StrCat(
        path_, ": ", destination.size(), " bytes from byte ", byte_offset,
        " on were asked of tensor ", internal::QuoteName(tensor.name),
        ", which has ", tensor.byte_size));
  }
  absl::Status status =
      ReadAt(path_, descriptor_, tensor.byte_offset + byte_offset, destination);
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(status.message(), " (tensor ",
                                   internal::QuoteName(tensor.name), ")"));
}

}  // namespace trainer_lora::distributed
