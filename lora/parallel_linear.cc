#include "lora/parallel_linear.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/add.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/state_layout.h"
#include "distributed/tensor_parallel.h"
#include "distributed/tensor_slice.h"
#include "lora/linear.h"
#include "torch/nn/options/linear.h"

namespace trainer_lora::lora {
namespace {

using distributed::DeviceMesh;
using distributed::GradientReduction;
using distributed::ParameterLayout;
using distributed::Placement;
using distributed::ShardedPart;
using distributed::StateLayout;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

// The dimension of `mesh` that is called `tensor_dim`.
int64_t DimOf(const char* layer, const MeshPtr& mesh,
              absl::string_view tensor_dim) {
  TORCH_CHECK(mesh != nullptr, layer, ": the mesh is null");
  const absl::StatusOr<int64_t> dim = mesh->DimByName(tensor_dim);
  TORCH_CHECK(dim.ok(), layer, ": ", std::string(dim.status().message()));
  return *dim;
}

// Averaged over data.
ParameterLayout LayoutOn(const MeshPtr& mesh, int64_t tensor_dim,
                         Placement placement) {
  ParameterLayout layout = ParameterLayout::Replicated(mesh);
  layout.placements[tensor_dim] = placement;
  return layout;
}

// What this rank holds of `whole`.
at::Tensor PartOf(const at::Tensor& whole, const StateLayout& layout) {
  std::vector<at::Tensor> parts;
  for (const distributed::TensorSlice& slice :
       layout.SlicesOf(layout.layout.mesh->rank())) {
    at::Tensor part = whole;
    for (int64_t dim = 0; dim < whole.dim(); ++dim) {
      part = part.narrow(dim, slice.offsets[dim], slice.sizes[dim]);
    }
    parts.push_back(part);
  }
  return at::cat(parts);
}

// Such as trainer_lora::lora::RowParallelLinear.
absl::string_view TypeName(const LoraLayer& layer) {
  return absl::StripSuffix(layer.name(), "Impl");
}

// Gives weight and bias this rank's part of what a ReplicatedLinear draws.
void DrawParts(const LoraLayer& layer) {
  if (layer.state("weight").is_meta()) return;
  const c10::NoGradGuard no_grad;
  const std::vector<int64_t> shape = layer.LayoutOf("weight", 0)->global_shape;
  const ReplicatedLinear whole(torch::nn::LinearOptions(shape[1], shape[0])
                                   .bias(layer.state("bias").defined()));
  for (const char* name : {"weight", "bias"}) {
    const at::Tensor own = layer.state(name);
    if (!own.defined()) continue;
    own.copy_(PartOf(whole->state(name), *layer.LayoutOf(name, 0)));
  }
}

}  // namespace

// --- Split output features ---------------------------------------------------

template <typename Derived>
ColumnParallelLayer<Derived>::ColumnParallelLayer(
    int64_t in_features, std::vector<ShardedPart> parts, bool bias,
    bool gather_output, MeshPtr mesh, int64_t tensor_dim)
    : in_features_(in_features),
      parts_(std::move(parts)),
      gather_output_(gather_output),
      mesh_(std::move(mesh)),
      tensor_dim_(tensor_dim) {
  this->register_parameter("weight", at::empty({out_features(), in_features}));
  if (bias) this->register_parameter("bias", at::empty({out_features()}));
  reset_parameters();
}

template <typename Derived>
at::Tensor ColumnParallelLayer<Derived>::forward(const at::Tensor& input) {
  const at::Tensor output = this->LinearWithAdapter(
      distributed::CopyToTensorParallel(input, mesh_, tensor_dim_), weight(),
      bias());
  if (!gather_output_) return output;
  return distributed::GatherFromTensorParallel(output, total_out_features(),
                                               mesh_, tensor_dim_);
}

template <typename Derived>
void ColumnParallelLayer<Derived>::reset_parameters() {
  DrawParts(*this);
}

template <typename Derived>
void ColumnParallelLayer<Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << TypeName(*this) << "(in_features=" << in_features_
         << ", out_features=" << out_features() << " of "
         << total_out_features() << ", bias=" << bias().defined();
  this->PrintAdapters(stream);
  stream << ")";
}

template <typename Derived>
int64_t ColumnParallelLayer<Derived>::out_features() const {
  int64_t features = 0;
  for (const int64_t size : output_sizes()) features += size;
  return features;
}

template <typename Derived>
std::vector<int64_t> ColumnParallelLayer<Derived>::output_sizes() const {
  ParameterLayout layout = LayoutOn(mesh_, tensor_dim_, Placement::Shard(0));
  layout.parts = parts_;
  std::vector<int64_t> sizes;
  for (const distributed::Chunk& chunk : layout.LocalParts()) {
    sizes.push_back(chunk.size);
  }
  return sizes;
}

template <typename Derived>
int64_t ColumnParallelLayer<Derived>::total_out_features() const {
  int64_t features = 0;
  for (const ShardedPart& part : parts_) features += part.size;
  return features;
}

template <typename Derived>
std::optional<StateLayout> ColumnParallelLayer<Derived>::LayoutOf(
    absl::string_view name, int64_t rank) const {
  if (name == "lora_A") {
    // The input is whole; each rank sees the gradient of its own outputs.
    return StateLayout{{rank, in_features_},
                       LayoutOn(mesh_, tensor_dim_,
                                Placement::Replicate(GradientReduction::kSum))};
  }
  ParameterLayout rows = LayoutOn(mesh_, tensor_dim_, Placement::Shard(0));
  rows.parts = parts_;
  const int64_t out_features = total_out_features();
  if (name == "weight") return StateLayout{{out_features, in_features_}, rows};
  if (name == "lora_B") return StateLayout{{out_features, rank}, rows};
  if (name == "bias" || name == "lora_magnitude") {
    return StateLayout{{out_features}, rows};
  }
  return std::nullopt;
}

ColumnParallelLinearImpl::ColumnParallelLinearImpl(
    const ColumnParallelLinearOptions& options, const MeshPtr& mesh,
    absl::string_view tensor_dim)
    : ColumnParallelLayer(options.in_features, {{options.out_features}},
                          options.bias, options.gather_output, mesh,
                          DimOf("ColumnParallelLinear", mesh, tensor_dim)) {}

namespace {

std::vector<ShardedPart> PartsOf(const std::vector<int64_t>& sizes) {
  TORCH_CHECK(!sizes.empty(),
              "MergedColumnParallelLinear: it needs at least one output");
  std::vector<ShardedPart> parts;
  for (const int64_t size : sizes) parts.push_back({size});
  return parts;
}

std::vector<ShardedPart> PartsOf(const QKVParallelLinearOptions& options,
                                 const MeshPtr& mesh,
                                 absl::string_view tensor_dim) {
  const int64_t dim = DimOf("QKVParallelLinear", mesh, tensor_dim);
  const int64_t num_ranks = mesh->size(dim);
  TORCH_CHECK(options.num_heads > 0 && options.num_kv_heads > 0,
              "QKVParallelLinear: there must be heads, got ", options.num_heads,
              " of q, and ", options.num_kv_heads, " of k and v");
  TORCH_CHECK(options.num_heads % num_ranks == 0,
              "QKVParallelLinear: ", options.num_heads,
              " heads of q can't be split evenly over ", num_ranks,
              " tensor parallel ranks");
  TORCH_CHECK(options.num_kv_heads % num_ranks == 0 ||
                  num_ranks % options.num_kv_heads == 0,
              "QKVParallelLinear: ", options.num_kv_heads,
              " heads of k and v can neither be split evenly over ", num_ranks,
              " tensor parallel ranks, nor the ranks over the heads");
  const int64_t replicas =
      num_ranks > options.num_kv_heads ? num_ranks / options.num_kv_heads : 1;
  const ShardedPart key{options.num_kv_heads * options.head_size, replicas};
  return {{options.num_heads * options.head_size}, key, key};
}

}  // namespace

MergedColumnParallelLinearImpl::MergedColumnParallelLinearImpl(
    const MergedColumnParallelLinearOptions& options, const MeshPtr& mesh,
    absl::string_view tensor_dim)
    : ColumnParallelLayer(
          options.in_features, PartsOf(options.out_features), options.bias,
          /*gather_output=*/false, mesh,
          DimOf("MergedColumnParallelLinear", mesh, tensor_dim)) {}

QKVParallelLinearImpl::QKVParallelLinearImpl(
    const QKVParallelLinearOptions& options, const MeshPtr& mesh,
    absl::string_view tensor_dim)
    : ColumnParallelLayer(options.hidden_size,
                          PartsOf(options, mesh, tensor_dim), options.bias,
                          /*gather_output=*/false, mesh,
                          DimOf("QKVParallelLinear", mesh, tensor_dim)) {}

template class ColumnParallelLayer<ColumnParallelLinearImpl>;
template class ColumnParallelLayer<MergedColumnParallelLinearImpl>;
template class ColumnParallelLayer<QKVParallelLinearImpl>;

// --- Split input features ----------------------------------------------------

RowParallelLinearImpl::RowParallelLinearImpl(
    const RowParallelLinearOptions& options, MeshPtr mesh,
    absl::string_view tensor_dim)
    : options_(options),
      mesh_(std::move(mesh)),
      tensor_dim_(DimOf("RowParallelLinear", mesh_, tensor_dim)) {
  register_parameter("weight",
                     at::empty({options.out_features, in_features()}));
  if (options.bias) {
    register_parameter("bias", at::empty({options.out_features}));
  }
  reset_parameters();
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& input) {
  const at::Tensor own_input =
      options_.input_is_parallel
          ? input
          : distributed::ScatterToTensorParallel(input, mesh_, tensor_dim_);
  TORCH_CHECK(own_input.size(-1) == in_features(), DisplayName(), " wants ",
              in_features(), " of ", options_.in_features,
              " input features on this rank, got ", own_input.size(-1),
              options_.input_is_parallel
                  ? ": pass its chunk, or set input_is_parallel to false"
                  : "");
  const at::Tensor output = distributed::ReduceFromTensorParallel(
      LinearWithAdapter(own_input, weight(), /*bias=*/at::Tensor()), mesh_,
      tensor_dim_);
  return bias().defined() ? at::add(output, bias().to(output.scalar_type()))
                          : output;
}

void RowParallelLinearImpl::reset_parameters() { DrawParts(*this); }

void RowParallelLinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << TypeName(*this)
         << "(in_features=" << in_features() << " of " << options_.in_features
         << ", out_features=" << options_.out_features
         << ", bias=" << bias().defined();
  PrintAdapters(stream);
  stream << ")";
}

int64_t RowParallelLinearImpl::in_features() const {
  return distributed::ChunkOf(options_.in_features, mesh_->size(tensor_dim_),
                              mesh_->coordinate(tensor_dim_))
      .size;
}

std::optional<StateLayout> RowParallelLinearImpl::LayoutOf(
    absl::string_view name, int64_t rank) const {
  const ParameterLayout columns =
      LayoutOn(mesh_, tensor_dim_, Placement::Shard(1));
  // Its product with a rank's input features is a part of the output.
  const ParameterLayout summed = LayoutOn(
      mesh_, tensor_dim_, Placement::Replicate(GradientReduction::kSum));
  const int64_t in_features = options_.in_features;
  const int64_t out_features = options_.out_features;
  if (name == "weight") {
    return StateLayout{{out_features, in_features}, columns};
  }
  if (name == "lora_A") return StateLayout{{rank, in_features}, columns};
  if (name == "lora_B") return StateLayout{{out_features, rank}, summed};
  if (name == "lora_magnitude") return StateLayout{{out_features}, summed};
  if (name == "bias") {
    // Each rank has the gradient of the whole output.
    return StateLayout{
        {out_features},
        LayoutOn(mesh_, tensor_dim_,
                 Placement::Replicate(GradientReduction::kNone))};
  }
  return std::nullopt;
}

at::Tensor RowParallelLinearImpl::SumOverInputRanks(
    const at::Tensor& values) const {
  return distributed::ReduceFromTensorParallel(values, mesh_, tensor_dim_);
}

}  // namespace trainer_lora::lora
