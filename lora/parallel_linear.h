// Linear layers that are split over the tensor parallel ranks of a mesh, and
// can take LoRA adapters that are split alike (Shoeybi et al., "Megatron-LM",
// 2019):
//
//   struct MlpImpl : torch::nn::Module {
//     explicit MlpImpl(std::shared_ptr<const distributed::DeviceMesh> mesh)
//         : up(lora::ColumnParallelLinearOptions{1536, 8960}, mesh, "tensor"),
//           down(lora::RowParallelLinearOptions{8960, 1536}, mesh, "tensor") {
//       register_module("up", up);
//       register_module("down", down);
//     }
//     // Each rank has a chunk of the hidden features.
//     at::Tensor forward(const at::Tensor& input) {
//       return down(at::gelu(up(input)));
//     }
//     lora::ColumnParallelLinear up;
//     lora::RowParallelLinear down;
//   };
//
// What each rank holds of the tensors of a layer, and what completes their
// gradients over the ranks of `tensor_dim`; other mesh dimensions are data
// parallel, which averages:
//
//                      column, merged, QKV       row
//   weight             rows                      columns
//   bias               rows                      all, added after the sum
//   lora_A             all; the sum              columns
//   lora_B             rows                      all; the sum
//   lora_magnitude     rows                      all; the sum
//
// A row-parallel layer adds its adapter before the all-reduce of its output,
// and a column-parallel one behind that of its input's gradient: adapters make
// no collective of their own, but DoRA's norms in a row-parallel layer. The
// gradients are for distributed::GradientSync or SyncReplicatedLoraGradients().
//
// The layers have the state names, the values under the same generator and,
// together, the outputs of a ReplicatedLinear of all features. Dropout draws
// from each rank's own generator: seed those of one tensor parallel group alike
// in order to drop what one process would.
//
// Constructors throw c10::Error, with the layer's type, for a null mesh, a
// dimension that it doesn't have, and sizes that can't be split; forward throws
// it, with the layer's name, as ReplicatedLinear does and as
// distributed/tensor_parallel.h says.
#ifndef TRAINER_LORA_LORA_PARALLEL_LINEAR_H_
#define TRAINER_LORA_LORA_PARALLEL_LINEAR_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <ostream>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "distributed/device_mesh.h"
#include "distributed/parameter_layout.h"
#include "distributed/state_layout.h"
#include "lora/lora_adapter.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {

// What layers have in common whose output features are split.
template <typename Derived>
class ColumnParallelLayer : public CloneableLoraLayer<Derived> {
 public:
  // [..., in_features], replicated -> [..., out_features], this rank's part;
  // or, gathered, all of them.
  at::Tensor forward(const at::Tensor& input);

  // Draws weight and bias anew from the default generator: all features, of
  // which this rank keeps its part. Ranks whose generators are alike get parts
  // of one weight. Draws nothing on the meta device. An adapter stays as it is.
  void reset_parameters();

  // For operator<<: the type with sizes, here and over all ranks, and adapters.
  void pretty_print(std::ostream& stream) const override;

  // All of them.
  int64_t in_features() const override { return in_features_; }
  // Of this rank's part.
  int64_t out_features() const override;

  // How many output features of this rank's part belong to each of the outputs
  // that are merged: what at::split_with_sizes takes to tell them apart.
  std::vector<int64_t> output_sizes() const;

  // The frozen weight, wherever it is now: [out_features, in_features].
  at::Tensor weight() const { return this->state("weight"); }
  // The frozen bias, likewise: [out_features]; undefined without one.
  at::Tensor bias() const { return this->state("bias"); }

  // Rows of weight, bias, lora_B and lora_magnitude, all of lora_A.
  std::optional<distributed::StateLayout> LayoutOf(absl::string_view name,
                                                   int64_t rank) const override;

 protected:
  // `parts` are the outputs, with all their features.
  ColumnParallelLayer(int64_t in_features,
                      std::vector<distributed::ShardedPart> parts, bool bias,
                      bool gather_output,
                      std::shared_ptr<const distributed::DeviceMesh> mesh,
                      int64_t tensor_dim);

 private:
  // Over all ranks.
  int64_t total_out_features() const;

  int64_t in_features_;
  std::vector<distributed::ShardedPart> parts_;
  bool gather_output_;
  std::shared_ptr<const distributed::DeviceMesh> mesh_;
  int64_t tensor_dim_;
};

// The sizes of a ColumnParallelLinear.
struct ColumnParallelLinearOptions {
  // All of them, on every rank.
  int64_t in_features = 0;
  // Over all ranks, which get chunks of them (distributed::ChunkOf).
  int64_t out_features = 0;
  // Whether a bias is added.
  bool bias = true;
  // Whether each rank gets the whole output.
  bool gather_output = false;
};

// A linear layer whose output features are split.
class ColumnParallelLinearImpl
    : public ColumnParallelLayer<ColumnParallelLinearImpl> {
 public:
  // Over the ranks of the dimension `tensor_dim` of `mesh`.
  ColumnParallelLinearImpl(
      const ColumnParallelLinearOptions& options,
      const std::shared_ptr<const distributed::DeviceMesh>& mesh,
      absl::string_view tensor_dim);
};

TORCH_MODULE(ColumnParallelLinear);

// The sizes of a MergedColumnParallelLinear.
struct MergedColumnParallelLinearOptions {
  // All of them, on every rank.
  int64_t in_features = 0;
  // Of each of the outputs, over all ranks. Each is split by itself: a rank's
  // output is its chunk of the first, then its chunk of the second.
  std::vector<int64_t> out_features;
  // Whether biases are added.
  bool bias = true;
};

// Several column-parallel layers with one input as one, such as gate and up of
// a gated MLP. Its weight is theirs, one after the other.
class MergedColumnParallelLinearImpl
    : public ColumnParallelLayer<MergedColumnParallelLinearImpl> {
 public:
  // Over the ranks of the dimension `tensor_dim` of `mesh`.
  MergedColumnParallelLinearImpl(
      const MergedColumnParallelLinearOptions& options,
      const std::shared_ptr<const distributed::DeviceMesh>& mesh,
      absl::string_view tensor_dim);
};

TORCH_MODULE(MergedColumnParallelLinear);

// The sizes of a QKVParallelLinear.
struct QKVParallelLinearOptions {
  // The input features: all of them, on every rank.
  int64_t hidden_size = 0;
  // The features of each head.
  int64_t head_size = 0;
  // The heads of q over all ranks, whose number divides it.
  int64_t num_heads = 0;
  // The heads of k, and of v, over all ranks. The number of ranks divides it,
  // or is divided by it: consecutive ranks then hold the same head.
  int64_t num_kv_heads = 0;
  // Whether biases are added.
  bool bias = true;
};

// The projections to q, k and v of an attention as one, split by heads.
class QKVParallelLinearImpl
    : public ColumnParallelLayer<QKVParallelLinearImpl> {
 public:
  // Over the ranks of the dimension `tensor_dim` of `mesh`.
  QKVParallelLinearImpl(
      const QKVParallelLinearOptions& options,
      const std::shared_ptr<const distributed::DeviceMesh>& mesh,
      absl::string_view tensor_dim);
};

TORCH_MODULE(QKVParallelLinear);

// The sizes of a RowParallelLinear.
struct RowParallelLinearOptions {
  // Over all ranks, which get chunks of them (distributed::ChunkOf).
  int64_t in_features = 0;
  // All of them, on every rank.
  int64_t out_features = 0;
  // Whether a bias is added.
  bool bias = true;
  // Whether a rank passes its chunk of the input, as a column-parallel layer
  // leaves it; else it passes all of it.
  bool input_is_parallel = true;
};

// A linear layer whose input features are split: the ranks' outputs are summed.
class RowParallelLinearImpl : public CloneableLoraLayer<RowParallelLinearImpl> {
 public:
  // Over the ranks of the dimension `tensor_dim` of `mesh`.
  RowParallelLinearImpl(const RowParallelLinearOptions& options,
                        std::shared_ptr<const distributed::DeviceMesh> mesh,
                        absl::string_view tensor_dim);

  // [..., in_features], or with all input features -> [..., out_features],
  // replicated.
  at::Tensor forward(const at::Tensor& input);

  // As ColumnParallelLayer's.
  void reset_parameters();

  // As ColumnParallelLayer's.
  void pretty_print(std::ostream& stream) const override;

  // Of this rank's part.
  int64_t in_features() const override;
  // All of them.
  int64_t out_features() const override { return options_.out_features; }

  // The frozen weight, wherever it is now: [out_features, in_features].
  at::Tensor weight() const { return state("weight"); }
  // The frozen bias, likewise: [out_features]; undefined without one.
  at::Tensor bias() const { return state("bias"); }

  // Columns of weight and lora_A, all of bias, lora_B and lora_magnitude.
  std::optional<distributed::StateLayout> LayoutOf(absl::string_view name,
                                                   int64_t rank) const override;

 protected:
  // It is added after the sum over ranks, and adapters before.
  at::Tensor BaseOutputBias() const override { return at::Tensor(); }
  at::Tensor SumOverInputRanks(const at::Tensor& values) const override;

 private:
  RowParallelLinearOptions options_;
  std::shared_ptr<const distributed::DeviceMesh> mesh_;
  int64_t tensor_dim_;
};

TORCH_MODULE(RowParallelLinear);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_PARALLEL_LINEAR_H_
