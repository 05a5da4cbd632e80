#include "lora/embedding.h"

#include "ATen/Functions.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "torch/nn/functional/embedding.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/embedding.h"

namespace trainer_lora::lora {
namespace {

namespace F = torch::nn::functional;

}  // namespace

EmbeddingImpl::EmbeddingImpl(const torch::nn::EmbeddingOptions& options)
    : options_(options) {
  const torch::nn::EmbeddingImpl stock(options);
  register_parameter("weight", stock.weight);
  // There it is not negative, and here the weight is registered alone.
  options_.padding_idx(stock.options.padding_idx())._weight(at::Tensor());
}

void EmbeddingImpl::reset_parameters() {
  const at::Tensor weight_tensor = weight();
  torch::nn::init::normal_(weight_tensor);
  if (options_.padding_idx().has_value()) {
    const c10::NoGradGuard no_grad;
    weight_tensor[*options_.padding_idx()].zero_();
  }
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& indices) {
  return AddAdapter(indices, BaseWithoutBias(indices));
}

at::Tensor EmbeddingImpl::BaseWithoutBias(const at::Tensor& indices) const {
  return F::embedding(indices, weight(),
                      F::EmbeddingFuncOptions()
                          .padding_idx(options_.padding_idx())
                          .max_norm(options_.max_norm())
                          .norm_type(options_.norm_type())
                          .scale_grad_by_freq(options_.scale_grad_by_freq())
                          .sparse(options_.sparse()));
}

at::Tensor EmbeddingImpl::AddProduct(const at::Tensor& base_output,
                                     const at::Tensor& indices,
                                     const LoraAdapter& adapter, double scale,
                                     const LoraDropout& /*dropout*/) const {
  const at::Tensor hidden =
      F::embedding(indices, adapter.lora_A.t(),
                   F::EmbeddingFuncOptions()
                       .padding_idx(options_.padding_idx())
                       .scale_grad_by_freq(options_.scale_grad_by_freq()))
          .to(base_output.scalar_type());
  const at::Tensor delta =
      at::linear(hidden, adapter.lora_B.to(hidden.scalar_type()));
  return at::add(base_output, delta.to(base_output.scalar_type()), scale);
}

LoraLayer::AdapterShapes EmbeddingImpl::adapter_shapes(int64_t rank) const {
  TORCH_CHECK(!options_.max_norm().has_value(),
              "an embedding with max_norm changes its weight in forward, and "
              "can't take a LoRA adapter: scale its rows once, and leave "
              "max_norm away");
  return LoraLayer::adapter_shapes(rank);
}

at::Tensor EmbeddingImpl::WeightMatrix() const {
  const at::Tensor rows = LoraLayer::WeightMatrix();
  return rows.defined() ? rows.t() : rows;
}

at::Tensor EmbeddingImpl::WeightFromMatrix(const at::Tensor& matrix) const {
  return matrix.t();
}

void EmbeddingImpl::pretty_print(std::ostream& stream) const {
  stream << "trainer_lora::lora::Embedding(num_embeddings=" << in_features()
         << ", embedding_dim=" << out_features();
  if (options_.padding_idx().has_value()) {
    stream << ", padding_idx=" << *options_.padding_idx();
  }
  PrintAdapters(stream);
  stream << ")";
}

}  // namespace trainer_lora::lora
