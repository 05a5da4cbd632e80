// Writes a safetensors file whose tensors need not be in memory all at once.
//
//   LORA_ASSIGN_OR_RETURN(
//       SafetensorsWriter writer,
//       SafetensorsWriter::Create("model.safetensors",
//                                 {{"a", TensorDtype::kF32, {2}},
//                                  {"b", TensorDtype::kI64, {3}}},
//                                 {{"format", "pt"}}));
//   for (const TensorSpec& tensor : writer.tensors()) {  // b, then a
//     LORA_RETURN_IF_ERROR(writer.Append(BytesOf(tensor.name)));
//   }
//   return writer.Finish();
//
// For tensors that are in memory: WriteSafetensors() of
// distributed/checkpoint/safetensors_file.h.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_WRITER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed {

// A tensor to be written, without its bytes.
struct TensorSpec {
  std::string name;            // Its key in the file.
  TensorDtype dtype;           // Of its elements.
  std::vector<int64_t> shape;  // Empty for a scalar.
};

// Whether the bytes of `a` come before those of `b` in a file: the widest types
// first, so that each tensor is aligned to its type, then by name.
bool IsWrittenBefore(const TensorSpec& a, const TensorSpec& b);

// The bytes of the file that SafetensorsWriter makes of the same arguments, for
// whoever wants to know whether there is room for it. Its errors, too.
absl::StatusOr<uint64_t> SafetensorsFileSize(
    std::vector<TensorSpec> tensors,
    const std::map<std::string, std::string>& metadata);

// A file that is being written, under a temporary name in its folder until it
// is complete: what was at its path stays there, whole, until then. Destroyed
// before Finish() it leaves nothing behind. Movable; not thread safe.
class SafetensorsWriter {
 public:
  // Begins the file for `path`, with its header. kInvalidArgument if two
  // tensors have one name, if a shape is negative, too large or ends inside a
  // byte, or if a name or an entry of `metadata` is not UTF-8. This and the
  // other calls: kResourceExhausted if the disk, a quota or a limit of the
  // process is full, kUnavailable for all else that the file system says.
  static absl::StatusOr<SafetensorsWriter> Create(
      const std::string& path, std::vector<TensorSpec> tensors,
      const std::map<std::string, std::string>& metadata);

  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&& other) noexcept;
  ~SafetensorsWriter();

  // All tensors, in the order in which their bytes follow each other.
  const std::vector<TensorSpec>& tensors() const { return tensors_; }

  // Writes the next `bytes` of the tensors' data: elements row-major and
  // little-endian, one tensor after the other without gaps, in pieces of any
  // size. kOutOfRange, with nothing written, if the tensors have fewer bytes
  // left. After an error of the file system the file is gone, and each further
  // call is kFailedPrecondition.
  absl::Status Append(absl::string_view bytes);

  // Puts the file, safe on the disk, into its place. kFailedPrecondition,
  // naming the first tensor that is not complete, if bytes are missing: they
  // can still be appended. After any other result the writer is done, and after
  // an error what was at the path is there still; but if the last step fails,
  // flushing the folder, the file is there, and a loss of power may undo it.
  absl::Status Finish();

 private:
  class TemporaryFile;

  SafetensorsWriter(std::string path, std::vector<TensorSpec> tensors,
                    uint64_t data_size, std::unique_ptr<TemporaryFile> file);

  absl::Status CheckOpen() const;
  const std::string& FirstIncomplete() const;

  std::string path_;
  std::vector<TensorSpec> tensors_;
  uint64_t bytes_left_;
  std::unique_ptr<TemporaryFile> file_;  // Null once done.
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_WRITER_H_
