// Several adapters on one model.
#include "lora/active_adapters.h"

#include <limits>
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
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    register_module("to_q", to_q);
    register_module("to_v", to_v);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return to_v(to_q(x)); }
  ReplicatedLinear to_q{6, 8};
  ReplicatedLinear to_v{8, 5};
};

// Two adapters with values: the default on to_q, "style" on both layers.
class ActiveAdaptersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    config::LoraConfig config;
    config.enable = true;
    config.rank = 2;
    config.target_modules = {{"to_q"}};
    ASSERT_THAT(EnableLoraTraining(model_, config), IsOk());
    config.rank = 3;
    config.alpha = 6;
    config.target_modules = {{"to_q", "to_v"}};
    LoraTrainingOptions options;
    options.adapter_name = "style";
    LORA_ASSERT_OK_AND_ASSIGN(training_,
                              EnableLoraTraining(model_, config, options));
    for (const auto& item : model_.named_parameters()) {
      if (item.key().find("lora_") == std::string::npos) continue;
      item.value().detach().uniform_(-1, 1);
    }
  }

  static at::Tensor Delta(const LoraLayer& layer, const std::string& name,
                          double scale) {
    const LoraAdapter adapter = layer.adapter(name);
    return scale * at::matmul(adapter.lora_B, adapter.lora_A);
  }

  at::Tensor Expected(double default_weight, double style_weight) const {
    const at::Tensor q = model_.to_q->weight() +
                         Delta(*model_.to_q, kDefaultAdapter, default_weight) +
                         Delta(*model_.to_q, "style", 2 * style_weight);
    const at::Tensor v =
        model_.to_v->weight() + Delta(*model_.to_v, "style", 2 * style_weight);
    return at::linear(at::linear(x_, q, model_.to_q->bias()), v,
                      model_.to_v->bias());
  }

  void ExpectOutput(double default_weight, double style_weight) {
    EXPECT_TRUE(at::allclose(model_.forward(x_),
                             Expected(default_weight, style_weight), 1e-12,
                             1e-12));
  }

  std::vector<std::string> Trainable() const {
    std::vector<std::string> names;
    for (const NamedParameter& item : TrainableParameters(model_)) {
      names.push_back(item.name);
    }
    return names;
  }

  ModelImpl model_;
  LoraTraining training_;
  const at::Tensor x_ = at::randn({3, 6}, at::kDouble);
};

TEST_F(ActiveAdaptersTest, ANewAdapterAloneIsActiveAndTrained) {
  EXPECT_THAT(training_.layer_names, ElementsAre("to_q", "to_v"));
  EXPECT_THAT(
      Trainable(),
      ElementsAre("to_q.adapters.style.lora_A", "to_q.adapters.style.lora_B",
                  "to_v.adapters.style.lora_A", "to_v.adapters.style.lora_B"));
  ExpectOutput(0, 1);
  // Base weights are found all the same by a loader that comes later.
  EXPECT_EQ(training_.checkpoint_key_aliases.Resolve("to_q.weight"),
            "to_q.base_layer.weight");
}

TEST_F(ActiveAdaptersTest, OneAWeightedSumOrNone) {
  ASSERT_THAT(SetActiveAdapters(model_, {{kDefaultAdapter}}), IsOk());
  EXPECT_THAT(Trainable(), ElementsAre("to_q.lora_A", "to_q.lora_B"));
  ExpectOutput(1, 0);
  ASSERT_THAT(
      SetActiveAdapters(model_, {{kDefaultAdapter, 0.7}, {"style", -0.3}}),
      IsOk());
  EXPECT_EQ(Trainable().size(), 6);
  ExpectOutput(0.7, -0.3);
  ASSERT_THAT(SetActiveAdapters(model_, {}), IsOk());
  EXPECT_THAT(Trainable(), ElementsAre());
  ExpectOutput(0, 0);
}

TEST_F(ActiveAdaptersTest, GradientsReachAllThatAreActive) {
  ASSERT_THAT(SetActiveAdapters(model_, {{kDefaultAdapter, 0.5}, {"style", 2}}),
              IsOk());
  const at::Tensor seed = at::randn({3, 5}, at::kDouble);
  model_.forward(x_).backward(seed);
  std::vector<at::Tensor> gradients;
  for (const NamedParameter& item : TrainableParameters(model_)) {
    gradients.push_back(item.parameter.grad().clone());
    item.parameter.mutable_grad().reset();
  }
  Expected(0.5, 2).backward(seed);
  size_t i = 0;
  for (const NamedParameter& item : TrainableParameters(model_)) {
    EXPECT_TRUE(
        at::allclose(gradients[i++], item.parameter.grad(), 1e-12, 1e-12))
        << item.name;
  }
}

TEST_F(ActiveAdaptersTest, AnAdapterThatIsNotInUseHasNoGradient) {
  model_.forward(x_).sum().backward();
  const at::Tensor lora_A = model_.to_q->adapter("style").lora_A;
  {
    // Gradients are accumulated around a reference's forward pass.
    LORA_ASSERT_OK_AND_ASSIGN(const auto base,
                              ActiveAdaptersScope::Create(model_, {}));
    EXPECT_TRUE(lora_A.grad().defined());
  }
  ASSERT_THAT(SetActiveAdapters(model_, {{kDefaultAdapter}}), IsOk());
  EXPECT_FALSE(lora_A.grad().defined());

  // Nor one that a further adapter takes the place of.
  model_.forward(x_).sum().backward();
  EXPECT_TRUE(model_.to_q->lora_A().grad().defined());
  config::LoraConfig config;
  config.enable = true;
  config.rank = 1;
  LoraTrainingOptions options;
  options.adapter_name = "subject";
  ASSERT_THAT(EnableLoraTraining(model_, config, options), IsOk());
  EXPECT_FALSE(model_.to_q->lora_A().grad().defined());
}

TEST_F(ActiveAdaptersTest, AScopeRestoresWhatWasThere) {
  ASSERT_THAT(
      SetActiveAdapters(model_, {{kDefaultAdapter, 0.7}, {"style", -0.3}}),
      IsOk());
  const std::vector<std::string> trainable = Trainable();
  {
    LORA_ASSERT_OK_AND_ASSIGN(const auto base,
                              ActiveAdaptersScope::Create(model_, {}));
    ExpectOutput(0, 0);
    {
      LORA_ASSERT_OK_AND_ASSIGN(
          auto inner, ActiveAdaptersScope::Create(model_, {{"style"}}));
      const ActiveAdaptersScope moved = std::move(inner);
      ExpectOutput(0, 1);
    }
    ExpectOutput(0, 0);
    EXPECT_EQ(Trainable(), trainable);
  }
  ExpectOutput(0.7, -0.3);
}

TEST_F(ActiveAdaptersTest, ErrorsLeaveTheModelAsItWas) {
  EXPECT_THAT(SetActiveAdapters(model_, {{"syle"}}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("'syle'")));
  EXPECT_THAT(
      SetActiveAdapters(model_, {{"style"}, {"style"}}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("listed twice")));
  EXPECT_THAT(
      SetActiveAdapters(model_,
                        {{"style", std::numeric_limits<double>::quiet_NaN()}}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("finite")));
  ExpectOutput(0, 1);
  ASSERT_THAT(model_.to_v->Merge(), IsOk());
  EXPECT_THAT(SetActiveAdapters(model_, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_v is merged")));
  EXPECT_THAT(model_.to_q->active_adapters().size(), 1);
}

TEST_F(ActiveAdaptersTest, ANameIsTakenOnce) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  LoraTrainingOptions options;
  options.adapter_name = "style";
  EXPECT_THAT(EnableLoraTraining(model_, config, options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("of the name 'style' on to_q, to_v")));
}

TEST_F(ActiveAdaptersTest, AWrongNameLeavesTheModelAsItWas) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  const std::vector<std::string> trainable = Trainable();
  for (const char* name : {"", "v1.2"}) {
    LoraTrainingOptions options;
    options.adapter_name = name;
    EXPECT_THAT(EnableLoraTraining(model_, config, options),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("the name of an adapter")));
    EXPECT_EQ(Trainable(), trainable);
    ExpectOutput(0, 1);
  }
}

TEST_F(ActiveAdaptersTest, FinalizingSaysThatNoneIsActive) {
  ASSERT_THAT(SetActiveAdapters(model_, {}), IsOk());
  EXPECT_THAT(FinalizeLoraTraining(model_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("call SetActiveAdapters")));
}

TEST_F(ActiveAdaptersTest, ACloneHasAdaptersOfItsOwn) {
  ASSERT_THAT(
      SetActiveAdapters(model_, {{kDefaultAdapter, 0.7}, {"style", -0.3}}),
      IsOk());
  const auto copy =
      std::dynamic_pointer_cast<ReplicatedLinearImpl>(model_.to_q->clone());
  EXPECT_TRUE(at::equal(copy->forward(x_), model_.to_q(x_)));
  model_.to_q->adapter("style").lora_B.detach().zero_();
  EXPECT_FALSE(at::equal(copy->forward(x_), model_.to_q(x_)));
}

}  // namespace
}  // namespace trainer_lora::lora
