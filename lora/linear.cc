#include "lora/linear.h"

#include <cmath>

#include "ATen/Functions.h"
#include "lora/lora_matmul.h"
#include "torch/nn/init.h"

namespace trainer_lora::lora {

ReplicatedLinearImpl::ReplicatedLinearImpl(
    const torch::nn::LinearOptions& options)
    : options_(options) {
  register_parameter(
      "weight", at::empty({options.out_features(), options.in_features()}));
  if (options.bias()) {
    register_parameter("bias", at::empty({options.out_features()}));
  }
  reset_parameters();
}

void ReplicatedLinearImpl::reset_parameters() {
  // The distribution of torch::nn::Linear, drawn in its order.
  torch::nn::init::kaiming_uniform_(weight(), std::sqrt(5.0));
  const at::Tensor bias_tensor = bias();
  if (bias_tensor.defined() && in_features() > 0) {
    const double bound = 1 / std::sqrt(static_cast<double>(in_features()));
    torch::nn::init::uniform_(bias_tensor, -bound, bound);
  }
}

at::Tensor ReplicatedLinearImpl::forward(const at::Tensor& input) {
  return LinearWithAdapter(input, weight(), bias());
}

std::vector<at::Tensor> ReplicatedLinearImpl::ForwardTogether(
    const at::Tensor& input, absl::Span<ReplicatedLinearImpl* const> layers) {
  std::vector<LoraMatmulTerm> terms;
  for (const ReplicatedLinearImpl* layer : layers) {
    const auto term = layer->LinearTerm(input, layer->weight(), layer->bias());
    if (!term.has_value() ||
        (!terms.empty() &&
         term->dropout.probability != terms.front().dropout.probability)) {
      break;
    }
    terms.push_back(*term);
  }
  if (terms.size() == layers.size()) return LoraMatmul(input, terms);
  std::vector<at::Tensor> outputs;
  for (ReplicatedLinearImpl* layer : layers) {
    outputs.push_back(layer->forward(input));
  }
  return outputs;
}

void ReplicatedLinearImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha
         << "trainer_lora::lora::ReplicatedLinear(in_features=" << in_features()
         << ", out_features=" << out_features()
         << ", bias=" << bias().defined();
  PrintAdapters(stream);
  stream << ")";
}

}  // namespace trainer_lora::lora
