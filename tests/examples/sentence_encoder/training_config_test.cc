#include "examples/sentence_encoder/training_config.h"

#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::examples {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

std::string Write(const std::string& name, const std::string& text) {
  const std::string path = testing::TempDir() + name;
  std::ofstream(path) << text;
  return path;
}

TEST(TrainingConfigTest, ReadsTheExamplesOwnFile) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainingConfig config,
      TrainingConfig::Load(testutil::RunfilePath(
          "trainer_lora/examples/sentence_encoder/train.yaml")));
  EXPECT_EQ(config.lora.rank, 8);
  EXPECT_EQ(config.lora.alpha, 16);
  EXPECT_THAT(*config.lora.target_modules,
              ElementsAre("query", "key", "value", "dense"));
  EXPECT_EQ(config.seed, 42);
  EXPECT_EQ(config.steps, 60);
  EXPECT_EQ(config.batch_size, 32);
  EXPECT_EQ(config.optimizer.learning_rate, 1e-3);
  EXPECT_EQ(config.optimizer.warmup_steps, 10);
}

TEST(TrainingConfigTest, NamesEveryProblemAtOnce) {
  const std::string path = Write("problems.yaml", R"(models:
  student: {lora: {enable: true, rank: 8}}
training:
  steps: 0
  learning_rate: 1e-3
  optimizer:
    learning_rate: -1
    warmup_steps: ten
)");
  EXPECT_THAT(
      TrainingConfig::Load(path),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr(path + ":4:10: training.steps must be an "
                                      "integer from 1 on, got 0"),
                     HasSubstr("training has unknown keys: learning_rate;"),
                     HasSubstr(path + ":7:20: training.optimizer.learning_rate "
                                      "must be a positive number, got -1"),
                     HasSubstr(":8:19: training.optimizer.warmup_steps"))));
}

TEST(TrainingConfigTest, RefusesWhatFitsNoInt) {
  const std::string path = Write("large.yaml", R"(models:
  student: {lora: {enable: true, rank: 8}}
training:
  held_out: 3000000000
  max_length: 4294967296
)");
  EXPECT_THAT(TrainingConfig::Load(path),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       path +
                           ":4:13: training.held_out must be at most "
                           "2147483647, got 3000000000\n" +
                           path +
                           ":5:15: training.max_length must be at most "
                           "2147483647, got 4294967296"));
}

TEST(TrainingConfigTest, WantsLoraOnTheStudent) {
  for (const char* models :
       {"{teacher: {lora: {enable: true, rank: 8}}}", "{student: {}}",
        "{student: {lora: {enable: false, rank: 8}}}"}) {
    EXPECT_THAT(TrainingConfig::Load(Write(
                    "no_lora.yaml", std::string("models: ") + models + "\n")),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("models.student.lora.enable must be true")))
        << models;
  }
}

TEST(TrainingConfigTest, NamesAMissingFile) {
  EXPECT_THAT(TrainingConfig::Load("nowhere.yaml"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("nowhere.yaml")));
}

}  // namespace
}  // namespace trainer_lora::examples
