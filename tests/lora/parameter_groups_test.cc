#include "lora/parameter_groups.h"

#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"
#include "torch/optim/adamw.h"
#include "torch/optim/schedulers/step_lr.h"
#include "torch/optim/sgd.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

constexpr double kRate = 0.01;
constexpr double kDecay = 0.1;
constexpr double kRatio = 16;

ParameterGroupOptions Options() {
  ParameterGroupOptions options;
  options.learning_rate = kRate;
  options.weight_decay = kDecay;
  options.loraplus_lr_ratio = kRatio;
  return options;
}

at::Tensor Parameter(at::IntArrayRef shape) {
  return at::rand(shape, at::kDouble) + 0.5;
}

// A parameter of every kind, by the names that adapted layers give them, and a
// frozen one. A named adapter may have the name of a factor.
struct Model : torch::nn::Module {
  Model() {
    auto to_q = register_module("to_q", std::make_shared<Module>("Layer"));
    to_q->register_parameter("lora_A", Parameter({2, 3}));
    to_q->register_parameter("lora_B", Parameter({4, 2}));
    to_q->register_parameter("lora_magnitude", Parameter({4}));
    auto base =
        to_q->register_module("base_layer", std::make_shared<Module>("Linear"));
    base->register_parameter("weight", Parameter({4, 3}),
                             /*requires_grad=*/false);
    base->register_parameter("bias", Parameter({4}));
    auto adapters =
        to_q->register_module("adapters", std::make_shared<Module>("Dict"));
    auto style =
        adapters->register_module("lora_B", std::make_shared<Module>("Dict"));
    style->register_parameter("lora_A", Parameter({2, 3}));
    style->register_parameter("lora_B", Parameter({4, 2}));
    // A shard without a second dimension.
    auto shard = register_module("shard", std::make_shared<Module>("Layer"));
    shard->register_parameter("lora_A", Parameter({6}));
    shard->register_parameter("lora_B", Parameter({8}));
    register_parameter("embedding", Parameter({5, 3}));
    register_parameter("scale", Parameter({}));
    register_module("tied", to_q);
  }
};

std::vector<std::string> Names(const ParameterGroup& group) {
  std::vector<std::string> names;
  for (const NamedParameter& item : group.parameters) {
    names.push_back(item.name);
  }
  return names;
}

TEST(LoraParameterGroupsTest, PutsEachTrainableParameterInOneGroup) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, Options()));
  ASSERT_EQ(groups.size(), 3);
  EXPECT_EQ(groups[0].name, "lora_A");
  EXPECT_EQ(groups[0].learning_rate, kRate);
  EXPECT_EQ(groups[0].weight_decay, kDecay);
  EXPECT_THAT(Names(groups[0]),
              ElementsAre("embedding", "to_q.lora_A",
                          "to_q.adapters.lora_B.lora_A", "shard.lora_A"));
  EXPECT_EQ(groups[1].name, "lora_B");
  EXPECT_EQ(groups[1].learning_rate, kRatio * kRate);
  EXPECT_EQ(groups[1].weight_decay, kDecay);
  EXPECT_THAT(Names(groups[1]),
              ElementsAre("to_q.lora_B", "to_q.adapters.lora_B.lora_B",
                          "shard.lora_B"));
  EXPECT_EQ(groups[2].name, "no_decay");
  EXPECT_EQ(groups[2].learning_rate, kRatio * kRate);
  EXPECT_EQ(groups[2].weight_decay, 0);
  EXPECT_THAT(Names(groups[2]), ElementsAre("scale", "to_q.lora_magnitude",
                                            "to_q.base_layer.bias"));
  for (const ParameterGroup& group : groups) {
    for (const NamedParameter& item : group.parameters) {
      EXPECT_TRUE(item.parameter.is_same(model.named_parameters()[item.name]));
    }
  }
}

TEST(LoraParameterGroupsTest, AnAdaptedModelHasTheGroupsOfItsFactors) {
  torch::nn::Module model;
  model.register_module("to_q", ReplicatedLinear(3, 4));
  model.register_module("to_v", ReplicatedLinear(3, 4));
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, Options()));
  ASSERT_EQ(groups.size(), 2);
  EXPECT_THAT(Names(groups[0]), ElementsAre("to_q.lora_A", "to_v.lora_A"));
  EXPECT_THAT(Names(groups[1]), ElementsAre("to_q.lora_B", "to_v.lora_B"));
}

TEST(LoraParameterGroupsTest, ALayerAloneHasItsOwnNames) {
  torch::nn::Module layer;
  layer.register_parameter("lora_A", Parameter({2, 3}));
  layer.register_parameter("lora_B", Parameter({4, 2}));
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(layer, Options()));
  ASSERT_EQ(groups.size(), 2);
  EXPECT_THAT(Names(groups[0]), ElementsAre("lora_A"));
  EXPECT_THAT(Names(groups[1]), ElementsAre("lora_B"));
}

TEST(LoraParameterGroupsTest, WithoutLoraPlusAllLearnAtOneRate) {
  Model model;
  ParameterGroupOptions options;
  options.learning_rate = kRate;
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, options));
  for (const ParameterGroup& group : groups) {
    EXPECT_EQ(group.learning_rate, kRate) << group.name;
    EXPECT_EQ(group.weight_decay, 0) << group.name;
  }
}

TEST(LoraParameterGroupsTest, RefusesOptionsOutOfRange) {
  Model model;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const auto expect = [&](double ParameterGroupOptions::*member, double value,
                          const char* message) {
    ParameterGroupOptions options = Options();
    options.*member = value;
    if (message == nullptr) {
      EXPECT_THAT(LoraParameterGroups(model, options), IsOk());
    } else {
      EXPECT_THAT(
          LoraParameterGroups(model, options),
          StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
    }
  };
  expect(&ParameterGroupOptions::learning_rate, 0, nullptr);
  expect(&ParameterGroupOptions::learning_rate, -1,
         "learning_rate must be a number from 0 on, got -1");
  expect(&ParameterGroupOptions::learning_rate, nan, "learning_rate must");
  expect(&ParameterGroupOptions::learning_rate, inf, "learning_rate must");
  expect(&ParameterGroupOptions::weight_decay, -0.5,
         "weight_decay must be a number from 0 on, got -0.5");
  expect(&ParameterGroupOptions::loraplus_lr_ratio, 0.5, nullptr);
  expect(&ParameterGroupOptions::loraplus_lr_ratio, 0,
         "loraplus_lr_ratio must be a positive number, got 0");
  expect(&ParameterGroupOptions::loraplus_lr_ratio, inf, "loraplus_lr_ratio");
}

TEST(LoraParameterGroupsTest, AModelWithNothingToTrainIsAnError) {
  torch::nn::Module model;
  model.register_parameter("weight", Parameter({2, 2}),
                           /*requires_grad=*/false);
  EXPECT_THAT(LoraParameterGroups(model, Options()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("EnableLoraTraining()")));
}

// The rate and decay that each parameter of Model is to have.
const std::map<std::string, std::pair<double, double>>& Expected() {
  static const auto& expected =
      *new std::map<std::string, std::pair<double, double>>{
          {"to_q.lora_A", {0.01, 0.1}},
          {"to_q.lora_B", {0.16, 0.1}},
          {"to_q.lora_magnitude", {0.16, 0}},
          {"to_q.base_layer.weight", {0, 0}},
          {"to_q.base_layer.bias", {0.16, 0}},
          {"to_q.adapters.lora_B.lora_A", {0.01, 0.1}},
          {"to_q.adapters.lora_B.lora_B", {0.16, 0.1}},
          {"shard.lora_A", {0.01, 0.1}},
          {"shard.lora_B", {0.16, 0.1}},
          {"embedding", {0.01, 0.1}},
          {"scale", {0.16, 0}},
      };
  return expected;
}

// The first step of AdamW, in which the corrected moments are the gradient and
// its square:
//
//   p <- p (1 - rate decay) - rate g / (|g| + eps)
TEST(OptimizerGroupsTest, AStepOfAdamWUsesTheRateAndDecayOfEachGroup) {
  at::manual_seed(1);
  Model model;
  constexpr double kEps = 0.25;
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, Options()));
  torch::optim::AdamW optimizer(
      OptimizerGroups(groups, torch::optim::AdamWOptions(/*lr=*/7)
                                  .betas({0.8, 0.95})
                                  .eps(kEps)
                                  .weight_decay(7)));
  std::map<std::string, at::Tensor> before;
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : model.named_parameters()) {
    at::Tensor parameter = item.value();
    before[item.key()] = parameter.detach().clone();
    // The second name of a tied parameter is not in Expected().
    if (Expected().count(item.key()) == 0) continue;
    gradients[item.key()] = at::randn(parameter.sizes(), at::kDouble);
    if (parameter.requires_grad()) {
      parameter.mutable_grad() = gradients[item.key()];
    }
  }
  optimizer.step();
  for (const auto& [name, rate_and_decay] : Expected()) {
    const auto [rate, decay] = rate_and_decay;
    const at::Tensor& g = gradients[name];
    const at::Tensor expected =
        before[name] * (1 - rate * decay) - rate * g / (at::abs(g) + kEps);
    EXPECT_TRUE(at::allclose(model.named_parameters()[name], expected,
                             /*rtol=*/1e-12, /*atol=*/1e-12))
        << name;
  }
}

TEST(OptimizerGroupsTest, KeepTheOtherOptions) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, Options()));
  const auto optimizer_groups = OptimizerGroups(
      groups, torch::optim::SGDOptions(/*lr=*/7).momentum(0.5).nesterov(true));
  ASSERT_EQ(optimizer_groups.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(
        optimizer_groups[i].options());
    EXPECT_EQ(options.lr(), groups[i].learning_rate);
    EXPECT_EQ(options.weight_decay(), groups[i].weight_decay);
    EXPECT_EQ(options.momentum(), 0.5);
    EXPECT_TRUE(options.nesterov());
    EXPECT_EQ(optimizer_groups[i].params().size(), groups[i].parameters.size());
  }
}

TEST(OptimizerGroupsTest, ASchedulerKeepsTheRatio) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(const std::vector<ParameterGroup> groups,
                            LoraParameterGroups(model, Options()));
  torch::optim::AdamW optimizer(
      OptimizerGroups(groups, torch::optim::AdamWOptions()));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.5);
  double rate = kRate;
  for (int step = 0; step < 4; ++step) {
    optimizer.step();
    const auto& stepped = optimizer.param_groups();
    ASSERT_EQ(stepped.size(), 3);
    EXPECT_DOUBLE_EQ(stepped[0].options().get_lr(), rate);
    EXPECT_DOUBLE_EQ(stepped[1].options().get_lr(), kRatio * rate);
    EXPECT_DOUBLE_EQ(stepped[2].options().get_lr(), kRatio * rate);
    scheduler.step();
    // Counted from 0: the first step of a scheduler changes nothing.
    if (step > 0) rate *= 0.5;
  }
}

}  // namespace
}  // namespace trainer_lora::lora
