// How the parameters and buffers of a model are spread over the ranks of a
// mesh: what a loader reads for each, and a saver gathers.
//
//   // As PyTorch's fully_shard places them, of a model on the meta device:
//   StateLayouts layouts = ShardedLayouts(
//       *model, mesh, {Placement::Replicate(), Placement::Shard(0)});
//   layouts.at("in.weight").LocalShape();  // This rank's rows.
#ifndef TRAINER_LORA_DISTRIBUTED_STATE_LAYOUT_H_
#define TRAINER_LORA_DISTRIBUTED_STATE_LAYOUT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/tensor_slice.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::distributed {

// The shape that a tensor has over all ranks, and the part that each holds.
struct StateLayout {
  // What `rank` of the mesh holds: slices of the whole tensor, which lie one
  // after the other along dimension 0 of the rank's own tensor. One slice,
  // unless the layout has parts. The layout must be valid, and the rank in it.
  std::vector<TensorSlice> SlicesOf(int64_t rank) const;

  // The shape of the tensor on this rank. The layout must be valid.
  std::vector<int64_t> LocalShape() const;

  // kInvalidArgument if `layout` is invalid, or if its shard dimensions or
  // parts don't fit the shape.
  absl::Status Validate() const;

  // The shape of the whole tensor.
  std::vector<int64_t> global_shape;
  // How it is spread.
  ParameterLayout layout;
};

// By the name of the parameter or buffer. One without an entry is whole on
// every rank.
using StateLayouts = std::map<std::string, StateLayout, std::less<>>;

// A layout for each parameter of `model`, whose tensors have their global
// shapes: over `mesh`, with `placements`, one a mesh dimension. A tensor that
// lacks a shard dimension is replicated there. A parameter that the model has
// under several names is there under each. Buffers are whole on every rank.
StateLayouts ShardedLayouts(const torch::nn::Module& model,
                            std::shared_ptr<const DeviceMesh> mesh,
                            const std::vector<Placement>& placements);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_STATE_LAYOUT_H_
