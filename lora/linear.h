// A linear layer that can take a LoRA adapter, for models of one process or
// with data parallelism alone.
//
//   struct AttentionImpl : torch::nn::Module {
//     AttentionImpl() { register_module("to_q", to_q); }
//     lora::ReplicatedLinear to_q{1536, 1536};
//   };
#ifndef TRAINER_LORA_LORA_LINEAR_H_
#define TRAINER_LORA_LORA_LINEAR_H_

#include <cstdint>
#include <ostream>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "lora/lora_adapter.h"
#include "torch/nn/options/linear.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {

// Drop-in for torch::nn::LinearImpl: the same options, the same state names
// (`weight` [out_features, in_features], `bias` [out_features]), the same
// initial values under the same generator. The one difference: weight and bias
// are functions, as the tensors move when the layer takes an adapter.
class ReplicatedLinearImpl : public CloneableLoraLayer<ReplicatedLinearImpl> {
 public:
  // With a bias.
  ReplicatedLinearImpl(int64_t in_features, int64_t out_features)
      : ReplicatedLinearImpl(
            torch::nn::LinearOptions(in_features, out_features)) {}
  // As torch::nn::LinearImpl's.
  explicit ReplicatedLinearImpl(const torch::nn::LinearOptions& options);

  // [..., in_features] -> [..., out_features]. Throws c10::Error as
  // torch::nn::LinearImpl does.
  at::Tensor forward(const at::Tensor& input);

  // The outputs of layers that read the same input, such as q, k and v, in
  // their order. Where each has one active adapter, without DoRA and of the
  // same dropout, this is one operation, which keeps the input once and drops
  // the same elements for all; else forward() of each. No layer is null.
  static std::vector<at::Tensor> ForwardTogether(
      const at::Tensor& input, absl::Span<ReplicatedLinearImpl* const> layers);

  // Draws weight and bias anew from the default generator; an adapter stays as
  // it is.
  void reset_parameters();

  // For operator<<: "ReplicatedLinear(...)" with sizes and adapters.
  void pretty_print(std::ostream& stream) const override;

  int64_t in_features() const override { return options_.in_features(); }
  int64_t out_features() const override { return options_.out_features(); }

  // The frozen weight, wherever it is now: [out_features, in_features].
  at::Tensor weight() const { return state("weight"); }
  // The frozen bias, likewise: [out_features]; undefined without one.
  at::Tensor bias() const { return state("bias"); }

 private:
  torch::nn::LinearOptions options_;
};

TORCH_MODULE(ReplicatedLinear);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LINEAR_H_
