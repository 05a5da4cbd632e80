// Collectives over the tensor parallel ranks that autograd can go through, of
// which the parallel layers are made (f and g of Shoeybi et al., "Megatron-LM",
// 2019):
//
//   // A column-parallel layer and a row-parallel one behind it; each rank has
//   // rows of weight_1 and the same columns of weight_2.
//   at::Tensor hidden = at::linear(
//       CopyToTensorParallel(input, mesh, tensor_dim), weight_1);
//   at::Tensor output = ReduceFromTensorParallel(
//       at::linear(at::gelu(hidden), weight_2), mesh, tensor_dim);
//
// A tensor is either replicated over the ranks of the dimension, or they hold
// its chunks (distributed::ChunkOf) along the last dimension, or each holds a
// partial sum of it. The gradient of a replicated tensor is replicated, and
// complete on every rank:
//
//   function                   forward                  backward
//   CopyToTensorParallel       identity                 all-reduce (sum)
//   ReduceFromTensorParallel   all-reduce (sum)         identity
//   ScatterToTensorParallel    this rank's chunk        all-gather
//   GatherFromTensorParallel   all-gather               this rank's chunk
//
// Each backward is made of these functions, and can be differentiated again.
//
// `mesh_dim` is a dimension of `mesh`, whose ranks call the same functions in
// the same order, in backward too. Over a single rank a function returns
// `input` itself. No function writes to its input, whose strides and dtype are
// any that the group can send. Where no input requires grad, backward makes no
// collective. The graph keeps the mesh alive.
//
// All throw c10::Error, which names mesh, rank and collective, if a peer is
// lost or does not answer in the group's timeout.
#ifndef TRAINER_LORA_DISTRIBUTED_TENSOR_PARALLEL_H_
#define TRAINER_LORA_DISTRIBUTED_TENSOR_PARALLEL_H_

#include <cstdint>
#include <memory>

#include "ATen/core/Tensor.h"
#include "distributed/device_mesh.h"

namespace trainer_lora::distributed {

// `input`, replicated, for use by this rank's part of a computation: each
// rank's gradient of it is then a partial one.
at::Tensor CopyToTensorParallel(const at::Tensor& input,
                                const std::shared_ptr<const DeviceMesh>& mesh,
                                int64_t mesh_dim);

// The sum of every rank's `input`, which has one shape; replicated.
at::Tensor ReduceFromTensorParallel(
    const at::Tensor& input, const std::shared_ptr<const DeviceMesh>& mesh,
    int64_t mesh_dim);

// This rank's chunk of the last dimension of `input`, which is replicated: a
// view of it, empty on the last ranks if there are fewer indices than ranks.
at::Tensor ScatterToTensorParallel(
    const at::Tensor& input, const std::shared_ptr<const DeviceMesh>& mesh,
    int64_t mesh_dim);

// Every rank's `input`, concatenated along the last dimension, which has
// `full_size` indices then; replicated. `input` is this rank's chunk of them,
// else c10::Error. Ranks with smaller chunks send padding.
at::Tensor GatherFromTensorParallel(
    const at::Tensor& input, int64_t full_size,
    const std::shared_ptr<const DeviceMesh>& mesh, int64_t mesh_dim);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_TENSOR_PARALLEL_H_
