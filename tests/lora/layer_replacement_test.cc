// The contract of enable_lora_training and finalize_lora_training, rule by
// rule.
#include "lora/layer_replacement.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/meta_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/linear.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::config::LogLevel;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::StatusIs;

constexpr int64_t kWidth = 8;

// blocks.N.attn.{to_q,to_k,norm,act} and blocks.N.proj.
struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    to_q = register_module("to_q", ReplicatedLinear(kWidth, kWidth));
    to_k = register_module(
        "to_k",
        ReplicatedLinear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
    register_module(
        "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    register_module("act", torch::nn::GELU());
  }
  at::Tensor forward(const at::Tensor& x) { return to_q(x) + to_k(x); }
  ReplicatedLinear to_q{nullptr};
  ReplicatedLinear to_k{nullptr};
};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    attn = register_module("attn", std::make_shared<AttentionImpl>());
    proj = register_module("proj", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return proj(attn->forward(x)); }
  std::shared_ptr<AttentionImpl> attn;
  torch::nn::Linear proj{nullptr};
};

struct Model : torch::nn::Module {
  explicit Model(int64_t blocks_count = 2) {
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < blocks_count; ++i) {
      blocks->push_back(std::make_shared<BlockImpl>());
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks{nullptr};
};

LoraTrainingOptions Options(std::vector<std::string> targets = {"to_q"},
                            bool prepare_for_fsdp = false) {
  LoraTrainingOptions options;
  options.rank = 2;
  options.target_modules = std::move(targets);
  options.prepare_for_fsdp = prepare_for_fsdp;
  options.initialization.seed = 42;
  return options;
}

std::vector<std::string> TrainableNames(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const NamedParameter& item : TrainableParameters(model)) {
    names.push_back(item.name);
  }
  return names;
}

// Everything that an error must leave alone.
struct Snapshot {
  explicit Snapshot(const torch::nn::Module& model) {
    for (const auto& item : model.named_parameters()) {
      state.emplace_back(item.key(), item.value().unsafeGetTensorImpl(),
                         item.value().requires_grad());
      values.push_back(item.value().is_meta() ? item.value()
                                              : item.value().clone());
    }
    for (const auto& item : model.named_modules({}, /*include_self=*/false)) {
      modules.emplace_back(item.key(), item.value().get());
      training.push_back(item.value()->is_training());
    }
  }
  friend bool operator==(const Snapshot& a, const Snapshot& b) {
    if (a.state != b.state || a.modules != b.modules ||
        a.training != b.training) {
      return false;
    }
    for (size_t i = 0; i < a.values.size(); ++i) {
      if (!a.values[i].is_meta() && !at::equal(a.values[i], b.values[i])) {
        return false;
      }
    }
    return true;
  }
  std::vector<std::tuple<std::string, const void*, bool>> state;
  std::vector<std::pair<std::string, const void*>> modules;
  std::vector<bool> training;
  std::vector<at::Tensor> values;
};

TEST(EnableLoraTrainingTest, AdaptsTheTargetsAndFreezesTheRest) {
  Model model;
  model.eval();
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Options()));
  EXPECT_THAT(training.layer_names,
              ElementsAre("blocks.0.attn.to_q", "blocks.1.attn.to_q"));
  EXPECT_THAT(
      TrainableNames(model),
      ElementsAre("blocks.0.attn.to_q.lora_A", "blocks.0.attn.to_q.lora_B",
                  "blocks.1.attn.to_q.lora_A", "blocks.1.attn.to_q.lora_B"));
  EXPECT_TRUE(model.is_training());
}

TEST(EnableLoraTrainingTest, AtStepZeroTheOutputIsBitwiseTheBaseModels) {
  Model model;
  const at::Tensor input = at::randn({3, kWidth});
  const at::Tensor base_output = model.forward(input);
  ASSERT_THAT(EnableLoraTraining(model, Options({"to_q", "to_k"})), IsOk());
  EXPECT_TRUE(at::equal(model.forward(input), base_output));
}

TEST(EnableLoraTrainingTest, EveryAdapterChangesWithinOneStepOfTraining) {
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, Options({"to_q", "to_k"})), IsOk());
  // lora_B starts at zero, so lora_A has a gradient from the second step on.
  for (int step = 0; step < 2; ++step) {
    for (const auto& item : TrainableParameters(model)) {
      item.parameter.mutable_grad() = at::Tensor();
    }
    model.forward(at::randn({3, kWidth})).pow(2).sum().backward();
    for (const auto& [name, parameter] : TrainableParameters(model)) {
      ASSERT_TRUE(parameter.grad().defined()) << name;
      const bool is_lora_A = name.find("lora_A") != std::string::npos;
      EXPECT_EQ((parameter.grad() != 0).any().item<bool>(),
                !is_lora_A || step > 0)
          << name << ", step " << step;
      parameter.detach().sub_(parameter.grad(), 0.01);
    }
  }
}

TEST(EnableLoraTrainingTest, AlphaDefaultsToTheRankAndAFractionIsKept) {
  for (const auto& [alpha, expected] :
       std::vector<std::pair<std::optional<double>, double>>{
           {std::nullopt, 2}, {0.5, 0.5}, {32, 32}}) {
    Model model;
    LoraTrainingOptions options = Options();
    options.alpha = alpha;
    ASSERT_THAT(EnableLoraTraining(model, options), IsOk());
    EXPECT_EQ(LoraLayers(model)[0].layer->lora_alpha(), expected);
  }
}

TEST(EnableLoraTrainingTest, AnEmptyTargetListMeansTheDefaults) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Options({})));
  EXPECT_EQ(training.layer_names.size(), 4);
}

TEST(EnableLoraTrainingTest, ExclusionsWinOverTargets) {
  Model model;
  LoraTrainingOptions options = Options();
  options.excluded_modules = {"blocks.0"};
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, options));
  EXPECT_THAT(training.layer_names, ElementsAre("blocks.1.attn.to_q"));
}

// `attn` also names a container, a norm and an activation.
TEST(EnableLoraTrainingTest, ATargetThatNamesAContainerAdaptsTheLinearsBelow) {
  Model model(1);
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Options({"attn"})));
  EXPECT_THAT(training.layer_names,
              ElementsAre("blocks.0.attn.to_q", "blocks.0.attn.to_k"));
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(EnableLoraTrainingTest, TheRootModuleIsNeverAdapted) {
  ReplicatedLinear model(kWidth, kWidth);
  EXPECT_THAT(EnableLoraTraining(*model, Options({"Linear"})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no layer that can take a LoRA adapter")));
  EXPECT_FALSE(model->is_adapted());
}

TEST(EnableLoraTrainingTest, LogsRankAlphaAndLayerCount) {
  Model model;
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Options()), IsOk());
  EXPECT_THAT(
      logs.Messages(LogLevel::kInfo),
      ElementsAre("Enabled LoRA training with rank=2 alpha=2 on 2 layers"));
}

TEST(EnableLoraTrainingTest, WarnsOfATargetThatMatchesNothing) {
  Model model;
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(
                  model, Options({"to_q", "feed_forward.w1feed_forward.w2"})),
              IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("'feed_forward.w1feed_forward.w2' matches "
                                    "no layer")));
}

TEST(EnableLoraTrainingTest, WarnsOfStockLinearLayersAndSaysWhatToUse) {
  Model model(1);
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Options({"to_q", "proj"})), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              UnorderedElementsAre(
                  AllOf(HasSubstr("blocks.0.proj"),
                        HasSubstr("trainer_lora::lora::ReplicatedLinear")),
                  HasSubstr("'proj' matches no layer")));
}

TEST(EnableLoraTrainingTest, WarnsOfARankLargerThanTheLayer) {
  Model model(1);
  LogCapture logs;
  LoraTrainingOptions options = Options();
  options.rank = kWidth + 1;
  ASSERT_THAT(EnableLoraTraining(model, options), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(AllOf(HasSubstr("blocks.0.attn.to_q"),
                                HasSubstr("rank 9 is larger than 8"))));
}

TEST(EnableLoraTrainingTest, ErrorsLeaveTheModelAsItWas) {
  struct Case {
    std::string name;
    LoraTrainingOptions options;
    std::string message;
  };
  std::vector<Case> cases;
  const auto add = [&cases](std::string name, std::string message) {
    cases.push_back({std::move(name), Options(), std::move(message)});
    return &cases.back().options;
  };
  add("rank 0", "rank must be > 0, got 0")->rank = 0;
  add("rank -1", "rank must be > 0, got -1")->rank = -1;
  add("alpha 0", "alpha must be finite and > 0, got 0")->alpha = 0;
  add("alpha -8", "alpha must be finite")->alpha = -8;
  add("alpha nan", "alpha must be finite")->alpha = std::nan("");
  add("alpha inf", "alpha must be finite")->alpha =
      std::numeric_limits<double>::infinity();
  add("empty target", "target is an empty string")->target_modules = {""};
  add("no such layer", "targets [to_z, to_y]")->target_modules = {"to_z",
                                                                  "to_y"};
  // Never zero trainables in silence.
  add("stock layers only", "blocks.0.proj, blocks.1.proj: torch::nn::Linear")
      ->target_modules = {"proj"};
  add("all excluded", "no layer that can take")->excluded_modules = {"to_"};

  for (const Case& test : cases) {
    Model model;
    model.eval();
    const Snapshot before(model);
    EXPECT_THAT(
        EnableLoraTraining(model, test.options),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)))
        << test.name;
    EXPECT_TRUE(before == Snapshot(model)) << test.name;
  }
}

TEST(EnableLoraTrainingTest, EnablingTwiceIsAnErrorAndNeverWrapsAWrapper) {
  for (const char* second_target : {"to_q", "to_k"}) {
    Model model;
    ASSERT_THAT(EnableLoraTraining(model, Options()), IsOk());
    const Snapshot before(model);
    EXPECT_THAT(EnableLoraTraining(model, Options({second_target})),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("blocks.0.attn.to_q")));
    EXPECT_TRUE(before == Snapshot(model));
  }
}

TEST(EnableLoraTrainingTest, AliasesEveryStateOfEveryAdaptedLayer) {
  Model model(1);
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoraTraining training,
      EnableLoraTraining(model, Options({"to_q", "to_k"}, true)));
  const distributed::KeyAliases& aliases = training.checkpoint_key_aliases;
  EXPECT_EQ(aliases.size(), 3);  // to_k has no bias
  for (const char* state : {"to_q.weight", "to_q.bias", "to_k.weight"}) {
    const std::string key = std::string("blocks.0.attn.") + state;
    std::string name = key;
    name.insert(name.rfind('.'), ".base_layer");
    EXPECT_EQ(std::string(aliases.Resolve(key)), name);
  }
}

// A layer under two names is adapted once, counted once and stepped once.
struct SharedLayerModel : torch::nn::Module {
  SharedLayerModel() {
    register_module("encoder_to_q", to_q);
    register_module("decoder_to_q", to_q);
  }
  ReplicatedLinear to_q{kWidth, kWidth};
};

TEST(EnableLoraTrainingTest, ASharedLayerHasOneAdapterAndAnAliasForEachName) {
  SharedLayerModel model;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Options()));
  EXPECT_THAT(training.layer_names, ElementsAre("encoder_to_q"));
  EXPECT_THAT(TrainableNames(model),
              ElementsAre("encoder_to_q.lora_A", "encoder_to_q.lora_B"));
  EXPECT_EQ(training.checkpoint_key_aliases.size(), 4);
  EXPECT_EQ(std::string(
                training.checkpoint_key_aliases.Resolve("decoder_to_q.weight")),
            "decoder_to_q.base_layer.weight");
}

TEST(EnableLoraTrainingTest, TheDirectPathRefusesAMetaModel) {
  std::unique_ptr<Model> model;
  {
    distributed::MetaDeviceGuard meta;
    model = std::make_unique<Model>();
  }
  const Snapshot before(*model);
  EXPECT_THAT(EnableLoraTraining(*model, Options()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("on the meta device")));
  EXPECT_TRUE(before == Snapshot(*model));
}

// Saves the state of `model` under its plain names.
std::string SaveBaseCheckpoint(const torch::nn::Module& model,
                               const std::string& name) {
  std::vector<distributed::TensorView> views;
  for (const auto& item : model.named_parameters()) {
    views.push_back({item.key(), distributed::TensorDtype::kF32,
                     item.value().sizes().vec(), item.value().data_ptr()});
  }
  const std::string path = testing::TempDir() + name;
  EXPECT_THAT(distributed::WriteSafetensors(path, views, {}), IsOk());
  return path;
}

TEST(EnableLoraTrainingTest, BothPathsOnRealAndMetaModelsGiveTheSameModel) {
  Model base;
  const std::string checkpoint =
      SaveBaseCheckpoint(base, "both_paths.safetensors");
  ASSERT_THAT(EnableLoraTraining(base, Options()), IsOk());

  for (const bool on_meta : {false, true}) {
    std::unique_ptr<Model> model;
    {
      std::optional<distributed::MetaDeviceGuard> meta;
      if (on_meta) meta.emplace();
      model = std::make_unique<Model>();
    }
    LORA_ASSERT_OK_AND_ASSIGN(
        LoraTraining training,
        EnableLoraTraining(*model, Options({"to_q"}, true)));
    EXPECT_EQ(TrainableNames(*model).size(), 4);
    if (on_meta) {
      EXPECT_THAT(FinalizeLoraTraining(*model),
                  StatusIs(absl::StatusCode::kFailedPrecondition,
                           HasSubstr("still on the meta device")));
    }
    distributed::LoadCheckpointOptions options;
    options.aliases = std::move(training.checkpoint_key_aliases);
    options.missing_parameter_initializer =
        std::move(training.missing_parameter_initializer);
    ASSERT_THAT(distributed::LoadCheckpoint(*model, checkpoint, options),
                IsOk());
    EXPECT_THAT(FinalizeLoraTraining(*model), IsOk());
    ASSERT_EQ(model->named_parameters().keys(), base.named_parameters().keys());
    for (const auto& item : base.named_parameters()) {
      const at::Tensor& loaded = model->named_parameters()[item.key()];
      EXPECT_TRUE(at::equal(loaded, item.value())) << item.key();
      EXPECT_EQ(loaded.requires_grad(), item.value().requires_grad());
    }
    // Typed handles compute with what was loaded.
    const at::Tensor input = at::randn({3, kWidth});
    EXPECT_TRUE(at::equal(model->forward(input), base.forward(input)));
  }
}

TEST(FinalizeLoraTrainingTest, EnablesExactlyTheAdaptersAndTrainMode) {
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, Options({"to_q"}, true)), IsOk());
  for (const at::Tensor& parameter : model.parameters()) {
    parameter.set_requires_grad(true);
  }
  LoraLayers(model)[0].layer->lora_A().set_requires_grad(false);
  model.eval();
  LORA_ASSERT_OK_AND_ASSIGN(const int64_t layers, FinalizeLoraTraining(model));
  EXPECT_EQ(layers, 2);
  EXPECT_EQ(TrainableNames(model).size(), 2 * layers);
  for (const std::string& name : TrainableNames(model)) {
    EXPECT_THAT(name, HasSubstr(".lora_"));
  }
  EXPECT_TRUE(model.is_training());
}

TEST(FinalizeLoraTrainingTest, RefusesAModelWithoutAdapters) {
  Model model;
  const Snapshot before(model);
  EXPECT_THAT(FinalizeLoraTraining(model),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no layer of the model has a LoRA adapter")));
  EXPECT_TRUE(before == Snapshot(model));
}

// A layer that drops one of its factors.
class ForgetfulLinearImpl : public CloneableLoraLayer<ForgetfulLinearImpl> {
 public:
  ForgetfulLinearImpl() { register_parameter("weight", at::zeros({3, 2})); }
  int64_t in_features() const override { return 2; }
  int64_t out_features() const override { return 3; }
  void ForgetLoraB() { parameters_.erase("lora_B"); }
};

TEST(FinalizeLoraTrainingTest, RefusesALayerWithoutItsAdapter) {
  Model model;
  auto forgetful = std::make_shared<ForgetfulLinearImpl>();
  model.register_module("last_to_q", forgetful);
  ASSERT_THAT(EnableLoraTraining(model, Options({"to_q"}, true)), IsOk());
  forgetful->ForgetLoraB();
  model.eval();
  const Snapshot before(model);
  EXPECT_THAT(FinalizeLoraTraining(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("last_to_q has lost its adapter parameter "
                                 "lora_B")));
  EXPECT_TRUE(before == Snapshot(model));
}

TEST(LoraTrainingOptionsTest, TakesRankAlphaAndTargetsFromTheConfig) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 16;
  config.alpha = 0.5;
  config.target_modules = {"to_q"};
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTrainingOptions options,
                            LoraTrainingOptions::FromConfig(config));
  EXPECT_EQ(options.rank, 16);
  EXPECT_EQ(options.alpha, 0.5);
  EXPECT_THAT(options.target_modules, ElementsAre("to_q"));
}

TEST(LoraTrainingOptionsTest, RefusesADisabledOrBrokenConfig) {
  config::LoraConfig config;
  config.rank = 16;
  EXPECT_THAT(
      LoraTrainingOptions::FromConfig(config),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("disabled")));
  config.enable = true;
  config.rank = 0;
  EXPECT_THAT(LoraTrainingOptions::FromConfig(config),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rank")));
}

}  // namespace
}  // namespace trainer_lora::lora
