#include "tests/testutil/checkpoint_tensors.h"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/chunk.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {

std::map<std::string, at::Tensor> ReadCheckpoint(const std::string& path) {
  std::map<std::string, at::Tensor> tensors;
  const absl::StatusOr<distributed::SafetensorsCheckpoint> checkpoint =
      distributed::SafetensorsCheckpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  if (!checkpoint.ok()) return tensors;
  for (const distributed::CheckpointTensor& source : checkpoint->tensors()) {
    at::Tensor tensor =
        at::empty(source.info->shape,
                  distributed::ToScalarType(source.info->dtype).value());
    const absl::Status status = checkpoint->files()[source.file].Read(
        *source.info, 0,
        absl::MakeSpan(static_cast<char*>(tensor.data_ptr()), tensor.nbytes()));
    EXPECT_TRUE(status.ok()) << status;
    tensors[source.info->name] = tensor;
  }
  return tensors;
}

at::Tensor ShardOf(at::Tensor tensor, const distributed::DeviceMesh& mesh,
                   const std::vector<distributed::Placement>& placements) {
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const int64_t shard_dim = placements[dim].shard_dim();
    if (shard_dim < 0 || shard_dim >= tensor.dim()) continue;
    const std::vector<at::Tensor> chunks =
        at::chunk(tensor, mesh.size(dim), shard_dim);
    const int64_t index = mesh.coordinate(dim);
    tensor =
        index < chunks.size() ? chunks[index] : tensor.narrow(shard_dim, 0, 0);
  }
  return tensor;
}

std::string Bytes(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  return std::string(static_cast<const char*>(dense.const_data_ptr()),
                     dense.nbytes());
}

}  // namespace trainer_lora::testutil
