#include "config/trainer_config.h"

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/logging.h"
#include "config/yaml_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::config {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testutil::IsOk;
using testutil::LogCapture;
using testutil::StatusIs;

std::string Testdata(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_SRCDIR"), "/",
                      std::getenv("TEST_WORKSPACE"), "/tests/testdata/", name);
}

// A path of this test case's own, with nothing there.
std::string TempPath() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string path = absl::StrCat(
      testing::TempDir(), "/", info->test_suite_name(), ".", info->name());
  std::filesystem::remove_all(path);  // What an earlier run left.
  return path;
}

std::vector<std::string> RoleNames(const TrainerConfig& config) {
  std::vector<std::string> names;
  for (const RoleConfig& role : config.models) names.push_back(role.name);
  return names;
}

TEST(TrainerConfigTest, LoadsAnEverydayFile) {
  const std::string path = Testdata("wan_distillation.yaml");
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const TrainerConfig config,
                            TrainerConfig::Load(path));
  EXPECT_EQ(config.file, path);
  ASSERT_THAT(RoleNames(config),
              ElementsAre("student", "teacher", "critic", "discriminator"));

  const RoleConfig& student = config.models[0];
  EXPECT_TRUE(student.trainable);
  EXPECT_TRUE(student.lora->enable);
  EXPECT_EQ(student.lora->rank, 32);
  EXPECT_EQ(student.lora->alpha, 64.0);
  EXPECT_EQ(student.node["init_from"].as<std::string>(),
            "checkpoints/wan-1.3b");

  const RoleConfig& teacher = config.models[1];
  EXPECT_FALSE(teacher.trainable);
  EXPECT_EQ(teacher.lora.has_value(), false);

  const RoleConfig& critic = config.models[2];
  EXPECT_TRUE(critic.trainable);
  EXPECT_EQ(critic.lora->rank, 16) << "its own rank goes before the merged one";
  EXPECT_EQ(critic.lora->alpha, 64.0);
  EXPECT_THAT(*critic.lora->target_modules,
              ElementsAre("to_q", "to_k", "to_v", "to_out"));

  EXPECT_FALSE(config.models[3].lora->enable);
  EXPECT_THAT(logs.Messages(LogLevel::kWarning), ElementsAre());
  EXPECT_THAT(
      logs.Messages(LogLevel::kInfo),
      ElementsAre(HasSubstr("models.discriminator.lora.rank=8 is set but")));
}

TEST(TrainerConfigTest, HandsOnTheRestOfTheTree) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig config,
      TrainerConfig::Load(Testdata("wan_distillation.yaml")));
  YamlErrors errors(config.file);
  YamlMapping training(config.root["training"], "training", &errors);
  YamlMapping optimizer = training.ReadMapping("optimizer");
  double learning_rate = 0;
  std::string scheduler;
  optimizer.Read("learning_rate", &learning_rate);
  optimizer.Read("lr_scheduler", &scheduler);
  int64_t steps = 0;
  training.ReadMapping("loop").Read("max_train_steps", &steps);
  bool pin = true;
  training.ReadMapping("distributed").Read("pin_cpu_memory", &pin);
  EXPECT_THAT(errors.ToStatus(), IsOk());
  EXPECT_EQ(learning_rate, 2e-6);
  EXPECT_EQ(scheduler, "constant");
  EXPECT_EQ(steps, 4000);
  EXPECT_FALSE(pin);
}

TEST(TrainerConfigTest, ReportsAllProblemsOfAFile) {
  EXPECT_THAT(TrainerConfig::Parse(R"(models:
  student:
    init_from: x
    trainable: "true"
    lora:
      enable: true
      rank: 16.7
  teacher:
    trainable: false
    lora:
      enable: true
      rank: 16
  critic: [1, 2]
  judge:
    lora: []
  empty:
)",
                                   "train.yaml"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:4:16: models.student.trainable must be true "
                       "or false without quotes, got \"true\"\n"
                       "train.yaml:7:13: models.student.lora.rank must be a "
                       "positive integer, got 16.7\n"
                       "train.yaml:11:7: models.teacher.lora is enabled but "
                       "models.teacher.trainable is false: set trainable to "
                       "true, or enable to false\n"
                       "train.yaml:13:11: models.critic must be a mapping, got "
                       "a list\n"
                       "train.yaml:15:11: models.judge.lora must be a mapping, "
                       "got a list\n"
                       "train.yaml:16:3: models.empty must be a mapping, got "
                       "null"));
}

TEST(TrainerConfigTest, DisabledLoraMayStandOnAFrozenRole) {
  EXPECT_THAT(TrainerConfig::Parse("models:\n  teacher:\n    trainable: false\n"
                                   "    lora: {enable: false, rank: 4}\n",
                                   "train.yaml"),
              IsOk());
}

TEST(TrainerConfigTest, RefusesAFileWithoutRoles) {
  struct Case {
    const char* name;
    const char* text;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"no models", "training: {}\n",
       "train.yaml:1:1: models must be a mapping with at least one role, got "
       "nothing"},
      {"empty models", "models:\n",
       "models must be a mapping with at least one role, got null"},
      {"no role", "models: {}\n",
       "train.yaml:1:9: models must be a mapping with at least one role, got "
       "a mapping"},
      {"a list", "models: [student]\n",
       "train.yaml:1:9: models must be a mapping, got a list"},
      {"a list as the root", "- models\n",
       "train.yaml:1:1: the file must be a mapping, got a list"},
      {"text", "models\n", "the file must be a mapping, got models"},
      {"a number for a role's name", "models: {1: {}}\n",
       "train.yaml:1:10: a key of models must be a string, got 1"},
      {"empty", "", "train.yaml: the file is empty"},
      {"no YAML", "models: {\n", "train.yaml:2:1: not valid YAML"},
      {"a role twice", "models: {a: {}, a: {}}\n",
       "train.yaml:1:17: the key \"a\" is given twice"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_THAT(
        TrainerConfig::Parse(c.text, "train.yaml"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
  }
}

TEST(TrainerConfigTest, MissingFileIsNotFound) {
  const std::string path = TempPath();
  EXPECT_THAT(TrainerConfig::Load(path),
              StatusIs(absl::StatusCode::kNotFound,
                       absl::StrCat(path, ": no such file")));
}

TEST(TrainerConfigTest, DirectoryIsRefused) {
  const std::string path = TempPath();
  std::filesystem::create_directory(path);
  EXPECT_THAT(
      TrainerConfig::Load(path),
      StatusIs(absl::StatusCode::kInvalidArgument,
               absl::StrCat(path, ": is a directory, not a YAML file")));
}

// Permissions are nothing to root, a symbolic link to itself is an obstacle to
// everybody.
TEST(TrainerConfigTest, FileThatCannotBeOpenedIsRefused) {
  const std::string path = TempPath();
  std::filesystem::create_symlink(path, path);
  const absl::Status status = TrainerConfig::Load(path).status();
  EXPECT_NE(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(
      std::string(status.message()),
      StartsWith(absl::StrCat(
          path, ": can't be opened: Too many levels of symbolic links")));
}

TEST(TrainerConfigTest, LargeFileIsRefused) {
  const std::string path = TempPath();
  std::ofstream(path) << "models: {student: {}}\n";
  // Sparse: nothing of this is written or read as a whole.
  std::filesystem::resize_file(path, int64_t{64} << 20);
  EXPECT_THAT(TrainerConfig::Load(path),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       absl::StrCat(path, ": the file is larger than 4 MiB")));
}

}  // namespace
}  // namespace trainer_lora::config
