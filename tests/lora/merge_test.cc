#include "lora/merge.h"

#include <limits>
#include <string>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "c10/core/GradMode.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/embedding.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/embedding.h"

namespace trainer_lora::lora {
namespace {

using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(at::ScalarType dtype = at::kDouble) {
    register_module("to_q", to_q);
    register_module("to_v", to_v);
    to(dtype);
  }
  at::Tensor forward(const at::Tensor& x) { return to_v(to_q(x)); }
  ReplicatedLinear to_q{6, 8};
  ReplicatedLinear to_v{8, 5};
};

void Enable(ModelImpl& model, bool use_dora = false) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.alpha = 3;
  config.use_dora = use_dora;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  for (const NamedParameter& item : TrainableParameters(model)) {
    item.parameter.detach().uniform_(-1, 1);
  }
}

TEST(MergeTest, AMergedModelComputesTheSame) {
  for (const bool use_dora : {false, true}) {
    ModelImpl model;
    Enable(model, use_dora);
    model.eval();
    const at::Tensor x = at::randn({3, 6}, at::kDouble);
    const at::Tensor output = model.forward(x);
    const at::Tensor q = model.to_q->weight().clone();
    ASSERT_THAT(MergeAdapters(model), IsOk());
    EXPECT_FALSE(at::equal(model.to_q->weight(), q));
    EXPECT_TRUE(at::equal(model.to_q(x), at::linear(x, model.to_q->weight(),
                                                    model.to_q->bias())));
    EXPECT_TRUE(at::allclose(model.forward(x), output, 1e-12, 1e-12));
    ASSERT_THAT(UnmergeAdapters(model), IsOk());
    EXPECT_TRUE(at::equal(model.to_q->weight(), q));
    EXPECT_TRUE(at::equal(model.forward(x), output));
  }
}

TEST(MergeTest, SumsInFloat32AndRoundsOnce) {
  ModelImpl model(at::kBFloat16);
  Enable(model);
  const at::Tensor wide = at::addmm(
      model.to_q->weight().to(at::kFloat), model.to_q->lora_B().to(at::kFloat),
      model.to_q->lora_A().to(at::kFloat), 1, 1.5);
  ASSERT_THAT(MergeAdapters(model), IsOk());
  EXPECT_TRUE(at::equal(model.to_q->weight(), wide.to(at::kBFloat16)));
}

// By subtraction a bfloat16 weight would drift.
TEST(MergeTest, AThousandCyclesRestoreEveryBit) {
  ModelImpl model(at::kBFloat16);
  Enable(model);
  const at::Tensor before = model.to_q->weight().clone();
  for (int cycle = 0; cycle < 1000; ++cycle) {
    ASSERT_THAT(MergeAdapters(model), IsOk());
    ASSERT_THAT(UnmergeAdapters(model), IsOk());
  }
  EXPECT_TRUE(at::equal(model.to_q->weight(), before));
}

TEST(MergeTest, AMergedLayerRefusesToTrain) {
  ModelImpl model;
  Enable(model);
  ASSERT_THAT(MergeAdapters(model), IsOk());
  const at::Tensor x = at::randn({3, 6}, at::kDouble);
  try {
    model.forward(x);
    ADD_FAILURE() << "trained";
  } catch (const c10::Error& error) {
    EXPECT_THAT(std::string(error.what()), HasSubstr("to_q is merged"));
  }
  {
    const c10::NoGradGuard no_grad;
    model.forward(x);
  }
  EXPECT_THAT(FinalizeLoraTraining(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_q is merged")));
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  LoraTrainingOptions options;
  options.adapter_name = "style";
  EXPECT_THAT(EnableLoraTraining(model, config, options),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_q, to_v: merged")));
  model.eval();
  model.forward(x);
}

TEST(MergeTest, ErrorsLeaveTheModelAsItWas) {
  ModelImpl bare;
  EXPECT_THAT(MergeAdapters(bare),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no layer of the model")));
  ModelImpl model;
  Enable(model);
  EXPECT_THAT(UnmergeAdapters(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("no layer of the model is merged")));
  const at::Tensor q = model.to_q->weight().clone();
  model.to_v->lora_A().detach().view({-1})[3] =
      std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(MergeAdapters(model, {/*check_finite=*/true}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("to_v")));
  EXPECT_FALSE(model.to_q->is_merged());
  EXPECT_TRUE(at::equal(model.to_q->weight(), q));
  ASSERT_THAT(MergeAdapters(model), IsOk());
  EXPECT_THAT(MergeAdapters(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_q is merged already")));
  EXPECT_TRUE(model.to_q->is_merged());
}

TEST(MergeTest, RefusesLayersThatShareAWeight) {
  torch::nn::Module model;
  const at::Tensor weight = at::randn({9, 5});
  Embedding encoder(torch::nn::EmbeddingOptions(9, 5)._weight(weight));
  Embedding decoder(torch::nn::EmbeddingOptions(9, 5)._weight(weight));
  model.register_module("encoder", encoder);
  model.register_module("decoder", decoder);
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = {{"encoder", "decoder"}};
  config.initialization = config::AdapterInitialization::kPissa;
  EXPECT_THAT(EnableLoraTraining(model, config),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("encoder and decoder share one weight")));
  config.initialization = config::AdapterInitialization::kDefault;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  EXPECT_THAT(MergeAdapters(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("encoder and decoder share one weight")));
  EXPECT_FALSE(encoder->is_merged());
}

// A language model as many are: the head's weight is that of the tokens.
struct TiedModelImpl : torch::nn::Module {
  TiedModelImpl() {
    register_module("tokens", tokens);
    register_module("lm_head", lm_head);
  }
  void Tie() { lm_head->weight().set_data(tokens->weight.detach()); }
  torch::nn::Embedding tokens{9, 5};
  ReplicatedLinear lm_head{5, 9};
};

config::LoraConfig HeadConfig(config::AdapterInitialization initialization) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = {{"lm_head"}};
  config.initialization = initialization;
  return config;
}

TEST(MergeTest, TiedWeightsAreNotChangedBehindALayerWithoutAdapter) {
  const auto refused =
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("lm_head and tokens.weight share one weight"));
  for (const auto initialization : {config::AdapterInitialization::kPissa,
                                    config::AdapterInitialization::kOlora}) {
    const config::LoraConfig config = HeadConfig(initialization);
    TiedModelImpl tied;
    tied.Tie();
    const at::Tensor before = tied.tokens->weight.detach().clone();
    EXPECT_THAT(EnableLoraTraining(tied, config), refused);
    EXPECT_FALSE(tied.lm_head->is_adapted());
    EXPECT_TRUE(at::equal(tied.tokens->weight, before));

    TiedModelImpl tied_later;
    LoraTrainingOptions options;
    options.prepare_for_fsdp = true;
    ASSERT_THAT(EnableLoraTraining(tied_later, config, options), IsOk());
    tied_later.Tie();
    const at::Tensor weight = tied_later.tokens->weight.detach().clone();
    EXPECT_THAT(FinalizeLoraTraining(tied_later), refused);
    EXPECT_TRUE(at::equal(tied_later.tokens->weight, weight));
    EXPECT_FALSE(tied_later.lm_head->lora_B().any().item<bool>());
  }
  // LoRA leaves the weight alone, until it is merged.
  TiedModelImpl tied;
  tied.Tie();
  ASSERT_THAT(EnableLoraTraining(
                  tied, HeadConfig(config::AdapterInitialization::kDefault)),
              IsOk());
  tied.lm_head->lora_B().detach().fill_(1);
  const at::Tensor before = tied.tokens->weight.detach().clone();
  EXPECT_THAT(MergeAdapters(tied), refused);
  EXPECT_FALSE(tied.lm_head->is_merged());
  EXPECT_TRUE(at::equal(tied.tokens->weight, before));
}

// What shares a storage need not share an element.
TEST(MergeTest, PartsOfOneStorageAreSharedWithWhatCoversThemAlone) {
  const auto covers = [](const at::Tensor& state, bool is_parameter) {
    TiedModelImpl model;
    model.lm_head->weight().set_data(state.narrow(0, 3, 9));
    model.register_buffer("before", state.narrow(0, 0, 3));
    model.register_buffer("behind", state.narrow(0, 12, 2));
    if (is_parameter) {
      model.register_parameter("flat", state.narrow(0, 2, 2), false);
    }
    return EnableLoraTraining(model,
                              HeadConfig(config::AdapterInitialization::kPissa))
        .status();
  };
  const at::Tensor rows = at::randn({14, 5});
  EXPECT_THAT(covers(rows, false), IsOk());
  EXPECT_THAT(covers(rows, true),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("lm_head and flat share one weight")));

  // Columns, as of a weight that several layers have together.
  const at::Tensor columns = at::randn({9, 12});
  TiedModelImpl model;
  model.lm_head->weight().set_data(columns.narrow(1, 0, 5));
  model.register_buffer("others", columns.narrow(1, 5, 5));
  ASSERT_THAT(EnableLoraTraining(
                  model, HeadConfig(config::AdapterInitialization::kPissa)),
              IsOk());
}

}  // namespace
}  // namespace trainer_lora::lora
