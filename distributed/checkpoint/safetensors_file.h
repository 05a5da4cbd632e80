// Reads and writes files in the safetensors format: 8 bytes of header length, a
// JSON header, then the tensors' bytes, little-endian, row-major, without gaps.
//
//   absl::StatusOr<SafetensorsFile> file =
//       SafetensorsFile::Open("model.safetensors");
//   if (!file.ok()) return file.status();
//   for (const TensorInfo& tensor : file->tensors()) {
//     std::vector<char> bytes(tensor.byte_size);
//     absl::Status status = file->Read(tensor, 0, absl::MakeSpan(bytes));
//   }
//
//   const float scale[] = {0.5f, 2.0f};
//   absl::Status status = WriteSafetensors(
//       "scale.safetensors", {{"scale", TensorDtype::kF32, {2}, scale}},
//       {{"format", "pt"}});
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_FILE_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_FILE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/language_version.h"

namespace trainer_lora::distributed {

// The element types of the format, in its own order, which decides where a
// writer puts a tensor.
enum class TensorDtype {
  kBool,
  kF4,  // Two elements a byte; a shape counts elements.
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

// All of them, in that order.
absl::Span<const TensorDtype> AllTensorDtypes();

// The format's name of a type, such as "BF16" or "F8_E4M3".
absl::string_view TensorDtypeName(TensorDtype dtype);

// The type that the format calls `name`; nothing if there is none.
std::optional<TensorDtype> ParseTensorDtype(absl::string_view name);

// Bits an element: 4, 6, or a multiple of 8. A tensor always fills whole bytes.
int64_t TensorDtypeBits(TensorDtype dtype);

// One tensor of a file.
struct TensorInfo {
  std::string name;            // Each is there once in a file.
  TensorDtype dtype;           // Of its elements.
  std::vector<int64_t> shape;  // Empty for a scalar.
  uint64_t byte_offset;        // Of its first byte, from the file's start.
  uint64_t byte_size;          // What `dtype` and `shape` make.
};

// An open file whose header was checked. Movable. The const members may be
// called from several threads at once. Replacing the file by a rename does not
// disturb an open one; writing into it or cutting it does.
class SafetensorsFile {
 public:
  // Opens `path` and reads its header. kNotFound if there is no such file;
  // kDataLoss, naming the file, the tensor and what is wrong, if the header is
  // broken, if the tensors do not fill the file exactly, or if a tensor has a
  // type that is not in TensorDtype.
  //
  // Whatever the file says, this takes less than 13 times the memory of its
  // header, which is at most 100 MB (of tiny tensors: 0.3 GB in all).
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  // As given to Open().
  const std::string& path() const { return path_; }

  // In the order of their bytes in the file; empty ones at the same place by
  // name.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }

  // The tensor called `name`, or nullptr. Owned by this object.
  const TensorInfo* Find(absl::string_view name) const;

  // The header's "__metadata__".
  const std::map<std::string, std::string>& metadata() const {
    return metadata_;
  }

  // Fills `destination` with the bytes of `tensor`, one of tensors(), from its
  // byte `byte_offset` on. kOutOfRange if the tensor has fewer; kDataLoss if
  // they can't be read. After an error `destination` holds anything.
  absl::Status Read(const TensorInfo& tensor, uint64_t byte_offset,
                    absl::Span<char> destination) const;

 private:
  SafetensorsFile(std::string path, int descriptor)
      : path_(std::move(path)), descriptor_(descriptor) {}

  absl::Status ReadHeader();

  std::string path_;
  int descriptor_;
  std::vector<TensorInfo> tensors_;
  std::vector<size_t> by_name_;  // Indices of tensors_, sorted by name.
  std::map<std::string, std::string> metadata_;
};

// A tensor to be written, which the caller holds.
struct TensorView {
  std::string name;            // Its key in the file.
  TensorDtype dtype;           // Of its elements.
  std::vector<int64_t> shape;  // Empty for a scalar.
  // Its elements, row-major and without gaps; may be null if there are none.
  const void* data;
};

// Writes `path`, byte for byte as the Python library does (which shuffles the
// metadata, where here it is sorted by key). The file appears, or is replaced,
// whole: after an error what was there before is there still, and nothing else;
// but if the last step fails, flushing the folder, the new file is there, and a
// loss of power may bring the old one back. kInvalidArgument if two tensors
// have one name or share memory (the error names both), if a shape is negative,
// too large or ends inside a byte, or if a name is not UTF-8; of the file
// system, kResourceExhausted if the disk, a quota or a limit of the process is
// full, else kUnavailable. Tensors that are not in memory all at once:
// distributed/checkpoint/safetensors_writer.h.
absl::Status WriteSafetensors(
    const std::string& path, absl::Span<const TensorView> tensors,
    const std::map<std::string, std::string>& metadata);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_FILE_H_
