// The JSON header of a safetensors file.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_HEADER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_HEADER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed::internal {

// The bytes before the header: its length.
inline constexpr uint64_t kSafetensorsPrefixSize = sizeof(uint64_t);

// The reference implementation's limit.
inline constexpr uint64_t kMaxSafetensorsHeaderSize = 100'000'000;

// The key of the metadata, which no tensor can have.
inline constexpr absl::string_view kMetadataName = "__metadata__";

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // Sorted by place, then name.
  std::vector<size_t> by_name;      // Indices of tensors, sorted by name.
  std::map<std::string, std::string> metadata;
};

// Parses and checks `json`, the header of a file whose data section begins at
// byte `data_begin` and has `data_size` bytes, which the tensors must fill
// without gap or overlap. kDataLoss with the tensor and what is wrong.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_begin,
                                                         uint64_t data_size);

// The bytes of a tensor. kInvalidArgument, with shape and type, if a dimension
// is negative, if the bits (or, for an empty tensor, those of its other
// dimensions) don't fit into 63 bits, or if they end inside a byte.
absl::StatusOr<uint64_t> TensorByteSize(TensorDtype dtype,
                                        const std::vector<int64_t>& shape);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_SAFETENSORS_HEADER_H_
