// The index of a checkpoint of several safetensors files: a JSON object that
// says in which file each tensor is.
//
//   {"metadata": {"total_size": 24},
//    "weight_map": {"a": "model-00001-of-00002.safetensors",
//                   "b": "model-00002-of-00002.safetensors"}}
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_INDEX_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_INDEX_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::distributed::internal {

// That of a file's header, as the names are in both.
inline constexpr uint64_t kMaxSafetensorsIndexSize = 100'000'000;

struct SafetensorsIndex {
  // From a tensor's name to that of its file, which lies beside the index.
  std::map<std::string, std::string> weight_map;
  // The bytes of all tensors.
  std::optional<uint64_t> total_size;
};

// Parses and checks `json`. Like the Python libraries it takes no notice of
// other entries, nor of a total_size that is no integer. kDataLoss, with the
// tensor and what is wrong, if it is too long, no JSON object in UTF-8, nested
// more than 64 levels deep, or names no tensor, a tensor twice, or a file that
// is not just a name, of at most 255 bytes. Takes less than 12 times the memory
// of `json`.
absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(absl::string_view json);

// The text of `index`, byte for byte as the Python libraries write it: keys
// sorted, two spaces a level, ASCII alone. kInvalidArgument for what
// ParseSafetensorsIndex() would refuse.
absl::StatusOr<std::string> SafetensorsIndexJson(const SafetensorsIndex& index);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_INDEX_H_
