#include "distributed/tensor_parallel.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/run_collective.h"
#include "distributed/placement.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

// --- Without autograd --------------------------------------------------------

// Throws unless the collective that `start` starts succeeds. `name` is such as
// "all-gather"; `input` is what this rank sends.
template <typename Start>
void Run(const std::string& name, const at::Tensor& input,
         const DeviceMesh& mesh, int64_t mesh_dim, Start start) {
  const absl::Status status = internal::RunCollective(
      *mesh.group(mesh_dim),
      absl::StrCat(mesh.RankString(), ": ", name, " over ",
                   mesh.dim_names()[mesh_dim], " of a tensor of shape [",
                   absl::StrJoin(input.sizes(), ", "), "]"),
      start);
  TORCH_CHECK(status.ok(), std::string(status.message()));
}

at::Tensor AllReduce(const at::Tensor& input, const DeviceMesh& mesh,
                     int64_t mesh_dim) {
  at::Tensor sum = input.clone(at::MemoryFormat::Contiguous);
  // The group's thread lets go of its handle when it likes: that must not be
  // the tensor that gets the graph.
  std::vector<at::Tensor> tensors = {sum.detach()};
  Run("all-reduce", sum, mesh, mesh_dim,
      [&] { return mesh.group(mesh_dim)->allreduce(tensors); });
  return sum;
}

at::Tensor AllGather(const at::Tensor& input, int64_t full_size,
                     const DeviceMesh& mesh, int64_t mesh_dim) {
  const int64_t num_ranks = mesh.size(mesh_dim);
  // The first chunk is the largest; equal ones are all that a group gathers.
  const int64_t sent_size = ChunkOf(full_size, num_ranks, 0).size;
  const at::Tensor sent =
      at::constant_pad_nd(input, {0, sent_size - input.size(-1)}).contiguous();
  std::vector<int64_t> shape = sent.sizes().vec();
  shape.insert(shape.begin(), num_ranks);
  at::Tensor received = at::empty(shape, sent.options());
  at::Tensor received_flat = received.view(-1);
  at::Tensor sent_flat = sent.view(-1);
  Run("all-gather", input, mesh, mesh_dim, [&] {
    return mesh.group(mesh_dim)->_allgather_base(received_flat, sent_flat);
  });
  std::vector<at::Tensor> chunks;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    chunks.push_back(
        received[rank].narrow(-1, 0, ChunkOf(full_size, num_ranks, rank).size));
  }
  return at::cat(chunks, -1);
}

// --- With autograd -----------------------------------------------------------

// What backward needs of a forward.
struct SavedMesh : torch::CustomClassHolder {
  SavedMesh(MeshPtr mesh, int64_t mesh_dim)
      : mesh(std::move(mesh)), mesh_dim(mesh_dim) {}

  MeshPtr mesh;
  int64_t mesh_dim;
};

constexpr char kMesh[] = "mesh";
constexpr char kFullSize[] = "full_size";

void Save(AutogradContext* context, const MeshPtr& mesh, int64_t mesh_dim) {
  context->saved_data[kMesh] =
      at::IValue::make_capsule(c10::make_intrusive<SavedMesh>(mesh, mesh_dim));
}

c10::intrusive_ptr<SavedMesh> Saved(AutogradContext* context) {
  return c10::static_intrusive_pointer_cast<SavedMesh>(
      context->saved_data[kMesh].toCapsule());
}

struct CopyFunction : Function<CopyFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const MeshPtr& mesh, int64_t mesh_dim) {
    Save(context, mesh, mesh_dim);
    return input.view_as(input);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = Saved(context);
    return {
        ReduceFromTensorParallel(gradients[0], saved->mesh, saved->mesh_dim),
        at::Tensor(), at::Tensor()};
  }
};

struct ReduceFunction : Function<ReduceFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const MeshPtr& mesh, int64_t mesh_dim) {
    Save(context, mesh, mesh_dim);
    return AllReduce(input, *mesh, mesh_dim);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = Saved(context);
    return {CopyToTensorParallel(gradients[0], saved->mesh, saved->mesh_dim),
            at::Tensor(), at::Tensor()};
  }
};

struct ScatterFunction : Function<ScatterFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const MeshPtr& mesh, int64_t mesh_dim) {
    Save(context, mesh, mesh_dim);
    context->saved_data[kFullSize] = input.size(-1);
    const Chunk chunk = ChunkOf(input.size(-1), mesh->size(mesh_dim),
                                mesh->coordinate(mesh_dim));
    return input.narrow(-1, chunk.offset, chunk.size);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = Saved(context);
    return {GatherFromTensorParallel(gradients[0],
                                     context->saved_data[kFullSize].toInt(),
                                     saved->mesh, saved->mesh_dim),
            at::Tensor(), at::Tensor()};
  }
};

struct GatherFunction : Function<GatherFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            int64_t full_size, const MeshPtr& mesh,
                            int64_t mesh_dim) {
    Save(context, mesh, mesh_dim);
    return AllGather(input, full_size, *mesh, mesh_dim);
  }
  static variable_list backward(AutogradContext* context,
                                const variable_list& gradients) {
    const auto saved = Saved(context);
    return {ScatterToTensorParallel(gradients[0], saved->mesh, saved->mesh_dim),
            at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor CopyToTensorParallel(const at::Tensor& input, const MeshPtr& mesh,
                                int64_t mesh_dim) {
  if (mesh->size(mesh_dim) == 1) return input;
  return CopyFunction::apply(input, mesh, mesh_dim);
}

at::Tensor ReduceFromTensorParallel(const at::Tensor& input,
                                    const MeshPtr& mesh, int64_t mesh_dim) {
  if (mesh->size(mesh_dim) == 1) return input;
  return ReduceFunction::apply(input, mesh, mesh_dim);
}

at::Tensor ScatterToTensorParallel(const at::Tensor& input, const MeshPtr& mesh,
                                   int64_t mesh_dim) {
  if (mesh->size(mesh_dim) == 1) return input;
  return ScatterFunction::apply(input, mesh, mesh_dim);
}

at::Tensor GatherFromTensorParallel(const at::Tensor& input, int64_t full_size,
                                    const MeshPtr& mesh, int64_t mesh_dim) {
  const Chunk chunk =
      ChunkOf(full_size, mesh->size(mesh_dim), mesh->coordinate(mesh_dim));
  TORCH_CHECK(input.dim() > 0 && input.size(-1) == chunk.size,
              mesh->RankString(), ": can't gather ", input.sizes(), " over ",
              mesh->dim_names()[mesh_dim], ": the last dimension must be ",
              chunk.size, ", this rank's chunk of ", full_size);
  if (mesh->size(mesh_dim) == 1) return input;
  return GatherFunction::apply(input, full_size, mesh, mesh_dim);
}

}  // namespace trainer_lora::distributed
