// This team's model, with a linear layer of its own beside one of trainer_lora.
#ifndef TRAINER_TEAM_MODEL_H_
#define TRAINER_TEAM_MODEL_H_

#include <cstdint>

#include "ATen/Functions.h"
#include "ATen/core/Tensor.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"

namespace trainer_team {

// A linear layer whose outputs have a fixed scale each.
class ScaledLinearImpl
    : public trainer_lora::lora::CloneableLoraLayer<ScaledLinearImpl> {
 public:
  ScaledLinearImpl(int64_t in_features, int64_t out_features) {
    register_parameter("weight", at::randn({out_features, in_features}));
    register_buffer("scale", at::rand({out_features}) + 0.5);
  }

  int64_t in_features() const override { return state("weight").size(1); }
  int64_t out_features() const override { return state("weight").size(0); }
  at::Tensor forward(const at::Tensor& input) {
    return AddAdapter(input,
                      at::linear(input, state("weight")) * state("scale"));
  }
};
TORCH_MODULE(ScaledLinear);

// [batch, 8] -> [batch, 4].
struct DenoiserImpl : torch::nn::Module {
  DenoiserImpl() {
    register_module("to_q", to_q);
    register_module("to_out", to_out);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& input) {
    return head(to_out(to_q(input).relu()));
  }

  ScaledLinear to_q{8, 8};
  trainer_lora::lora::ReplicatedLinear to_out{8, 8};
  trainer_lora::lora::ReplicatedLinear head{8, 4};
};
TORCH_MODULE(Denoiser);

}  // namespace trainer_team

#endif  // TRAINER_TEAM_MODEL_H_
