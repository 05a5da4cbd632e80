// The contract of enable_lora_training and finalize_lora_training, rule by
// rule.
#include "lora/layer_replacement.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/Exception.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/meta_device.h"
#include "distributed/state_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/conv.h"
#include "lora/linear.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/optim/sgd.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::AllOfArray;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
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

config::LoraConfig Config(std::vector<std::string> targets = {"to_q"}) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = std::move(targets);
  config.seed = 42;
  return config;
}

LoraTrainingOptions ForFsdp() {
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
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
                            EnableLoraTraining(model, Config()));
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
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q", "to_k"})), IsOk());
  EXPECT_TRUE(at::equal(model.forward(input), base_output));
}

TEST(EnableLoraTrainingTest, EveryAdapterChangesWithinOneStepOfTraining) {
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q", "to_k"})), IsOk());
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
    config::LoraConfig config = Config();
    config.alpha = alpha;
    ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
    EXPECT_EQ(LoraLayers(model)[0].layer->adapter().options.alpha, expected);
  }
}

TEST(EnableLoraTrainingTest, AnEmptyTargetListMeansTheDefaults) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config({})));
  EXPECT_EQ(training.layer_names.size(), 4);
}

TEST(EnableLoraTrainingTest, ExclusionsWinOverTargets) {
  Model model;
  config::LoraConfig config = Config();
  config.exclude_modules = {"blocks.0"};
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, config));
  EXPECT_THAT(training.layer_names, ElementsAre("blocks.1.attn.to_q"));
}

// The architecture's are substrings, whatever the configuration's are.
TEST(EnableLoraTrainingTest, TheArchitectureExcludesBySubstrings) {
  Model model;
  config::LoraConfig config = Config();
  config.target_matching = config::TargetMatching::kSuffix;
  LoraTrainingOptions options;
  options.architecture_exclusions = {"locks.0"};
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, config, options));
  EXPECT_THAT(training.layer_names, ElementsAre("blocks.1.attn.to_q"));
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(EnableLoraTrainingTest, WarnsOfAnExclusionWithoutEffect) {
  Model model;
  config::LoraConfig config = Config();
  config.target_matching = config::TargetMatching::kSuffix;
  // As a suffix, `attn` names a container, and nothing below it.
  config.exclude_modules = {"proj", "attn", "embedder"};
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("'attn' matches no layer"),
                          HasSubstr("'embedder' matches no layer")));
}

TEST(EnableLoraTrainingTest, MatchesInEachOfTheWays) {
  struct Case {
    config::TargetMatching matching;
    std::string target;
    std::vector<std::string> layers;
  };
  using config::TargetMatching;
  const Case cases[] = {
      {TargetMatching::kSubstring,
       "0.attn.to_",
       {"blocks.0.attn.to_q", "blocks.0.attn.to_k"}},
      {TargetMatching::kExact, "blocks.1.attn.to_q", {"blocks.1.attn.to_q"}},
      {TargetMatching::kSuffix,
       "to_k",
       {"blocks.0.attn.to_k", "blocks.1.attn.to_k"}},
      {TargetMatching::kGlob,
       "*.1.*.to_[qk]",
       {"blocks.1.attn.to_q", "blocks.1.attn.to_k"}},
      {TargetMatching::kRegex, "blocks\\.(0|7)\\..*q", {"blocks.0.attn.to_q"}},
      {TargetMatching::kExact,
       "all-linear",
       {"blocks.0.attn.to_q", "blocks.0.attn.to_k", "blocks.1.attn.to_q",
        "blocks.1.attn.to_k"}},
  };
  for (const Case& test : cases) {
    Model model;
    config::LoraConfig config = Config({test.target});
    config.target_matching = test.matching;
    LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                              EnableLoraTraining(model, config));
    EXPECT_EQ(training.layer_names, test.layers) << test.target;
  }
}

TEST(EnableLoraTrainingTest, AllLinearNamesTheStockLayersItCannotAdapt) {
  Model model(1);
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config({"all-linear"})), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(AllOf(HasSubstr("blocks.0.proj"),
                                HasSubstr("ReplicatedLinear"))));
}

TEST(EnableLoraTrainingTest, TheDefaultTargetsWarnOfNothing) {
  Model model;
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config({})), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(EnableLoraTrainingTest, PatternsGiveLayersTheirOwnRankAndAlpha) {
  Model model;
  config::LoraConfig config = Config({"all-linear"});
  config.alpha = 6;
  // The first that matches counts.
  config.rank_pattern = {{"0.attn.to_q", 4}, {"to_q", 3}};
  config.alpha_pattern = {{"blocks.1", 0.5}};
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  const std::vector<NamedLoraLayer> layers = LoraLayers(model);
  const int64_t ranks[] = {4, 2, 3, 2};
  const double alphas[] = {6, 6, 0.5, 0.5};
  ASSERT_EQ(layers.size(), 4);
  for (size_t i = 0; i < layers.size(); ++i) {
    EXPECT_EQ(layers[i].layer->adapter().options.rank, ranks[i])
        << layers[i].name;
    EXPECT_EQ(layers[i].layer->adapter().options.alpha, alphas[i])
        << layers[i].name;
    EXPECT_EQ(layers[i].layer->lora_A().size(0), ranks[i]);
    EXPECT_EQ(layers[i].layer->lora_B().size(1), ranks[i]);
  }
}

TEST(EnableLoraTrainingTest, AlphaDefaultsToTheLayersOwnRank) {
  Model model;
  config::LoraConfig config = Config();
  config.rank_pattern = {{"blocks.0", 4}};
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  EXPECT_EQ(LoraLayers(model)[0].layer->adapter().options.alpha, 4);
  EXPECT_EQ(LoraLayers(model)[2].layer->adapter().options.alpha, 2);
}

TEST(EnableLoraTrainingTest, AdapterDtypeIsAnOption) {
  struct Case {
    config::AdapterDtype option;
    at::ScalarType base;
    at::ScalarType adapter;
  };
  using config::AdapterDtype;
  for (const Case& test :
       {Case{AdapterDtype::kBase, at::kBFloat16, at::kBFloat16},
        Case{AdapterDtype::kFloat32, at::kBFloat16, at::kFloat},
        Case{AdapterDtype::kFloat32, at::kHalf, at::kFloat},
        Case{AdapterDtype::kBFloat16, at::kFloat, at::kBFloat16},
        Case{AdapterDtype::kFloat16, at::kFloat, at::kHalf}}) {
    Model model(1);
    model.to(test.base);
    config::LoraConfig config = Config();
    config.adapter_dtype = test.option;
    ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
    const LoraLayer& layer = *LoraLayers(model)[0].layer;
    EXPECT_EQ(layer.lora_A().scalar_type(), test.adapter);
    EXPECT_EQ(layer.lora_B().scalar_type(), test.adapter);
    const at::Tensor output = model.blocks[0]->as<BlockImpl>()->attn->to_q(
        at::ones({2, kWidth}, test.base));
    EXPECT_EQ(output.scalar_type(), test.base);
  }
}

// Ranks seed the global generator differently, and use it differently.
TEST(EnableLoraTrainingTest, TheGlobalGeneratorDoesNotMatter) {
  const auto values = [](uint64_t seed, int64_t drawn_before) {
    at::manual_seed(seed);
    at::rand({drawn_before});
    Model model;
    EXPECT_THAT(EnableLoraTraining(model, Config()), IsOk());
    std::vector<at::Tensor> values;
    for (const auto& item : TrainableParameters(model)) {
      values.push_back(item.parameter.detach());
    }
    return values;
  };
  const std::vector<at::Tensor> first = values(1, 0);
  const std::vector<at::Tensor> second = values(2, 7);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_TRUE(at::equal(first[i], second[i])) << i;
  }
}

TEST(EnableLoraTrainingTest, TheInitializationKindIsAnOption) {
  const auto lora_A = [](config::AdapterInitialization kind) {
    Model model(1);
    config::LoraConfig config = Config();
    config.initialization = kind;
    EXPECT_THAT(EnableLoraTraining(model, config), IsOk());
    return LoraLayers(model)[0].layer->lora_A().detach();
  };
  const at::Tensor uniform = lora_A(config::AdapterInitialization::kDefault);
  const at::Tensor gaussian = lora_A(config::AdapterInitialization::kGaussian);
  EXPECT_LE(uniform.abs().max().item<double>(), 1 / std::sqrt(8.0));
  EXPECT_GT(gaussian.abs().max().item<double>(), 1 / std::sqrt(8.0));
}

// Dropout with a mask that is drawn in training alone, and on the adapter's
// input alone.
TEST(EnableLoraTrainingTest, DropoutReachesTheAdaptersInputInTrainingAlone) {
  Model model(1);
  config::LoraConfig config = Config();
  config.dropout = 0.5;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  auto to_q = model.blocks[0]->as<BlockImpl>()->attn->to_q;
  const at::Tensor input = at::randn({64, kWidth});
  const at::Tensor base = to_q(input);  // lora_B is zero
  // The adapter passes on the first elements of what it reads.
  const LoraAdapter adapter = to_q->adapter();
  const int64_t rank = adapter.options.rank;
  adapter.lora_A.detach().copy_(at::eye(rank, kWidth));
  adapter.lora_B.detach().copy_(at::eye(kWidth, rank));
  const auto read_by_adapter = [&] {
    return ((to_q(input) - base).narrow(1, 0, rank) / adapter.options.Scale())
        .detach();
  };
  const at::Tensor whole = input.narrow(1, 0, rank);

  model.eval();
  EXPECT_TRUE(at::allclose(read_by_adapter(), whole, 1e-5, 1e-5));
  model.train();
  at::manual_seed(5);
  const at::Tensor dropped = read_by_adapter();
  const at::Tensor kept = dropped.abs() > 1e-4;
  EXPECT_TRUE(at::allclose(dropped, 2 * whole * kept, 1e-4, 1e-3));
  EXPECT_GT(kept.sum().item<int64_t>(), 0);
  EXPECT_LT(kept.sum().item<int64_t>(), kept.numel());
  at::manual_seed(5);
  EXPECT_TRUE(at::equal(read_by_adapter(), dropped));
  EXPECT_FALSE(at::equal(read_by_adapter(), dropped));
}

// `attn` also names a container, a norm and an activation.
TEST(EnableLoraTrainingTest, ATargetThatNamesAContainerAdaptsTheLinearsBelow) {
  Model model(1);
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config({"attn"})));
  EXPECT_THAT(training.layer_names,
              ElementsAre("blocks.0.attn.to_q", "blocks.0.attn.to_k"));
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(EnableLoraTrainingTest, TheRootModuleIsNeverAdapted) {
  // Both match its name, which is empty.
  for (const char* target : {"all-linear", "*"}) {
    ReplicatedLinear model(kWidth, kWidth);
    config::LoraConfig config = Config({target});
    config.target_matching = config::TargetMatching::kGlob;
    EXPECT_THAT(EnableLoraTraining(*model, config),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("no layer that can take a LoRA adapter")))
        << target;
    EXPECT_FALSE(model->is_adapted());
  }
}

TEST(EnableLoraTrainingTest, LogsRankAlphaAndLayerCount) {
  Model model;
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  EXPECT_THAT(
      logs.Messages(LogLevel::kInfo),
      ElementsAre("Enabled LoRA training with rank=2 alpha=2 on 2 layers"));
}

TEST(EnableLoraTrainingTest, WarnsOfATargetThatMatchesNothing) {
  Model model;
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(
                  model, Config({"to_q", "feed_forward.w1feed_forward.w2"})),
              IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("'feed_forward.w1feed_forward.w2' selects "
                                    "no layer")));
}

TEST(EnableLoraTrainingTest, WarnsOfStockLinearLayersAndSaysWhatToUse) {
  Model model(1);
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q", "proj"})), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              UnorderedElementsAre(
                  AllOf(HasSubstr("blocks.0.proj"),
                        HasSubstr("trainer_lora::lora::ReplicatedLinear")),
                  HasSubstr("'proj' selects no layer")));
}

TEST(EnableLoraTrainingTest, NamesTheReplacementForEachStockType) {
  const auto add_stock_layers = [](torch::nn::Module& model) {
    model.register_module("conv1", torch::nn::Conv1d(2, 2, 1));
    model.register_module("conv2", torch::nn::Conv2d(2, 2, 1));
    model.register_module("conv3", torch::nn::Conv3d(2, 2, 1));
    model.register_module("tokens", torch::nn::Embedding(2, 2));
  };
  const auto advice = [](const char* name, const char* type) {
    return HasSubstr(
        absl::StrCat(name, ": torch::nn::", type,
                     " cannot take a LoRA adapter; declare the layer as "
                     "trainer_lora::lora::",
                     type, ","));
  };
  const auto all = {advice("conv1", "Conv1d"), advice("conv2", "Conv2d"),
                    advice("conv3", "Conv3d"), advice("tokens", "Embedding")};

  Model model(1);
  add_stock_layers(model);
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q", "conv", "tokens"})),
              IsOk());
  std::vector<std::string> warnings = logs.Messages(LogLevel::kWarning);
  ASSERT_GE(warnings.size(), all.size());
  warnings.resize(all.size());
  EXPECT_THAT(warnings, ElementsAreArray(all));

  Model nothing_else(0);
  add_stock_layers(nothing_else);
  EXPECT_THAT(EnableLoraTraining(nothing_else, Config({"conv", "tokens"})),
              StatusIs(absl::StatusCode::kInvalidArgument, AllOfArray(all)));
}

TEST(EnableLoraTrainingTest, AllLinearDoesNotMeanConvolutionsOfLibtorch) {
  Model model(1);
  model.register_module("conv", torch::nn::Conv2d(2, 2, 1));
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config({"all-linear"})), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("blocks.0.proj: torch::nn::Linear")));
}

TEST(EnableLoraTrainingTest, WarnsOfARankLargerThanTheLayer) {
  Model model(1);
  LogCapture logs;
  config::LoraConfig config = Config();
  config.rank = kWidth + 1;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(AllOf(HasSubstr("blocks.0.attn.to_q"),
                                HasSubstr("rank 9 is larger than 8"))));
}

TEST(EnableLoraTrainingTest, ALayerWithoutOutputFeaturesCanUseNoRank) {
  torch::nn::Module model;
  model.register_module("to_q", ReplicatedLinear(kWidth, 0));
  LogCapture logs;
  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("to_q: the LoRA rank 2 is larger than 0")));
}

// Each group has its part of the rank, here 1 for one feature.
TEST(EnableLoraTrainingTest, ADepthwiseConvolutionCanUseAsManyRanksAsGroups) {
  torch::nn::Module model;
  model.register_module("conv",
                        Conv2d(torch::nn::Conv2dOptions(8, 8, 1).groups(8)));
  LogCapture logs;
  config::LoraConfig config = Config({"conv"});
  config.rank = 8;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(EnableLoraTrainingTest, ErrorsLeaveTheModelAsItWas) {
  struct Case {
    std::string name;
    config::LoraConfig config;
    std::string message;
  };
  std::vector<Case> cases;
  const auto add = [&cases](std::string name, std::string message) {
    cases.push_back({std::move(name), Config(), std::move(message)});
    return &cases.back().config;
  };
  add("disabled", "disabled")->enable = false;
  add("no rank", "rank must be")->rank = std::nullopt;
  add("rank 0", "rank must be")->rank = 0;
  add("alpha nan", "alpha must be")->alpha = std::nan("");
  add("empty target", "target_modules[0] must be")->target_modules = {""};
  add("no such layer", "targets [to_z, to_y]")->target_modules = {"to_z",
                                                                  "to_y"};
  // Never zero trainables in silence.
  add("stock layers only", "blocks.0.proj, blocks.1.proj: torch::nn::Linear")
      ->target_modules = {"proj"};
  add("all excluded", "no layer that can take")->exclude_modules = {"to_"};
  add("rank pattern", "rank_pattern has patterns without effect: to_v, to_w")
      ->rank_pattern = {{"to_v", 4}, {"to_q", 4}, {"to_w", 4}};
  add("alpha pattern", "alpha_pattern has patterns without effect: to_k")
      ->alpha_pattern = {{"to_k", 4}};
  add("hidden pattern", "rank_pattern has patterns without effect: to_q")
      ->rank_pattern = {{"blocks", 4}, {"to_q", 8}};

  for (const Case& test : cases) {
    Model model;
    model.eval();
    const Snapshot before(model);
    EXPECT_THAT(
        EnableLoraTraining(model, test.config),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.message)))
        << test.name;
    EXPECT_TRUE(before == Snapshot(model)) << test.name;
  }
}

// A layer for whose initial values there is no memory.
class NoMemoryLinearImpl : public CloneableLoraLayer<NoMemoryLinearImpl> {
 public:
  NoMemoryLinearImpl() { register_parameter("weight", at::zeros({3, 2})); }
  int64_t in_features() const override { return 2; }
  int64_t out_features() const override { return 3; }
  std::optional<distributed::StateLayout> LayoutOf(absl::string_view,
                                                   int64_t) const override {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory");
  }
};

TEST(EnableLoraTrainingTest, MemoryThatRunsOutLeavesTheModelAsItWas) {
  Model large;
  // 2^50 bytes for lora_A, more than an address can say.
  large.register_module("last_to_q", ReplicatedLinear(1 << 17, 1));
  config::LoraConfig config = Config();
  config.rank_pattern = {{"last", std::numeric_limits<int32_t>::max()}};
  Model full;
  full.register_module("last_to_q", std::make_shared<NoMemoryLinearImpl>());
  for (auto* model : {&large, &full}) {
    const Snapshot before(*model);
    EXPECT_THAT(EnableLoraTraining(*model, config),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         HasSubstr("last_to_q: ")));
    EXPECT_TRUE(before == Snapshot(*model));
    config.rank_pattern.clear();
  }
}

// Biases that autograd can't train, made when they are asked for.
at::Tensor IntegerBias() { return at::zeros({kWidth}, at::kInt); }
at::Tensor InferenceBias() {
  const c10::InferenceMode inference_mode;
  return at::zeros({kWidth});
}

TEST(EnableLoraTrainingTest, ABiasThatCantBeTrainedLeavesTheModelAsItWas) {
  for (const auto& [bias, problem] :
       {std::pair(IntegerBias(),
                  "last_to_q.bias can't be trained, as it is of "
                  "type Int"),
        std::pair(InferenceBias(),
                  "last_to_q.bias can't be trained, as it was "
                  "made in inference mode")}) {
    for (const auto& [training, fails] :
         {std::pair(config::BiasTraining::kNone, false),
          std::pair(config::BiasTraining::kLoraOnly, true),
          std::pair(config::BiasTraining::kAll, true)}) {
      Model model;
      ReplicatedLinear layer(
          torch::nn::LinearOptions(kWidth, kWidth).bias(false));
      model.register_module("last_to_q", layer);
      layer->register_parameter("bias", bias, /*requires_grad=*/false);
      config::LoraConfig config = Config();
      config.bias = training;
      const Snapshot before(model);
      const absl::Status status = EnableLoraTraining(model, config).status();
      if (!fails) {
        EXPECT_THAT(status, IsOk());
        continue;
      }
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr(problem)));
      EXPECT_TRUE(before == Snapshot(model));
    }
  }
}

TEST(EnableLoraTrainingTest, EnablingTwiceIsAnErrorAndNeverWrapsAWrapper) {
  for (const char* second_target : {"to_q", "to_k"}) {
    Model model;
    ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
    const Snapshot before(model);
    EXPECT_THAT(EnableLoraTraining(model, Config({second_target})),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("blocks.0.attn.to_q")));
    EXPECT_TRUE(before == Snapshot(model));
  }
}

TEST(EnableLoraTrainingTest, AliasesEveryStateOfEveryAdaptedLayer) {
  Model model(1);
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoraTraining training,
      EnableLoraTraining(model, Config({"to_q", "to_k"}), ForFsdp()));
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
                            EnableLoraTraining(model, Config()));
  EXPECT_THAT(training.layer_names, ElementsAre("encoder_to_q"));
  EXPECT_THAT(TrainableNames(model),
              ElementsAre("encoder_to_q.lora_A", "encoder_to_q.lora_B"));
  EXPECT_EQ(training.checkpoint_key_aliases.size(), 4);
  EXPECT_EQ(std::string(
                training.checkpoint_key_aliases.Resolve("decoder_to_q.weight")),
            "decoder_to_q.base_layer.weight");
}

// A checkpoint may use the name that no target matches.
TEST(EnableLoraTrainingTest, ASharedLayerIsAliasedUnderNamesThatNoTargetHas) {
  SharedLayerModel model;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config({"decoder"})));
  EXPECT_THAT(training.layer_names, ElementsAre("encoder_to_q"));
  EXPECT_EQ(training.checkpoint_key_aliases.size(), 4);
}

TEST(EnableLoraTrainingTest, ASharedLayerIsExcludedUnderAnyOfItsNames) {
  SharedLayerModel model;
  config::LoraConfig config = Config();
  config.exclude_modules = {"decoder"};
  EXPECT_THAT(EnableLoraTraining(model, config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("no layer that can take")));
}

TEST(EnableLoraTrainingTest, AnOptimizerStepsASharedLayerOnce) {
  SharedLayerModel model;
  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  model.to_q(model.to_q(at::ones({1, kWidth}))).sum().backward();
  std::vector<at::Tensor> parameters;
  for (const auto& item : TrainableParameters(model)) {
    parameters.push_back(item.parameter);
  }
  const at::Tensor lora_B = model.to_q->lora_B();
  const at::Tensor expected = lora_B.detach() - 0.1 * lora_B.grad();
  torch::optim::SGD optimizer(parameters, /*lr=*/0.1);
  optimizer.step();
  EXPECT_TRUE(at::equal(lora_B.detach(), expected));
}

TEST(EnableLoraTrainingTest, TheDirectPathRefusesAMetaModel) {
  std::unique_ptr<Model> model;
  {
    distributed::MetaDeviceGuard meta;
    model = std::make_unique<Model>();
  }
  const Snapshot before(*model);
  EXPECT_THAT(EnableLoraTraining(*model, Config()),
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
  ASSERT_THAT(EnableLoraTraining(base, Config()), IsOk());

  for (const bool on_meta : {false, true}) {
    std::unique_ptr<Model> model;
    {
      std::optional<distributed::MetaDeviceGuard> meta;
      if (on_meta) meta.emplace();
      model = std::make_unique<Model>();
    }
    LORA_ASSERT_OK_AND_ASSIGN(
        LoraTraining training,
        EnableLoraTraining(*model, Config({"to_q"}), ForFsdp()));
    EXPECT_EQ(TrainableNames(*model).size(), 4);
    if (on_meta) {
      EXPECT_THAT(
          FinalizeLoraTraining(*model),
          StatusIs(absl::StatusCode::kFailedPrecondition,
                   HasSubstr("are on the meta device: load the base weights")));
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
      const at::Tensor loaded = model->named_parameters()[item.key()];
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
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q"}), ForFsdp()), IsOk());
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

TEST(FinalizeLoraTrainingTest, AParameterThatCantBeTrainedIsAnErrorBefore) {
  config::LoraConfig config = Config();
  config.bias = config::BiasTraining::kLoraOnly;
  for (const char* name :
       {"blocks.1.attn.to_q.base_layer.bias", "blocks.1.attn.to_q.lora_B"}) {
    Model model;
    ASSERT_THAT(EnableLoraTraining(model, config, ForFsdp()), IsOk());
    model.eval();
    at::Tensor parameter = model.named_parameters()[name];
    parameter.set_requires_grad(false);
    parameter.set_data(at::zeros(parameter.sizes(), at::kInt));
    const Snapshot before(model);
    const std::string message =
        absl::StrCat(name, " can't be trained, as it is of type Int");
    EXPECT_THAT(
        FinalizeLoraTraining(model),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(message)));
    EXPECT_TRUE(before == Snapshot(model));
    parameter.set_data(at::empty(parameter.sizes(), at::kFloat8_e4m3fn));
    EXPECT_THAT(
        FinalizeLoraTraining(model),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 HasSubstr("can't be trained, as it is of type Float8")));
  }
}

TEST(FinalizeLoraTrainingTest, AMagnitudeThatCantBeWrittenIsAnErrorBefore) {
  config::LoraConfig config = Config();
  config.use_dora = true;
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, config, ForFsdp()), IsOk());
  model.named_parameters()["blocks.1.attn.to_q.lora_magnitude"].set_data(
      at::zeros({1}).expand({kWidth}));
  const Snapshot before(model);
  EXPECT_THAT(
      FinalizeLoraTraining(model),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("blocks.1.attn.to_q.lora_magnitude can't be written: "
                         "it has several elements in one place")));
  EXPECT_TRUE(before == Snapshot(model));
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
  ASSERT_THAT(EnableLoraTraining(model, Config({"to_q"}), ForFsdp()), IsOk());
  forgetful->ForgetLoraB();
  model.eval();
  const Snapshot before(model);
  EXPECT_THAT(FinalizeLoraTraining(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("last_to_q has lost its adapter parameter "
                                 "lora_B")));
  EXPECT_TRUE(before == Snapshot(model));
}

}  // namespace
}  // namespace trainer_lora::lora
