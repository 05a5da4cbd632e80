#include "lora/model_summary.h"

#include <memory>

#include "config/lora_config.h"
#include "distributed/meta_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using ::trainer_lora::testutil::IsOk;

// 4 x 3 + 4, 4 x 3 + 4, and the first again under a second name.
struct Model : torch::nn::Module {
  Model() {
    register_module("to_q", to_q);
    register_module("to_v", to_v);
    register_module("tied", to_q);
  }
  ReplicatedLinear to_q{3, 4};
  ReplicatedLinear to_v{3, 4};
};

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = {"to_"};
  config.rank_pattern = {{"to_v", 5}};
  return config;
}

TEST(ModelSummaryTest, CountsEachParameterOnce) {
  Model model;
  ModelSummary summary = Summarize(model);
  EXPECT_THAT(summary.lora_layers, ElementsAre());
  EXPECT_EQ(summary.parameters, 32);
  EXPECT_EQ(summary.trained_parameters, 32);
  EXPECT_EQ(summary.TrainedShare(), 1);

  ASSERT_THAT(EnableLoraTraining(model, Config()), IsOk());
  summary = Summarize(model);
  EXPECT_THAT(summary.lora_layers, ElementsAre(Pair(2, 1), Pair(5, 1)));
  EXPECT_EQ(summary.parameters, 32 + (2 + 5) * (3 + 4));
  EXPECT_EQ(summary.trained_parameters, (2 + 5) * (3 + 4));
  EXPECT_DOUBLE_EQ(summary.TrainedShare(), 49.0 / 81);
}

TEST(ModelSummaryTest, CountsAModelOnTheMetaDeviceToo) {
  std::unique_ptr<Model> model;
  {
    distributed::MetaDeviceGuard meta_device;
    model = std::make_unique<Model>();
  }
  EXPECT_EQ(Summarize(*model).parameters, 32);
}

TEST(ModelSummaryTest, AModelWithoutParametersHasNoShare) {
  EXPECT_EQ(Summarize(torch::nn::Module()).TrainedShare(), 0);
}

TEST(ModelSummaryTest, TheTableHasALineARole) {
  ModelSummary student;
  student.lora_layers = {{8, 30}, {16, 6}};
  student.parameters = 1234567;
  student.trained_parameters = 12345;
  ModelSummary teacher;
  teacher.parameters = 999;
  EXPECT_EQ(SummaryTable({{"student", student}, {"ema_teacher", teacher}}),
            "role         LoRA layers                      parameters  trained "
            "  share\n"
            "student      36 (30 of rank 8, 6 of rank 16)   1,234,567   12,345 "
            " 1.00 %\n"
            "ema_teacher  0                                       999        0 "
            " 0.00 %\n");
}

}  // namespace
}  // namespace trainer_lora::lora
