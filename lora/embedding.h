// An embedding that can take a LoRA adapter.
//
//   struct EncoderImpl : torch::nn::Module {
//     EncoderImpl() { register_module("tokens", tokens); }
//     lora::Embedding tokens{
//         torch::nn::EmbeddingOptions(30522, 384).padding_idx(0)};
//   };
//
// The adapter is PEFT's. For W the weight [num_embeddings, embedding_dim] and E
// the lookup of rows,
//
//   E(W, indices) + s E(lora_embedding_A^T, indices) lora_embedding_B^T
//
// with lora_embedding_A [rank, num_embeddings], which starts at zero, and
// lora_embedding_B [embedding_dim, rank]. As elsewhere B A is added to a matrix
// of out_features = embedding_dim rows, here W^T, and DoRA has a magnitude for
// each of these. An adapter's dropout has no effect: indices have nothing to
// drop.
#ifndef TRAINER_LORA_LORA_EMBEDDING_H_
#define TRAINER_LORA_LORA_EMBEDDING_H_

#include <cstdint>
#include <ostream>

#include "ATen/core/Tensor.h"
#include "config/language_version.h"
#include "lora/lora_adapter.h"
#include "torch/nn/options/embedding.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {

// Drop-in for torch::nn::EmbeddingImpl: the same options, the same state name
// (`weight` [num_embeddings, embedding_dim]), the same initial values under the
// same generator. The one difference: weight is a function, as the tensor moves
// when the layer takes an adapter.
//
// Of the options, padding_idx and scale_grad_by_freq hold for lora_embedding_A
// too; its gradient is dense, whatever `sparse` says. A layer with max_norm
// can't take an adapter, as it would go on to change its frozen weight.
class EmbeddingImpl : public CloneableLoraLayer<EmbeddingImpl> {
 public:
  // With libtorch's other defaults.
  EmbeddingImpl(int64_t num_embeddings, int64_t embedding_dim)
      : EmbeddingImpl(
            torch::nn::EmbeddingOptions(num_embeddings, embedding_dim)) {}
  // Throws c10::Error as torch::nn::EmbeddingImpl does.
  explicit EmbeddingImpl(const torch::nn::EmbeddingOptions& options);

  // Of int32 or int64, [...] -> [..., embedding_dim]. Throws c10::Error as
  // torch::nn::EmbeddingImpl does.
  at::Tensor forward(const at::Tensor& indices);

  // Draws the weight anew from the default generator; an adapter stays as it
  // is.
  void reset_parameters();

  // For operator<<: "Embedding(...)" with sizes and adapters.
  void pretty_print(std::ostream& stream) const override;

  int64_t in_features() const override { return options_.num_embeddings(); }
  int64_t out_features() const override { return options_.embedding_dim(); }

  AdapterShapes adapter_shapes(int64_t rank) const override;
  FactorNames factor_names() const override {
    return {"lora_embedding_A", "lora_embedding_B"};
  }

  // The transposed weight, [embedding_dim, num_embeddings], a view.
  at::Tensor WeightMatrix() const override;
  at::Tensor WeightFromMatrix(const at::Tensor& matrix) const override;

  // The frozen weight, wherever it is now.
  at::Tensor weight() const { return state("weight"); }

 protected:
  at::Tensor AddProduct(const at::Tensor& base_output,
                        const at::Tensor& indices, const LoraAdapter& adapter,
                        double scale,
                        const LoraDropout& dropout) const override;
  at::Tensor BaseWithoutBias(const at::Tensor& indices) const override;

 private:
  torch::nn::EmbeddingOptions options_;
};

TORCH_MODULE(Embedding);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_EMBEDDING_H_
