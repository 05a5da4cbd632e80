// Compiles and runs the code of docs/your_own_linear_layer.md.
#include "tests/docs/own_layer.inc"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/merge.h"
#include "tests/testutil/status_matchers.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

config::LoraConfig Config(bool use_dora) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.alpha = 3;
  config.target_modules = {"to_q"};
  config.use_dora = use_dora;
  return config;
}

struct Model : torch::nn::Module {
  Model() { register_module("to_q", to_q); }
  my_service::Int8Linear to_q{at::randn({7, 5})};
};

TEST(OwnLayerTest, ComputesAsItsFormulaSays) {
  for (const bool use_dora : {false, true}) {
    SCOPED_TRACE(use_dora);
    Model model;
    my_service::Int8Linear& layer = model.to_q;
    ASSERT_THAT(EnableLoraTraining(model, Config(use_dora)), IsOk());
    layer->lora_B().detach().uniform_(-1, 1);
    const at::Tensor input = at::randn({4, 5});

    const at::Tensor weight = layer->state("weight").to(at::kFloat) *
                              layer->state("scale").unsqueeze(1);
    at::Tensor adapted =
        weight + 1.5 * at::matmul(layer->lora_B(), layer->lora_A());
    if (use_dora) {
      // The magnitude started with the norms of the weight; no gradient goes
      // through those of what is adapted.
      const at::Tensor norms = adapted.detach().square().sum(1).sqrt();
      adapted = adapted * (weight.square().sum(1).sqrt() / norms).unsqueeze(1);
    }
    EXPECT_TRUE(
        at::allclose(layer(input), at::linear(input, adapted), 1e-5, 1e-5));

    const at::Tensor output_gradient = at::randn({4, 7});
    const auto gradients = [&](const at::Tensor& output) {
      return torch::autograd::grad({(output * output_gradient).sum()},
                                   {layer->lora_A(), layer->lora_B()});
    };
    const std::vector<at::Tensor> actual = gradients(layer(input));
    const std::vector<at::Tensor> expected =
        gradients(at::linear(input, adapted));
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-5)) << i;
    }
  }
}

// A checkpoint has the weight and the scale under their plain names.
TEST(OwnLayerTest, ItsStateMovesAndHasAliases) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoraTraining training,
      EnableLoraTraining(model, Config(/*use_dora=*/false)));
  EXPECT_THAT(
      model.named_parameters().keys(),
      ElementsAre("to_q.lora_A", "to_q.lora_B", "to_q.base_layer.weight"));
  EXPECT_THAT(model.named_buffers().keys(),
              ElementsAre("to_q.base_layer.scale"));
  EXPECT_EQ(model.to_q->lora_A().scalar_type(), at::kFloat);
  const distributed::KeyAliases& aliases = training.checkpoint_key_aliases;
  EXPECT_EQ(aliases.size(), 2);
  EXPECT_EQ(std::string(aliases.Resolve("to_q.weight")),
            "to_q.base_layer.weight");
  EXPECT_EQ(std::string(aliases.Resolve("to_q.scale")),
            "to_q.base_layer.scale");
}

TEST(OwnLayerTest, ACloneHasItsOwnCopyOfEverything) {
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, Config(/*use_dora=*/false)), IsOk());
  model.to_q->lora_B().detach().uniform_(-1, 1);
  const auto copy = std::dynamic_pointer_cast<my_service::Int8LinearImpl>(
      model.to_q->clone());
  const at::Tensor input = at::randn({4, 5});
  EXPECT_TRUE(at::equal(copy->forward(input), model.to_q(input)));
  copy->named_buffers()["base_layer.scale"].zero_();
  EXPECT_FALSE(at::equal(copy->forward(input), model.to_q(input)));
}

TEST(OwnLayerTest, MergingIsRefusedAsItSays) {
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, Config(/*use_dora=*/false)), IsOk());
  const at::Tensor weight = model.to_q->state("weight").clone();
  EXPECT_THAT(MergeAdapters(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("WeightFromMatrix")));
  EXPECT_TRUE(at::equal(model.to_q->state("weight"), weight));
}

}  // namespace
}  // namespace trainer_lora::lora
