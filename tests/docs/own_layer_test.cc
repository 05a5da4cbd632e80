// Compiles and runs the code of docs/your_own_linear_layer.md.
#include "tests/docs/own_layer.inc"

#include <string>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/merge.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::lora {
namespace {

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

TEST(OwnLayerTest, ComputesAsItsFormulaSays) {
  for (const bool use_dora : {false, true}) {
    SCOPED_TRACE(use_dora);
    my_service::Int8Linear layer(at::randn({7, 5}));
    torch::nn::Module model;
    model.register_module("to_q", layer);
    ASSERT_THAT(EnableLoraTraining(model, Config(use_dora)), IsOk());
    layer->lora_B().detach().uniform_(-1, 1);
    const at::Tensor input = at::randn({4, 5});

    const at::Tensor weight = layer->state("weight").to(at::kFloat) *
                              layer->state("scale").unsqueeze(1);
    at::Tensor adapted =
        weight + 1.5 * at::matmul(layer->lora_B(), layer->lora_A());
    if (use_dora) {
      // The magnitude started with the norms of the weight.
      const at::Tensor norms = adapted.square().sum(1).sqrt();
      adapted = adapted * (weight.square().sum(1).sqrt() / norms).unsqueeze(1);
    }
    EXPECT_TRUE(
        at::allclose(layer(input), at::linear(input, adapted), 1e-5, 1e-5));
    layer(input).sum().backward();
    EXPECT_TRUE(layer->lora_A().grad().defined());
    EXPECT_TRUE(layer->lora_B().grad().defined());
  }
}

TEST(OwnLayerTest, MergingIsRefusedAsItSays) {
  my_service::Int8Linear layer(at::randn({7, 5}));
  torch::nn::Module model;
  model.register_module("to_q", layer);
  ASSERT_THAT(EnableLoraTraining(model, Config(/*use_dora=*/false)), IsOk());
  const at::Tensor weight = layer->state("weight").clone();
  EXPECT_THAT(MergeAdapters(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("WeightFromMatrix")));
  EXPECT_TRUE(at::equal(layer->state("weight"), weight));
}

}  // namespace
}  // namespace trainer_lora::lora
