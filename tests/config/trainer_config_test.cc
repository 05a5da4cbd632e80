#include "config/trainer_config.h"

#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "config/logging.h"
#include "config/yaml_overrides.h"
#include "config/yaml_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using testutil::IsOk;
using testutil::LogCapture;
using testutil::StatusIs;

std::string Testdata(const std::string& name) {
  return testutil::RunfilePath(
      absl::StrCat("trainer_lora/tests/testdata/", name));
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
                       "got an empty list\n"
                       "train.yaml:16:3: models.empty must be a mapping, got "
                       "null"));
}

// Text of the file does not look like lines of a message.
TEST(TrainerConfigTest, AProblemIsOneLineWhateverTheRoleIsCalled) {
  const std::string role = "a\\n\\x07" + std::string(100, 'b');
  const std::string shown = "models.a\\x0a\\x07" + std::string(57, 'b') + "...";
  EXPECT_THAT(TrainerConfig::Parse(
                  absl::StrCat("models: {\"", role, "\": {trainable: 3}}"),
                  "train.yaml"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(absl::StrCat(": ", shown, ".trainable")),
                             Not(HasSubstr("\n")))));
  LogCapture logs;
  EXPECT_THAT(TrainerConfig::Parse(
                  absl::StrCat("models: {\"", role, "\": {lora: {rank: 3}}}"),
                  "train.yaml"),
              IsOk());
  EXPECT_THAT(
      logs.Messages(LogLevel::kInfo),
      ElementsAre(StartsWith(absl::StrCat(shown, ".lora.rank=3 is set"))));
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

// --- Overrides ---------------------------------------------------------------

constexpr char kTwoRoles[] = R"(models:
  student:
    trainable: true
    lora: &lora
      enable: true
      rank: 16
      target_modules: [to_q]
  critic:
    lora: *lora
  judge:
    lora:
      <<: *lora
  teacher:
    lora:
training:
  betas: [0.9, 0.95]
  steps: 10
)";

absl::StatusOr<TrainerConfig> ParseWith(
    const std::vector<std::string>& overrides) {
  return TrainerConfig::Parse(kTwoRoles, "train.yaml", overrides);
}

TEST(TrainerConfigOverrideTest, SetsValuesOfEveryType) {
  struct Case {
    const char* name;
    std::vector<std::string> overrides;
    // Of the file with the same change.
    const char* from;
    const char* to;
  };
  const std::vector<Case> cases = {
      {"nothing", {}, "", ""},
      {"a number", {"training.steps=20"}, "steps: 10", "steps: 20"},
      {"a quoted number",
       {"training.steps=\"20\""},
       "steps: 10",
       "steps: '20'"},
      {"spaces around the value",
       {"training.steps= 20 "},
       "steps: 10",
       "steps: 20"},
      {"a null", {"training.steps=null"}, "steps: 10", "steps: ~"},
      {"no value", {"training.steps="}, "steps: 10", "steps:"},
      {"a list", {"training.betas=[1, x]"}, "[0.9, 0.95]", "[1, x]"},
      {"a mapping",
       {"training.betas={a: {b: 1}}"},
       "betas: [0.9, 0.95]",
       "betas:\n    a:\n      b: 1"},
      {"a value with =", {"training.steps=a=b"}, "steps: 10", "steps: a=b"},
      {"several lines",
       {"training.steps=|\n  a\n  b\n"},
       "steps: 10",
       "steps: \"a\\nb\\n\""},
      {"other scripts",
       {"training.\xCF\x80=\xE4\xB8\x96"},
       "steps: 10",
       "steps: 10\n  \xCF\x80: \xE4\xB8\x96"},
      {"a new key", {"training.seed=1"}, "steps: 10", "steps: 10\n  seed: 1"},
      {"new mappings",
       {"training.a.b.c=1"},
       "steps: 10",
       "steps: 10\n  a:\n    b:\n      c: 1"},
      {"a new key of the root",
       {"callbacks.ema.beta=1"},
       "steps: 10",
       "steps: 10\ncallbacks: {ema: {beta: 1}}"},
      {"a key that looks like a number",
       {"training.7=1"},
       "steps: 10",
       "steps: 10\n  '7': 1"},
      {"a mapping in place of a null",
       {"models.teacher.lora.rank=4"},
       "teacher:\n    lora:",
       "teacher:\n    lora: {rank: 4}"},
      {"a role as a whole", {"models.student={}"}, "steps: 10", nullptr},
      {"the later one wins",
       {"training.steps=1", "training.steps=2"},
       "steps: 10",
       "steps: 2"},
      {"a value below an earlier override",
       {"training.a={b: 1}", "training.a.c=2"},
       "steps: 10",
       "steps: 10\n  a: {b: 1, c: 2}"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    LORA_ASSERT_OK_AND_ASSIGN(const TrainerConfig config,
                              ParseWith(c.overrides));
    if (c.to == nullptr) continue;
    LORA_ASSERT_OK_AND_ASSIGN(
        const TrainerConfig expected,
        TrainerConfig::Parse(absl::StrReplaceAll(kTwoRoles, {{c.from, c.to}}),
                             "train.yaml"));
    EXPECT_EQ(config, expected) << config.ToYaml() << expected.ToYaml();
  }
}

TEST(TrainerConfigOverrideTest, ChangesOneUserOfAnAliasAlone) {
  for (const char* role : {"student", "critic", "judge"}) {
    SCOPED_TRACE(role);
    LORA_ASSERT_OK_AND_ASSIGN(
        const TrainerConfig config,
        ParseWith({absl::StrCat("models.", role, ".lora.rank=32"),
                   absl::StrCat("models.", role, ".lora.alpha=8")}));
    for (const RoleConfig& other : config.models) {
      if (!other.lora) continue;
      EXPECT_EQ(other.lora->rank, other.name == role ? 32 : 16) << other.name;
      EXPECT_EQ(other.lora->alpha.has_value(), other.name == role);
    }
  }
}

TEST(TrainerConfigOverrideTest, KeepsTheOrderOfRolesAndKeys) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig config,
      ParseWith({"models.critic={}", "models.student.trainable=yes"}));
  EXPECT_THAT(RoleNames(config),
              ElementsAre("student", "critic", "judge", "teacher"));
  EXPECT_EQ(config.models[0].node.begin()->first.Scalar(), "trainable");
}

TEST(TrainerConfigOverrideTest, RefusesWithTheOverrideInsteadOfALine) {
  struct Case {
    const char* name;
    std::string override;
    std::string message;
  };
  const std::vector<Case> cases = {
      {"no =", "models.student",
       "there is no =: an override is a path of keys, = and a value, such as "
       "models.student.lora.rank=16"},
      {"empty", "",
       "there is no =: an override is a path of keys, = and a "
       "value, such as models.student.lora.rank=16"},
      {"no path", "=3", "the path before the = is empty"},
      {"an empty part", "models..lora=3", "a part of the path is empty"},
      {"a dot at the end", "models.student.=3", "a part of the path is empty"},
      {"a role that isn't there", "models.studnt.lora.rank=4",
       "models has no studnt (did you mean student?); it has student, critic, "
       "judge, teacher"},
      {"a new role as a whole", "models.x={}",
       "models has no x; it has student, critic, judge, teacher"},
      {"through a scalar", "training.steps.max=3",
       "training.steps has no keys: it is 10"},
      {"through a list", "training.betas.0=3",
       "training.betas is a list: replace the list as a whole, "
       "training.betas=[...]"},
      {"an unclosed list", "training.steps=[1",
       "not valid YAML: end of sequence flow not found"},
      {"two documents", "training.steps=a\n---\nb",
       "a second document starts here; there must be one"},
      {"an alias of the file", "training.steps=*lora",
       "not valid YAML: the referenced anchor is not defined"},
      {"a duplicate key", "training.steps={a: 1, a: 2}",
       "the key \"a\" is given twice"},
      {"no UTF-8", "training.steps=\xFF", "not UTF-8"},
      {"no UTF-8 in the path", "training.\xFF=1", "not UTF-8"},
      {"a path without end", absl::StrCat(std::string(2000, '.'), "=1"),
       "a part of the path is empty"},
      {"a wrong type", "models.student.lora.rank=abc",
       "models.student.lora.rank must be a positive integer, got abc"},
      {"a wrong value", "models.student.lora.rank=-1",
       "models.student.lora.rank must be a positive integer, got -1"},
      {"a null", "models.student.lora.rank=null",
       "models.student.lora.rank must be a positive integer when enable is "
       "true, got null"},
      {"an element", "models.student.lora.target_modules=[to_q, 7]",
       "models.student.lora.target_modules[1] must be a string that is not "
       "empty, got 7 (quote it if it is text)"},
      {"below a new mapping", "models.teacher.lora.enable=true",
       "models.teacher.lora.rank must be a positive integer when enable is "
       "true, got nothing"},
      {"a frozen role", "models.student.trainable=false",
       "models.student.lora is enabled but models.student.trainable is false: "
       "set trainable to true, or enable to false"},
      {"a role that is no mapping", "models.student=[a]",
       "models.student must be a mapping, got a list"},
      {"a role that is null",
       "models.student=", "models.student must be a mapping, got null"},
      {"no roles", "models={}",
       "models must be a mapping with at least one role, got a mapping"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string shown = absl::StrReplaceAll(
        absl::Utf8SafeCEscape(c.override.substr(0, 200)), {{"\xFF", "\\xff"}});
    EXPECT_THAT(ParseWith({"training.seed=3", c.override}),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("override \"", shown,
                                      c.override.size() > 200 ? "..." : "",
                                      "\": ", c.message)));
  }
}

TEST(TrainerConfigOverrideTest, ReportsAllProblemsOfFileAndOverrides) {
  EXPECT_THAT(
      TrainerConfig::Parse(
          "models:\n  student:\n    trainable: 7\n    lora: {enable: true}\n",
          "train.yaml",
          {"models.student.lora.seed=\n\n-1", "models.student.lora.rank=x",
           "models.student.lora.alpha=y"}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               "train.yaml:3:16: models.student.trainable must be true or "
               "false without quotes, got 7\n"
               "override \"models.student.lora.seed=\\n\\n-1\": "
               "models.student.lora.seed must be an integer from 0 on, got -1\n"
               "override \"models.student.lora.rank=x\": "
               "models.student.lora.rank must be a positive integer, got x\n"
               "override \"models.student.lora.alpha=y\": "
               "models.student.lora.alpha must be a positive number, got y"));
  EXPECT_THAT(ParseWith({"a", "models.x.y=1"}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("override \"a\": there is no ="),
                             HasSubstr("\noverride \"models.x.y=1\": models "
                                       "has no x"))));
}

TEST(TrainerConfigOverrideTest, ReportsEachProblemOfAValueOnALineOfItsOwn) {
  EXPECT_THAT(
      ParseWith({"x={a: 1, a: 2, b: 1, b: 2}"}),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          "override \"x={a: 1, a: 2, b: 1, b: 2}\": the key \"a\" is given "
          "twice\n"
          "override \"x={a: 1, a: 2, b: 1, b: 2}\": the key \"b\" is given "
          "twice"));
}

TEST(ApplyOverridesTest, TakesAMappingThatWasMadeInCode) {
  YAML::Node root;
  root["a"]["b"] = 1;
  root["a"]["c"] = 2;
  YamlErrors errors("made.yaml");
  const YAML::Node result =
      ApplyOverrides(root, {"a.b=3", "a.d=4", "a.c=[", "e.f=5"},
                     /*file_lines=*/0, /*closed_mapping=*/"", &errors);
  EXPECT_EQ(result["a"]["b"].as<int>(), 3);
  EXPECT_EQ(result["a"]["c"].as<int>(), 2);
  EXPECT_EQ(result["a"]["d"].as<int>(), 4);
  EXPECT_EQ(result["e"]["f"].as<int>(), 5);
  EXPECT_EQ(errors.size(), 1);
  // As before, the mapping has no position.
  EXPECT_EQ(errors.Locate(result["a"].Mark(), "wrong"), "made.yaml: wrong");
}

// What the trainer reads on its own names overrides too.
TEST(TrainerConfigOverrideTest, ErrorsOfTheTrainerKnowOverrides) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig config,
      ParseWith({"training.steps=many", "training.seed=x"}));
  YamlErrors errors = config.errors;
  YamlMapping training(config.root["training"], "training", &errors);
  int64_t number = 0;
  training.Read("steps", &number);
  training.Read("betas", &number);
  training.Refuse("name", "set");
  EXPECT_THAT(errors.ToStatus(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:16:3: training.name must be set, got "
                       "nothing\n"
                       "train.yaml:16:10: training.betas must be an integer, "
                       "got a list\n"
                       "override \"training.steps=many\": training.steps must "
                       "be an integer, got many"));
}

// --- ToYaml ------------------------------------------------------------------

TEST(TrainerConfigToYamlTest, SpellsOutTheResolvedConfig) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig config,
      TrainerConfig::Parse(R"(# comment
models:
  student:
    init_from: "16"
    lora: &lora {enable: on, rank: 1e1, target_modules: to_q, typo: 1}
  critic:
    trainable: no
    lora: {<<: *lora, enable: false, alpha: "0.5"}
  teacher:
    trainable: false
training: {betas: [0.9, .inf], notes: "two\nlines", name: , debug: {}}
)",
                           "train.yaml", {"models.student.lora.seed=7"}));
  EXPECT_EQ(config.ToYaml(), R"(models:
  student:
    init_from: "16"
    lora:
      enable: true
      rank: 10
      target_modules: [to_q]
      exclude_modules: []
      target_matching: substring
      layers_pattern: []
      rank_pattern: {}
      alpha_pattern: {}
      use_rslora: false
      use_dora: false
      dropout: 0
      bias: none
      adapter_dtype: base
      initialization: default
      seed: 7
    trainable: true
  critic:
    trainable: false
    lora:
      enable: false
      rank: 10
      alpha: 0.5
      target_modules: [to_q]
      exclude_modules: []
      target_matching: substring
      layers_pattern: []
      rank_pattern: {}
      alpha_pattern: {}
      use_rslora: false
      use_dora: false
      dropout: 0
      bias: none
      adapter_dtype: base
      initialization: default
      seed: 0
  teacher:
    trainable: false
training:
  betas: [0.9, .inf]
  notes: "two\nlines"
  name: ~
  debug: {}
)");
}

TEST(TrainerConfigToYamlTest, IsReadBackAsAnEqualConfig) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig config,
      TrainerConfig::Load(Testdata("wan_distillation.yaml"),
                          {"models.student.lora.rank_pattern={to_out: 8}",
                           "training.data.path=\"16\""}));
  LORA_ASSERT_OK_AND_ASSIGN(
      const TrainerConfig again,
      TrainerConfig::Parse(config.ToYaml(), "resolved.yaml"));
  EXPECT_EQ(again, config);
  EXPECT_EQ(again.ToYaml(), config.ToYaml());
  EXPECT_EQ(again.models[0].lora, config.models[0].lora);
}

TEST(TrainerConfigToYamlTest, ChangedRolesAreNotEqual) {
  LORA_ASSERT_OK_AND_ASSIGN(const TrainerConfig config, ParseWith({}));
  for (const char* override :
       {"models.student.lora.rank=17", "models.teacher.trainable=false",
        "models.teacher.name=x", "training.steps=11", "training.steps=\"10\"",
        "training.betas=[0.95, 0.9]", "new=null"}) {
    SCOPED_TRACE(override);
    LORA_ASSERT_OK_AND_ASSIGN(const TrainerConfig other, ParseWith({override}));
    EXPECT_NE(other, config);
  }
  LORA_ASSERT_OK_AND_ASSIGN(TrainerConfig changed, ParseWith({}));
  changed.models[0].lora->rank = 17;
  EXPECT_NE(changed, config);
  EXPECT_THAT(changed.ToYaml(), HasSubstr("rank: 17\n"));
}

// --- Files -------------------------------------------------------------------

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

// As a shell hands on the output of a command: --config=<(command).
TEST(TrainerConfigTest, PipeIsReadToItsEnd) {
  constexpr absl::string_view kText = "models: {student: {}}\n";
  std::array<int, 2> ends;
  ASSERT_EQ(pipe(ends.data()), 0);
  // A pipe's buffer holds more than that.
  ASSERT_EQ(write(ends[1], kText.data(), kText.size()), ssize_t{kText.size()});
  close(ends[1]);
  LORA_ASSERT_OK_AND_ASSIGN(
      TrainerConfig config,
      TrainerConfig::Load(absl::StrCat("/dev/fd/", ends[0])));
  EXPECT_THAT(RoleNames(config), ElementsAre("student"));
  close(ends[0]);
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
