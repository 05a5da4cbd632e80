// Adapters for some of a model's layers (blocks) alone.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::trainer_lora::config::LogLevel;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::StatusIs;

using Ranges = std::vector<config::LayerRange>;

// double_blocks.0 to .3 and single_blocks.0 to .7 with a to_q each, and one
// outside of them.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    to_q = register_module("to_q", ReplicatedLinear(2, 2));
    AddBlocks("double_blocks", 4);
    AddBlocks("single_blocks", 8);
  }

  void AddBlocks(const std::string& name, int64_t count) {
    auto blocks = register_module(name, torch::nn::ModuleList());
    for (int64_t i = 0; i < count; ++i) {
      auto block = std::make_shared<torch::nn::Module>("Block");
      block->register_module("to_q", ReplicatedLinear(2, 2));
      block->register_module("proj", torch::nn::Linear(2, 2));
      blocks->push_back(block);
    }
  }

  ReplicatedLinear to_q{nullptr};
};
TORCH_MODULE(Model);

config::LoraConfig Config(Ranges ranges, std::vector<std::string> lists = {}) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 1;
  config.target_modules = {{"to_q"}};
  config.layers_to_transform = std::move(ranges);
  config.layers_pattern = std::move(lists);
  return config;
}

TEST(LayerRangesTest, SelectsTheLayersInAnyList) {
  LogCapture logs;
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoraTraining training,
      EnableLoraTraining(*model, Config({{5, 6}, {2, 2}})));
  EXPECT_THAT(training.layer_names,
              ElementsAre("double_blocks.2.to_q", "single_blocks.2.to_q",
                          "single_blocks.5.to_q", "single_blocks.6.to_q"));
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), IsEmpty());
}

TEST(LayerRangesTest, SelectsTheLayersOfTheListsNamed) {
  Model model;
  LORA_ASSERT_OK_AND_ASSIGN(
      const LoraTraining training,
      EnableLoraTraining(*model, Config({{2, 4}}, {"double_blocks"})));
  EXPECT_THAT(training.layer_names,
              ElementsAre("double_blocks.2.to_q", "double_blocks.3.to_q"));
}

TEST(LayerRangesTest, ALayerOfSeveralNamesIsInTheLayersOfAll) {
  for (const int64_t layer : {5, 12}) {
    Model model;
    auto aliases = model->register_module(
        "aliases", std::make_shared<torch::nn::Module>());
    aliases->register_module("12",
                             model->named_modules()["single_blocks.5.to_q"]);
    config::LoraConfig config = Config({{layer, layer}});
    config.exclude_modules = {"double_blocks"};
    LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                              EnableLoraTraining(*model, config));
    EXPECT_THAT(training.layer_names, ElementsAre("single_blocks.5.to_q"));
  }
}

TEST(LayerRangesTest, WarnsOfRangesAndListsWithoutEffect) {
  LogCapture logs;
  Model model;
  ASSERT_THAT(
      EnableLoraTraining(*model, Config({{30, 40}, {6, 9}, {12, 12}},
                                        {"single_blocks", "duoble_blocks"})),
      IsOk());
  EXPECT_THAT(
      logs.Messages(LogLevel::kWarning),
      ElementsAre("layers_to_transform 30-40, 12 selects no layer that can "
                  "take an adapter",
                  "layers_pattern 'duoble_blocks' selects no layer that can "
                  "take an adapter"));
}

TEST(LayerRangesTest, WarnsOfATargetThatIsInOtherLayersAlone) {
  LogCapture logs;
  Model model;
  config::LoraConfig config = Config({{0, 0}});
  config.target_modules = {{"double_blocks.1.", "to_q"}};
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("the LoRA target 'double_blocks.1.' "
                                    "selects no layer that can take an "
                                    "adapter in the layers 0")));
}

TEST(LayerRangesTest, NoLayerInRangeIsAnErrorThatNamesTheRanges) {
  Model model;
  EXPECT_THAT(EnableLoraTraining(*model, Config({{8, 11}, {20, 20}})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "no layer that can take a LoRA adapter was found for "
                       "the targets [to_q] in the layers 8-11, 20"));
  EXPECT_FALSE(model->to_q->is_adapted());
}

// What is out of range was not meant to be adapted.
TEST(LayerRangesTest, WarnsOfStockLayersInRangeAlone) {
  LogCapture logs;
  Model model;
  config::LoraConfig config = Config({{7, 7}});
  config.target_modules = {{"to_q", "proj"}};
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr("single_blocks.7.proj: torch::nn::Linear"),
                          HasSubstr("'proj' selects no layer")));
}

}  // namespace
}  // namespace trainer_lora::lora
