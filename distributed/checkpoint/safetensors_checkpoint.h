// A checkpoint of one or several safetensors files, as one list of tensors.
//
//   LORA_ASSIGN_OR_RETURN(const SafetensorsCheckpoint checkpoint,
//                         SafetensorsCheckpoint::Open("llama-8b"));
//   for (const CheckpointTensor& tensor : checkpoint.tensors()) {
//     const SafetensorsFile& file = checkpoint.files()[tensor.file];
//     std::vector<char> bytes(tensor.info->byte_size);
//     absl::Status status =
//         file.Read(*tensor.info, 0, absl::MakeSpan(bytes));
//   }
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_CHECKPOINT_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_CHECKPOINT_H_

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/language_version.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed {

namespace internal {
struct SafetensorsIndex;
}  // namespace internal

// A tensor of a checkpoint.
struct CheckpointTensor {
  size_t file;             // An index into SafetensorsCheckpoint::files().
  const TensorInfo* info;  // Owned by that file.
};

// An open checkpoint whose headers were checked. Movable: the tensors' infos
// stay where they are. The const members may be called from several threads at
// once.
class SafetensorsCheckpoint {
 public:
  // Opens `path`:
  // - an index (*.safetensors.index.json) and all files that it names, which
  //   lie beside it;
  // - a folder that has one index and, if any, just the .safetensors files that
  //   it names; or else no index and one .safetensors file;
  // - or a safetensors file, whatever its name.
  //
  // kNotFound if there is no `path`, or nothing to open in the folder;
  // kInvalidArgument, with the candidates, if the folder has more than that:
  // give the path of one of them. kDataLoss if the index or a file is broken,
  // or if files, or tensors of them, that the index names are missing (in one
  // message, up to ten of each).
  //
  // Tensors that the files have beyond the index are left out, with a warning.
  // So is, with another, an index's total_size that is not the tensors'.
  static absl::StatusOr<SafetensorsCheckpoint> Open(const std::string& path);

  // As given to Open().
  const std::string& path() const { return path_; }

  // In the order of their names.
  const std::vector<SafetensorsFile>& files() const { return files_; }

  // All tensors: in the order of the files, then of their places in the file.
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }

 private:
  explicit SafetensorsCheckpoint(std::string path) : path_(std::move(path)) {}

  absl::Status OpenFile(const std::string& path);
  absl::Status OpenIndex(const std::string& path,
                         const std::vector<std::string>& files_beside);
  // Fills files_, and in `file_numbers`, which has the files' names, their
  // places there.
  absl::Status OpenFiles(const std::string& index_path,
                         const internal::SafetensorsIndex& index,
                         std::map<std::string, size_t>& file_numbers);

  std::string path_;
  std::vector<SafetensorsFile> files_;
  std::vector<CheckpointTensor> tensors_;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SAFETENSORS_CHECKPOINT_H_
