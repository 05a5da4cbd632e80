// A trainer service's own linear type, written outside this component: it joins
// by its base class alone, and everything works on it as on the layers here.
#include <memory>
#include <string>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace my_service {

// Weight-only quantization: a weight of int8 with a scale an output feature,
// which is a buffer.
class Int8LinearImpl
    : public trainer_lora::lora::CloneableLoraLayer<Int8LinearImpl> {
 public:
  // Rounds `weight`, of shape [out_features, in_features].
  explicit Int8LinearImpl(const at::Tensor& weight)
      : in_features_(weight.size(1)), out_features_(weight.size(0)) {
    const at::Tensor scale = weight.abs().amax(/*dim=*/1) / 127;
    register_parameter("weight",
                       at::round(weight / scale.unsqueeze(1)).to(at::kChar),
                       /*requires_grad=*/false);
    register_buffer("scale", scale);
  }

  int64_t in_features() const override { return in_features_; }
  int64_t out_features() const override { return out_features_; }
  at::TensorOptions adapter_options() const override {
    return state("scale").options();
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor weight =
        state("weight").to(input.scalar_type()) * state("scale").unsqueeze(1);
    return AddAdapter(input, at::linear(input, weight));
  }

 private:
  int64_t in_features_;
  int64_t out_features_;
};
TORCH_MODULE(Int8Linear);

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(const at::Tensor& weight) : to_q(weight) {
    register_module("to_q", to_q);
  }
  Int8Linear to_q;
};

}  // namespace my_service

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::trainer_lora::testutil::IsOk;

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.alpha = 3;
  return config;
}

TEST(ServiceLayerTest, TrainsOnAQuantizedBase) {
  const at::Tensor weight = at::randn({7, 5});
  my_service::ModelImpl model(weight);
  const at::Tensor input = at::randn({4, 5});
  const at::Tensor base_output = model.to_q(input);
  EXPECT_TRUE(at::allclose(base_output, at::linear(input, weight), 0.1, 0.1));

  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  EXPECT_THAT(
      model.named_parameters().keys(),
      ElementsAre("to_q.lora_A", "to_q.lora_B", "to_q.base_layer.weight"));
  EXPECT_THAT(model.named_buffers().keys(),
              ElementsAre("to_q.base_layer.scale"));
  EXPECT_EQ(model.to_q->lora_A().scalar_type(), at::kFloat);

  const at::Tensor lora_A = model.to_q->lora_A();
  const at::Tensor lora_B = model.to_q->lora_B();
  lora_B.detach().uniform_(-1, 1);
  const at::Tensor expected =
      base_output + 1.5 * at::matmul(at::matmul(input, lora_A.t()), lora_B.t());
  EXPECT_TRUE(at::allclose(model.to_q(input), expected, 1e-5, 1e-5));
  model.to_q(input).sum().backward();
  EXPECT_TRUE(lora_A.grad().defined());
  EXPECT_TRUE(lora_B.grad().defined());
}

// A checkpoint has the weight and the scale under their plain names.
TEST(ServiceLayerTest, ItsBufferHasAnAliasToo) {
  my_service::ModelImpl model(at::randn({7, 5}));
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config()));
  const distributed::KeyAliases& aliases = training.checkpoint_key_aliases;
  EXPECT_EQ(aliases.size(), 2);
  EXPECT_EQ(std::string(aliases.Resolve("to_q.weight")),
            "to_q.base_layer.weight");
  EXPECT_EQ(std::string(aliases.Resolve("to_q.scale")),
            "to_q.base_layer.scale");
}

TEST(ServiceLayerTest, ACloneHasItsOwnCopyOfEverything) {
  my_service::ModelImpl model(at::randn({7, 5}));
  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  model.to_q->lora_B().detach().uniform_(-1, 1);
  const auto copy = std::dynamic_pointer_cast<my_service::Int8LinearImpl>(
      model.to_q->clone());
  const at::Tensor input = at::randn({4, 5});
  EXPECT_TRUE(at::equal(copy->forward(input), model.to_q(input)));
  copy->named_buffers()["base_layer.scale"].zero_();
  EXPECT_FALSE(at::equal(copy->forward(input), model.to_q(input)));
}

}  // namespace
}  // namespace trainer_lora::lora
