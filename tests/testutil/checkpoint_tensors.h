// Checkpoints and shards as whole tensors, made without what is under test:
//
//   std::map<std::string, at::Tensor> whole = ReadCheckpoint("model");
//   EXPECT_EQ(Bytes(shard), Bytes(ShardOf(whole["w"], *mesh, placements)));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_CHECKPOINT_TENSORS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_CHECKPOINT_TENSORS_H_

#include <map>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"

namespace trainer_lora::testutil {

// All tensors of a checkpoint, by key; a failure of the test if it can't be
// read.
std::map<std::string, at::Tensor> ReadCheckpoint(const std::string& path);

// What this rank should hold of `tensor`, by torch.chunk over one mesh
// dimension after the other.
at::Tensor ShardOf(at::Tensor tensor, const distributed::DeviceMesh& mesh,
                   const std::vector<distributed::Placement>& placements);

// The elements' bits, row-major.
std::string Bytes(const at::Tensor& tensor);

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_CHECKPOINT_TENSORS_H_
