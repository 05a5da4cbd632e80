#include "config/lora_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <locale>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "config/logging.h"
#include "config/yaml_reader.h"
#include "config/yaml_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testutil::IsOk;
using testutil::LogCapture;
using testutil::StatusIs;

using Targets = std::optional<std::vector<std::string>>;

// Coerces the value of the key `lora` of a file train.yaml.
absl::StatusOr<std::optional<LoraConfig>> CoerceText(const std::string& text) {
  absl::StatusOr<YAML::Node> root = ParseYaml(text, "train.yaml");
  if (!root.ok()) return root.status();
  return LoraConfig::Coerce((*root)["lora"], "train.yaml",
                            "models.student.lora");
}

// An enabled block with `fields`, which starts on line 3 at column 3.
std::string Enabled(const std::string& fields) {
  return absl::StrCat("lora:\n  enable: true\n  ", fields, "\n");
}

TEST(LoraConfigTest, ReadsTheBlockOfTheContract) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                            CoerceText(R"(
lora:
  enable: true
  rank: 16
  alpha: 32
  target_modules: [to_q, to_k, to_v, to_out]
)"));
  ASSERT_TRUE(config.has_value());
  EXPECT_TRUE(config->enable);
  EXPECT_EQ(config->rank, 16);
  EXPECT_EQ(config->alpha, 32.0);
  EXPECT_EQ(config->target_modules,
            Targets({"to_q", "to_k", "to_v", "to_out"}));
  EXPECT_THAT(logs.Records(), IsEmpty());
}

TEST(LoraConfigTest, NoBlockMeansNoLora) {
  for (const char* text : {"other: 1", "lora:", "lora: null", "lora: ~"}) {
    SCOPED_TRACE(text);
    LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                              CoerceText(text));
    EXPECT_EQ(config.has_value(), false);
  }
}

TEST(LoraConfigTest, EmptyMappingIsDisabled) {
  LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                            CoerceText("lora: {}"));
  ASSERT_TRUE(config.has_value());
  EXPECT_FALSE(config->enable);
  EXPECT_EQ(config->rank, std::nullopt);
  EXPECT_EQ(config->alpha, std::nullopt);
  EXPECT_EQ(config->target_modules, std::nullopt);
}

TEST(LoraConfigTest, RefusesABlockThatIsNoMapping) {
  struct Case {
    const char* text;
    const char* got;
  };
  const std::vector<Case> cases = {
      {"lora: []", "an empty list"}, {"lora: [rank]", "a list"},
      {"lora: true", "true"},        {"lora: 16", "16"},
      {"lora: \"on\"", "\"on\""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    EXPECT_THAT(
        CoerceText(c.text),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("train.yaml:1:7: models.student.lora must "
                              "be a mapping, got ",
                              c.got)));
  }
}

TEST(LoraConfigTest, EnableIsAPlainBoolean) {
  struct Case {
    const char* text;
    bool enable;
  };
  for (const Case& c : std::vector<Case>{{"true", true},
                                         {"yes", true},
                                         {"on", true},
                                         {"True", true},
                                         {"false", false},
                                         {"no", false},
                                         {"off", false},
                                         {"null", false},
                                         {"~", false},
                                         {"", false}}) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora:\n  rank: 4\n  enable: ", c.text)));
    EXPECT_EQ(config->enable, c.enable);
  }
  for (const char* text : {"\"false\"", "\"true\"", "\"yes\"", "1", "2", "0",
                           "y", "n", "[true]", "enabled"}) {
    SCOPED_TRACE(text);
    EXPECT_THAT(
        CoerceText(absl::StrCat("lora:\n  rank: 4\n  enable: ", text)),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 HasSubstr("train.yaml:3:11: models.student.lora.enable "
                           "must be true or false without quotes, got ")));
  }
}

TEST(LoraConfigTest, RankIsAPositiveInteger) {
  struct Case {
    const char* text;
    int64_t rank;
  };
  for (const Case& c : std::vector<Case>{{"1", 1},
                                         {"16", 16},
                                         {"\"16\"", 16},
                                         {"16.0", 16},
                                         {"1e3", 1000},
                                         {"2147483647", 2147483647}}) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(Enabled(absl::StrCat("rank: ", c.text))));
    EXPECT_EQ(config->rank, c.rank);
  }

  struct BadCase {
    const char* text;
    const char* message;
  };
  for (const BadCase& c : std::vector<BadCase>{
           {"0", "a positive integer, got 0"},
           {"-1", "a positive integer, got -1"},
           {"16.7", "a positive integer, got 16.7"},
           {"2.7", "a positive integer, got 2.7"},
           {"true", "a positive integer, got true"},
           {".nan", "a positive integer, got .nan"},
           {"nan", "a positive integer, got nan"},
           {".inf", "a positive integer, got .inf"},
           {"sixteen", "a positive integer, got sixteen"},
           {"[16]", "a positive integer, got a list"},
           {"99999999999999999999",
            "a positive integer, got 99999999999999999999 (out of range)"},
           {"2147483648", "at most 2147483647, got 2147483648"},
       }) {
    SCOPED_TRACE(c.text);
    EXPECT_THAT(
        CoerceText(Enabled(absl::StrCat("rank: ", c.text))),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 absl::StrCat("train.yaml:3:9: models.student.lora.rank "
                              "must be ",
                              c.message)));
  }
}

TEST(LoraConfigTest, EnableWithoutRankIsAnError) {
  EXPECT_THAT(CoerceText(Enabled("alpha: 8")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:2:3: models.student.lora.rank must be a "
                       "positive integer when enable is true, got nothing"));
  EXPECT_THAT(CoerceText(Enabled("rank: null")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:3:3: models.student.lora.rank must be a "
                       "positive integer when enable is true, got null"));
}

TEST(LoraConfigTest, AlphaIsAPositiveNumber) {
  struct Case {
    const char* text;
    double alpha;
  };
  for (const Case& c : std::vector<Case>{
           {"32", 32}, {"0.5", 0.5}, {"\"32\"", 32}, {"1e-2", 0.01}}) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(Enabled(absl::StrCat("rank: 16\n  alpha: ", c.text))));
    EXPECT_EQ(config->alpha, c.alpha);
    EXPECT_EQ(config->EffectiveAlpha(), c.alpha);
  }
  for (const char* text : {"0", "0.0", "-8", "true", ".nan", ".inf", "-.inf",
                           "1e999", "large", "[32]"}) {
    SCOPED_TRACE(text);
    EXPECT_THAT(CoerceText(Enabled(absl::StrCat("rank: 16\n  alpha: ", text))),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("train.yaml:4:10: models.student.lora.alpha "
                                   "must be a positive number, got ")));
  }
}

TEST(LoraConfigTest, AlphaDefaultsToRank) {
  for (const char* fields : {"rank: 16", "rank: 16\n  alpha: null"}) {
    SCOPED_TRACE(fields);
    LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                              CoerceText(Enabled(fields)));
    EXPECT_EQ(config->alpha, std::nullopt);
    EXPECT_EQ(config->EffectiveAlpha(), 16.0);
  }
  EXPECT_EQ(LoraConfig().EffectiveAlpha(), 0.0);
}

TEST(LoraConfigTest, TargetModulesAreNames) {
  struct Case {
    const char* text;
    Targets targets;
  };
  for (const Case& c :
       std::vector<Case>{{"[to_q, to_k]", {{"to_q", "to_k"}}},
                         {"to_q", {{"to_q"}}},
                         {"all-linear", {{"all-linear"}}},
                         {"\"to_q\"", {{"to_q"}}},
                         {"[to_q, to_k, to_q]", {{"to_q", "to_k"}}},
                         {"[\"0\"]", {{"0"}}},
                         {"[]", {std::vector<std::string>()}},
                         {"null", std::nullopt},
                         {"", std::nullopt}}) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                              CoerceText(Enabled(absl::StrCat(
                                  "rank: 16\n  target_modules: ", c.text))));
    EXPECT_EQ(config->target_modules, c.targets);
  }

  struct BadCase {
    const char* text;
    const char* message;
  };
  for (const BadCase& c : std::vector<BadCase>{
           {"\"\"", "4:19: models.student.lora.target_modules must be "},
           {"16", "4:19: models.student.lora.target_modules must be "},
           {"{a: b}", "4:19: models.student.lora.target_modules must be "},
           {"[to_q, \"\"]",
            "4:26: models.student.lora.target_modules[1] must "},
           {"[0]", "4:20: models.student.lora.target_modules[0] must be "},
           {"[to_q, [to_k]]", "models.student.lora.target_modules[1] must be "},
       }) {
    SCOPED_TRACE(c.text);
    EXPECT_THAT(
        CoerceText(
            Enabled(absl::StrCat("rank: 16\n  target_modules: ", c.text))),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)));
  }
}

TEST(LoraConfigTest, DisabledBlockChecksTypesButNotRanges) {
  for (const char* fields :
       {"rank: 0", "rank: -1", "rank: 99999999999", "alpha: 0", "alpha: -8"}) {
    SCOPED_TRACE(fields);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora: {enable: false, ", fields, "}")));
    EXPECT_FALSE(config->enable);
  }
  for (const char* fields :
       {"rank: many", "rank: 16.7", "rank: true", "alpha: loud", "alpha: .nan",
        "target_modules: [0]"}) {
    SCOPED_TRACE(fields);
    EXPECT_THAT(CoerceText(absl::StrCat("lora: {", fields, "}")),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("models.student.lora.")));
  }
}

TEST(LoraConfigTest, DisabledBlockLogsThatItsRankIsIgnored) {
  LogCapture logs;
  ASSERT_THAT(CoerceText("lora: {rank: 16}"), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kInfo),
              ElementsAre("models.student.lora.rank=16 is set but "
                          "models.student.lora.enable is false: the rank is "
                          "ignored and LoRA will NOT be applied"));
  ASSERT_THAT(CoerceText("lora: {alpha: 16}"), IsOk());
  ASSERT_THAT(CoerceText("lora: {enable: true, rank: 16}"), IsOk());
  EXPECT_THAT(logs.Records(), ::testing::SizeIs(1));
}

TEST(LoraConfigTest, WarnsOfUnknownKeysAndIgnoresThem) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(
      const std::optional<LoraConfig> config,
      CoerceText(Enabled("rank: 16\n  zoom: 2\n  alhpa: 32")));
  EXPECT_EQ(config->rank, 16);
  EXPECT_EQ(config->alpha, std::nullopt);
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre("train.yaml:2:3: models.student.lora has unknown "
                          "keys: alhpa (did you mean alpha?), zoom; valid "
                          "keys: enable, rank, alpha, target_modules, "
                          "exclude_modules, target_matching, "
                          "layers_to_transform, layers_pattern, rank_pattern, "
                          "alpha_pattern, use_rslora, use_dora, dropout, bias, "
                          "adapter_dtype, initialization, seed, "
                          "loraplus_lr_ratio (ignored)"));
}

TEST(LoraConfigTest, ReportsAllProblemsOfABlock) {
  EXPECT_THAT(
      CoerceText("lora:\n  enable: \"true\"\n  rank: 16.7\n  alpha: true\n"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               "train.yaml:2:11: models.student.lora.enable must be true or "
               "false without quotes, got \"true\"\n"
               "train.yaml:3:9: models.student.lora.rank must be a positive "
               "integer, got 16.7\n"
               "train.yaml:4:10: models.student.lora.alpha must be a positive "
               "number, got true"));
  EXPECT_THAT(CoerceText(Enabled("rank: 0\n  alpha: -1")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:3:9: models.student.lora.rank must be a "
                       "positive integer, got 0\n"
                       "train.yaml:4:10: models.student.lora.alpha must be a "
                       "positive number, got -1"));
}

TEST(LoraConfigTest, RefusesDuplicateKeysOfANodeThatYamlCppLoaded) {
  const YAML::Node node = YAML::Load("enable: true\nrank: 8\nrank: 16\n");
  EXPECT_THAT(LoraConfig::Coerce(node, "train.yaml", "models.student.lora"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "train.yaml:3:1: the key \"rank\" is given twice, first "
                       "on line 2"));
}

// An enabled block that sets every field.
constexpr char kAllFields[] = R"(
lora:
  enable: true
  rank: 16
  alpha: 0.1
  target_modules: [to_q, "16", all-linear]
  exclude_modules: embedder
  target_matching: regex
  layers_to_transform: [0, 3, 8-11]
  layers_pattern: [blocks, transformer.h]
  rank_pattern: {'.*\.to_out': 32, to_k: 8}
  alpha_pattern: {z: 0.5, a: 64}
  use_rslora: true
  use_dora: on
  dropout: 0.25
  bias: lora_only
  adapter_dtype: float32
  initialization: gaussian
  seed: 9223372036854775807
  loraplus_lr_ratio: 16
)";

LoraConfig AllFields() {
  LoraConfig config;
  config.enable = true;
  config.rank = 16;
  config.alpha = 0.1;
  config.target_modules = {{"to_q", "16", "all-linear"}};
  config.exclude_modules = {"embedder"};
  config.target_matching = TargetMatching::kRegex;
  config.layers_to_transform = {{{0, 0}, {3, 3}, {8, 11}}};
  config.layers_pattern = {"blocks", "transformer.h"};
  config.rank_pattern = {{".*\\.to_out", 32}, {"to_k", 8}};
  config.alpha_pattern = {{"z", 0.5}, {"a", 64}};
  config.use_rslora = true;
  config.use_dora = true;
  config.dropout = 0.25;
  config.bias = BiasTraining::kLoraOnly;
  config.adapter_dtype = AdapterDtype::kFloat32;
  config.initialization = AdapterInitialization::kGaussian;
  config.seed = std::numeric_limits<int64_t>::max();
  config.loraplus_lr_ratio = 16;
  return config;
}

TEST(LoraConfigTest, ReadsAllFields) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                            CoerceText(kAllFields));
  ASSERT_TRUE(config.has_value());
  EXPECT_EQ(config->target_modules, AllFields().target_modules);
  EXPECT_THAT(config->exclude_modules, ElementsAre("embedder"));
  EXPECT_EQ(config->target_matching, TargetMatching::kRegex);
  EXPECT_THAT(
      *config->layers_to_transform,
      ElementsAre(LayerRange{0, 0}, LayerRange{3, 3}, LayerRange{8, 11}));
  EXPECT_THAT(config->layers_pattern, ElementsAre("blocks", "transformer.h"));
  EXPECT_EQ(config->rank_pattern, AllFields().rank_pattern);
  EXPECT_EQ(config->alpha_pattern, AllFields().alpha_pattern);
  EXPECT_TRUE(config->use_rslora);
  EXPECT_TRUE(config->use_dora);
  EXPECT_EQ(config->dropout, 0.25);
  EXPECT_EQ(config->bias, BiasTraining::kLoraOnly);
  EXPECT_EQ(config->adapter_dtype, AdapterDtype::kFloat32);
  EXPECT_EQ(config->initialization, AdapterInitialization::kGaussian);
  EXPECT_EQ(config->seed, std::numeric_limits<int64_t>::max());
  EXPECT_EQ(config->loraplus_lr_ratio, 16);
  EXPECT_EQ(*config, AllFields());
  EXPECT_THAT(logs.Records(), IsEmpty());
}

TEST(LoraConfigTest, FieldsLeftOutHaveTheirDefaults) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const std::optional<LoraConfig> config,
      CoerceText(Enabled("rank: 4\n  dropout: null\n  seed: ~")));
  LoraConfig expected;
  expected.enable = true;
  expected.rank = 4;
  EXPECT_EQ(*config, expected);
}

TEST(LoraConfigTest, EveryWordHasItsMeaning) {
  const std::vector<std::pair<const char*, TargetMatching>> matchings = {
      {"substring", TargetMatching::kSubstring},
      {"exact", TargetMatching::kExact},
      {"suffix", TargetMatching::kSuffix},
      {"glob", TargetMatching::kGlob},
      {"\"regex\"", TargetMatching::kRegex}};
  for (const auto& [word, meaning] : matchings) {
    SCOPED_TRACE(word);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora: {target_matching: ", word, "}")));
    EXPECT_EQ(config->target_matching, meaning);
  }
  const std::vector<std::pair<const char*, AdapterDtype>> dtypes = {
      {"base", AdapterDtype::kBase},
      {"float32", AdapterDtype::kFloat32},
      {"bfloat16", AdapterDtype::kBFloat16},
      {"float16", AdapterDtype::kFloat16}};
  for (const auto& [word, meaning] : dtypes) {
    SCOPED_TRACE(word);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora: {adapter_dtype: ", word, "}")));
    EXPECT_EQ(config->adapter_dtype, meaning);
  }
  const std::vector<std::pair<const char*, AdapterInitialization>>
      initializations = {{"default", AdapterInitialization::kDefault},
                         {"gaussian", AdapterInitialization::kGaussian},
                         {"pissa", AdapterInitialization::kPissa},
                         {"olora", AdapterInitialization::kOlora}};
  for (const auto& [word, meaning] : initializations) {
    SCOPED_TRACE(word);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora: {initialization: ", word, "}")));
    EXPECT_EQ(config->initialization, meaning);
  }
  const std::vector<std::pair<const char*, BiasTraining>> biases = {
      {"none", BiasTraining::kNone},
      {"lora_only", BiasTraining::kLoraOnly},
      {"all", BiasTraining::kAll}};
  for (const auto& [word, meaning] : biases) {
    SCOPED_TRACE(word);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(absl::StrCat("lora: {bias: ", word, "}")));
    EXPECT_EQ(config->bias, meaning);
  }
}

// Types count in a disabled block too, ranges and patterns do not.
TEST(LoraConfigTest, RefusesWhatAFieldCannotBe) {
  struct Case {
    const char* field;
    const char* message;
    bool also_disabled;
  };
  const std::vector<Case> cases = {
      {"target_matching: sufix",
       "4:20: models.student.lora.target_matching must be substring, exact, "
       "suffix, glob or regex, got sufix (did you mean suffix?)",
       true},
      {"target_matching: 7",
       "4:20: models.student.lora.target_matching must be substring, exact, "
       "suffix, glob or regex, got 7",
       true},
      {"adapter_dtype: bf16",
       "4:18: models.student.lora.adapter_dtype must be base, float32, "
       "bfloat16 or float16, got bf16",
       true},
      {"adapter_dtype: [float32]",
       "4:18: models.student.lora.adapter_dtype must be base, float32, "
       "bfloat16 or float16, got a list",
       true},
      {"initialization: Gaussian",
       "4:19: models.student.lora.initialization must be default, gaussian, "
       "pissa or olora, got Gaussian (did you mean gaussian?)",
       true},
      {"bias: true",
       "4:9: models.student.lora.bias must be none, lora_only or all, got "
       "true",
       true},
      {"use_rslora: \"true\"",
       "4:15: models.student.lora.use_rslora must be true or false without "
       "quotes, got \"true\"",
       true},
      {"use_dora: 1",
       "4:13: models.student.lora.use_dora must be true or false without "
       "quotes, got 1",
       true},
      {"layers_to_transform: all",
       "4:24: models.student.lora.layers_to_transform must be a list of "
       "layers such as [0, 8-11], got all",
       true},
      {"layers_to_transform: [0, 8-b]",
       "4:28: models.student.lora.layers_to_transform[1] must be an integer "
       "or a range such as 8-11, got 8-b",
       true},
      {"layers_to_transform: []",
       "4:24: models.student.lora.layers_to_transform must be left out (for "
       "all layers) or name at least one, got an empty list",
       false},
      {"layers_to_transform: [0, -1]",
       "4:28: models.student.lora.layers_to_transform[1] must be an integer "
       "from 0 on, got -1",
       false},
      {"layers_to_transform: 11-8",
       "4:24: models.student.lora.layers_to_transform must be a range from a "
       "lower to a higher layer, got 11-8",
       false},
      {"layers_to_transform: [8-11, 0, 9]",
       "4:34: models.student.lora.layers_to_transform[2] must be apart from "
       "8-11, which is there already, got 9",
       false},
      {"layers_pattern: [blocks]",
       "4:19: models.student.lora.layers_pattern must be left out without "
       "layers_to_transform, got a list",
       false},
      {"layers_pattern: blocks\n  layers_to_transform: null",
       "4:19: models.student.lora.layers_pattern must be left out without "
       "layers_to_transform, got blocks",
       false},
      // One mistake, one message.
      {"layers_pattern: blocks\n  layers_to_transform: all",
       "5:24: models.student.lora.layers_to_transform must be a list of "
       "layers such as [0, 8-11], got all",
       true},
      {"loraplus_lr_ratio: 0",
       "4:22: models.student.lora.loraplus_lr_ratio must be a positive "
       "number, got 0",
       false},
      {"loraplus_lr_ratio: .inf",
       "4:22: models.student.lora.loraplus_lr_ratio must be a positive "
       "number, got .inf",
       true},
      {"exclude_modules: [a, \"\"]",
       "4:24: models.student.lora.exclude_modules[1] must be a string that is "
       "not empty, got \"\"",
       true},
      {"exclude_modules: 7",
       "4:20: models.student.lora.exclude_modules must be a list of strings, "
       "got 7 (quote it if it is text)",
       true},
      {"rank_pattern: [to_q]",
       "4:17: models.student.lora.rank_pattern must be a mapping, got a list",
       true},
      {"rank_pattern: {to_q: many}",
       "4:24: models.student.lora.rank_pattern.to_q must be a positive "
       "integer, got many",
       true},
      {"rank_pattern: {to_q: }",
       "4:18: models.student.lora.rank_pattern.to_q must be a positive "
       "integer, got null",
       true},
      {"rank_pattern: {\"\": 8}",
       "4:18: a key of models.student.lora.rank_pattern must be text that is "
       "not empty, got \"\"",
       true},
      {"rank_pattern: {7: 8}",
       "4:18: a key of models.student.lora.rank_pattern must be a string, got "
       "7",
       true},
      {"rank_pattern: {to_q: 8, to_k: 0}",
       "4:33: models.student.lora.rank_pattern.to_k must be a positive "
       "integer, got 0",
       false},
      {"rank_pattern: {to_q: 2147483648}",
       "4:24: models.student.lora.rank_pattern.to_q must be at most "
       "2147483647, got 2147483648",
       false},
      {"alpha_pattern: {to_q: -0.5}",
       "4:25: models.student.lora.alpha_pattern.to_q must be a positive "
       "number, got -0.5",
       false},
      {"alpha_pattern: {to_q: .nan}",
       "4:25: models.student.lora.alpha_pattern.to_q must be a positive "
       "number, got .nan",
       true},
      {"dropout: 1",
       "4:12: models.student.lora.dropout must be a number from 0 to below 1, "
       "got 1",
       false},
      {"dropout: -0.1",
       "4:12: models.student.lora.dropout must be a number from 0 to below 1, "
       "got -0.1",
       false},
      {"dropout: a",
       "4:12: models.student.lora.dropout must be a number from 0 to below 1, "
       "got a",
       true},
      {"seed: -1",
       "4:9: models.student.lora.seed must be an integer from 0 on, got -1",
       false},
      {"seed: 0.5",
       "4:9: models.student.lora.seed must be an integer from 0 on, got 0.5",
       true},
      {"target_modules: 'to_(q'\n  target_matching: regex",
       "4:19: models.student.lora.target_modules must be a regular "
       "expression, got \"to_(q\" (missing ): to_(q)",
       false},
      {"exclude_modules: [a, '*b']\n  target_matching: regex",
       "4:24: models.student.lora.exclude_modules[1] must be a regular "
       "expression, got \"*b\" (no argument for repetition operator: *)",
       false},
      {"alpha_pattern: {'a[': 1}\n  target_matching: regex",
       "4:19: a key of models.student.lora.alpha_pattern must be a regular "
       "expression, got \"a[\" (missing ]: [)",
       false},
      {"target_modules: ['ok[ab]', 'to_[q']\n  target_matching: glob",
       "4:30: models.student.lora.target_modules[1] must be a glob, got "
       "\"to_[q\" (a [ is not closed)",
       false},
      {"rank_pattern: {'[!]': 8}\n  target_matching: glob",
       "4:18: a key of models.student.lora.rank_pattern must be a glob, got "
       "\"[!]\" (a [ is not closed)",
       false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.field);
    const std::string fields = absl::StrCat("rank: 4\n  ", c.field);
    EXPECT_THAT(CoerceText(Enabled(fields)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrCat("train.yaml:", c.message)));
    EXPECT_EQ(CoerceText(absl::StrCat("lora:\n  ", fields)).ok(),
              !c.also_disabled);
  }
}

TEST(LoraConfigTest, AcceptsPatternsOfTheirSyntax) {
  for (const char* fields :
       {"target_matching: glob\n  target_modules: ['*.to_[qk]', '[]x]', "
        "'[!]]']",
        "target_matching: regex\n  target_modules: ['blocks\\.\\d+\\..*']",
        "target_matching: substring\n  target_modules: ['to_(q', 'to_[']",
        "target_matching: regex\n  target_modules: all-linear"}) {
    SCOPED_TRACE(fields);
    EXPECT_THAT(CoerceText(Enabled(absl::StrCat("rank: 4\n  ", fields))),
                IsOk());
  }
}

TEST(LoraConfigTest, MergesDuplicateNames) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const std::optional<LoraConfig> config,
      CoerceText(Enabled("rank: 4\n  exclude_modules: [b, a, b]\n"
                         "  layers_to_transform: 0\n"
                         "  layers_pattern: [h, blocks, h]")));
  EXPECT_THAT(config->exclude_modules, ElementsAre("b", "a"));
  EXPECT_THAT(config->layers_pattern, ElementsAre("h", "blocks"));
}

TEST(LoraConfigTest, LayersAreAListOrOneOfItsElements) {
  struct Case {
    const char* text;
    std::vector<LayerRange> ranges;
  };
  for (const Case& c :
       std::vector<Case>{{"5", {{5, 5}}},
                         {"8-11", {{8, 11}}},
                         {"[8-11, 3, 4-7, \"0\", 12-12]",
                          {{8, 11}, {3, 3}, {4, 7}, {0, 0}, {12, 12}}}}) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::optional<LoraConfig> config,
        CoerceText(
            Enabled(absl::StrCat("rank: 4\n  layers_to_transform: ", c.text))));
    EXPECT_EQ(config->layers_to_transform, c.ranges);
  }
}

// Against a set of the layers that are taken.
TEST(LoraConfigTest, RefusesEveryOverlapOfLayers) {
  std::mt19937 random(0);
  for (int round = 0; round < 200; ++round) {
    LoraConfig config;
    config.enable = true;
    config.rank = 4;
    config.layers_to_transform.emplace();
    std::set<int64_t> taken;
    std::vector<std::string> refused;
    for (int i = 0; i < 6; ++i) {
      const int64_t first = random() % 40;
      const int64_t last = first + random() % 5;
      config.layers_to_transform->push_back({first, last});
      const auto inside = taken.lower_bound(first);
      if (inside != taken.end() && *inside <= last) {
        refused.push_back(absl::StrCat("[", i, "] must be apart from"));
        continue;
      }
      for (int64_t layer = first; layer <= last; ++layer) taken.insert(layer);
    }
    const absl::Status status = config.Validate();
    EXPECT_EQ(status.ok(), refused.empty());
    for (const std::string& element : refused) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(element));
    }
    EXPECT_EQ(std::count(status.message().begin(), status.message().end(), '['),
              refused.size());
  }
}

TEST(LoraConfigTest, WarnsOfARatioThatSlowsLoraBDown) {
  LogCapture logs;
  ASSERT_THAT(CoerceText(Enabled("rank: 4\n  loraplus_lr_ratio: 1")), IsOk());
  ASSERT_THAT(CoerceText("lora: {loraplus_lr_ratio: 0.5}"), IsOk());
  EXPECT_THAT(logs.Records(), IsEmpty());
  ASSERT_THAT(CoerceText(Enabled("rank: 4\n  loraplus_lr_ratio: 0.0625")),
              IsOk());
  LoraConfig config = AllFields();
  config.loraplus_lr_ratio = 0.5;
  ASSERT_THAT(LoraConfig::Coerce(config), IsOk());
  EXPECT_THAT(
      logs.Messages(LogLevel::kWarning),
      ElementsAre("models.student.lora.loraplus_lr_ratio=0.0625 makes lora_B "
                  "learn slower than lora_A; LoRA+ is for ratios above 1",
                  HasSubstr("lora.loraplus_lr_ratio=0.5 makes lora_B")));
}

// A file may have a rank for each of thousands of layers.
TEST(LoraConfigTest, ReadsTenThousandPatternsInOrder) {
  std::string text = "lora:\n  enable: true\n  rank: 4\n  rank_pattern:\n";
  for (int i = 0; i < 10000; ++i) {
    absl::StrAppend(&text, "    blocks.", i, ".to_q: ", i + 1, "\n");
  }
  LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> config,
                            CoerceText(text));
  ASSERT_EQ(config->rank_pattern.size(), 10000);
  EXPECT_EQ(config->rank_pattern[0].first, "blocks.0.to_q");
  EXPECT_EQ(config->rank_pattern[9999].second, 10000);
}

// Each of two errors an entry, and none of them reads the mapping again.
TEST(LoraConfigTest, RefusesTwentyThousandPatterns) {
  constexpr int kPatterns = 20000;
  std::string text =
      "lora:\n  enable: true\n  rank: 4\n  target_matching: regex\n"
      "  rank_pattern:\n";
  for (int i = 0; i < kPatterns; ++i) {
    absl::StrAppend(&text, "    to_(", i, ": 0\n");
  }
  const absl::Status status = CoerceText(text).status();
  const std::string message(status.message());
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'),
            2 * kPatterns - 1);
  EXPECT_THAT(
      message,
      EndsWith("train.yaml:20005:5: a key of models.student.lora.rank_pattern "
               "must be a regular expression, got \"to_(19999\" (missing ): "
               "to_(19999)\n"
               "train.yaml:20005:16: models.student.lora.rank_pattern."
               "to_(19999 must be a positive integer, got 0"));
}

// Configs built in code.

TEST(LoraConfigTest, ToYamlIsReadBackAsAnEqualConfig) {
  std::vector<std::pair<const char*, LoraConfig>> cases = {
      {"default", {}}, {"all fields", AllFields()}};
  LoraConfig words = AllFields();
  words.target_matching = TargetMatching::kSubstring;
  words.target_modules = {{"null", "~", "true", "1e3", "- a", "a: b", "a #b",
                           " x ", "line\nbreak", "世界", "\"", "'", "<<"}};
  words.rank_pattern = {{"7", 1}, {"no", 2}, {std::string(2000, 'k'), 3}};
  cases.push_back({"words that look like something else", words});
  LoraConfig none = AllFields();
  none.target_modules = std::vector<std::string>();
  none.rank_pattern.clear();
  none.alpha.reset();
  none.alpha_pattern = {{"tiny", 5e-324}, {"third", 1.0 / 3}, {"huge", 1e308}};
  cases.push_back({"empty lists, odd numbers", none});
  for (const auto& [name, config] : cases) {
    SCOPED_TRACE(name);
    YAML::Node root(YAML::NodeType::Map);
    root["lora"] = config.ToYaml();
    const std::string text = WriteYaml(root);
    SCOPED_TRACE(text);
    LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> read,
                              CoerceText(text));
    EXPECT_EQ(*read, config);
  }
}

// Writes numbers as in 1.234.567,8.
class GermanNumbers : public std::numpunct<char> {
 protected:
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class GlobalLocaleScope {
 public:
  explicit GlobalLocaleScope(const std::locale& locale)
      : previous_(std::locale::global(locale)) {}
  ~GlobalLocaleScope() { std::locale::global(previous_); }
  GlobalLocaleScope(const GlobalLocaleScope&) = delete;
  GlobalLocaleScope& operator=(const GlobalLocaleScope&) = delete;

 private:
  std::locale previous_;
};

TEST(LoraConfigTest, NumbersDoNotDependOnTheLocale) {
  LoraConfig config;
  config.enable = true;
  config.rank = 2000;
  config.alpha = 1234.5;
  config.rank_pattern = {{"to_q", 123456}};
  config.alpha_pattern = {{"to_q", 1e300}, {"to_k", 2.5e-7}};
  config.layers_to_transform = {{{1000, 2000}}};
  config.seed = 1234567;
  config.bias = static_cast<BiasTraining>(5000);

  const GlobalLocaleScope scope(
      std::locale(std::locale::classic(), new GermanNumbers));
  EXPECT_THAT(config.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "lora.bias must be none, lora_only or all, got 5000"));
  EXPECT_EQ(WriteYaml(config.ToYaml()),
            "enable: true\n"
            "rank: 2000\n"
            "alpha: 1234.5\n"
            "exclude_modules: []\n"
            "target_matching: substring\n"
            "layers_to_transform: [1000-2000]\n"
            "layers_pattern: []\n"
            "rank_pattern:\n"
            "  to_q: 123456\n"
            "alpha_pattern:\n"
            "  to_q: 1e+300\n"
            "  to_k: 2.5e-07\n"
            "use_rslora: false\n"
            "use_dora: false\n"
            "dropout: 0\n"
            "bias: 5000\n"
            "adapter_dtype: base\n"
            "initialization: default\n"
            "seed: 1234567\n");
}

TEST(LoraConfigTest, ToYamlHasEveryFieldThatIsSet) {
  EXPECT_EQ(WriteYaml(LoraConfig().ToYaml()),
            "enable: false\n"
            "exclude_modules: []\n"
            "target_matching: substring\n"
            "layers_pattern: []\n"
            "rank_pattern: {}\n"
            "alpha_pattern: {}\n"
            "use_rslora: false\n"
            "use_dora: false\n"
            "dropout: 0\n"
            "bias: none\n"
            "adapter_dtype: base\n"
            "initialization: default\n"
            "seed: 0\n");
}

TEST(LoraConfigTest, ToYamlWritesLayersAsTheyAreRead) {
  LoraConfig config;
  config.layers_to_transform = {{{0, 0}, {8, 11}}};
  EXPECT_THAT(WriteYaml(config.ToYaml()),
              HasSubstr("\nlayers_to_transform: [0, 8-11]\n"));
}

TEST(LoraConfigTest, ConfigsThatDifferInAFieldAreNotEqual) {
  struct Case {
    const char* field;
    void (*change)(LoraConfig*);
  };
  const std::vector<Case> cases = {
      {"enable", [](LoraConfig* c) { c->enable = false; }},
      {"rank", [](LoraConfig* c) { c->rank.reset(); }},
      {"alpha", [](LoraConfig* c) { c->alpha = 2; }},
      {"target_modules", [](LoraConfig* c) { c->target_modules->pop_back(); }},
      {"exclude_modules", [](LoraConfig* c) { c->exclude_modules.clear(); }},
      {"target_matching",
       [](LoraConfig* c) { c->target_matching = TargetMatching::kGlob; }},
      {"layers_to_transform",
       [](LoraConfig* c) { c->layers_to_transform->back().last = 12; }},
      {"layers_pattern", [](LoraConfig* c) { c->layers_pattern = {"blocks"}; }},
      {"rank_pattern",
       [](LoraConfig* c) {
         std::swap(c->rank_pattern[0], c->rank_pattern[1]);
       }},
      {"alpha_pattern", [](LoraConfig* c) { c->alpha_pattern[0].second = 9; }},
      {"use_rslora", [](LoraConfig* c) { c->use_rslora = false; }},
      {"use_dora", [](LoraConfig* c) { c->use_dora = false; }},
      {"dropout", [](LoraConfig* c) { c->dropout = 0; }},
      {"bias", [](LoraConfig* c) { c->bias = BiasTraining::kAll; }},
      {"adapter_dtype",
       [](LoraConfig* c) { c->adapter_dtype = AdapterDtype::kFloat16; }},
      {"initialization",
       [](LoraConfig* c) {
         c->initialization = AdapterInitialization::kDefault;
       }},
      {"seed", [](LoraConfig* c) { c->seed = 1; }},
      {"loraplus_lr_ratio",
       [](LoraConfig* c) { c->loraplus_lr_ratio.reset(); }},
  };
  EXPECT_EQ(AllFields(), AllFields());
  EXPECT_EQ(cases.size(), AllFields().ToYaml().size()) << "a field each";
  for (const Case& c : cases) {
    SCOPED_TRACE(c.field);
    LoraConfig other = AllFields();
    c.change(&other);
    EXPECT_NE(other, AllFields());
  }
}

TEST(LoraConfigTest, ValidateChecksEveryField) {
  LoraConfig config = AllFields();
  EXPECT_THAT(config.Validate(), IsOk());
  config.rank_pattern = {{"to_q", 0}, {"to_q", 1}, {"", 2}, {"to_(q", 3}};
  config.dropout = 1;
  config.seed = -1;
  config.layers_to_transform = {{{5, 2}, {-3, 4}}};
  config.bias = static_cast<BiasTraining>(5);
  config.loraplus_lr_ratio = std::numeric_limits<double>::infinity();
  config.target_matching = static_cast<TargetMatching>(77);
  config.exclude_modules = {"", "null"};
  EXPECT_THAT(
      config.Validate(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               "lora.exclude_modules[0] must be a string that is not empty, "
               "got \"\"\n"
               "lora.target_matching must be substring, exact, suffix, glob "
               "or regex, got 77\n"
               "lora.layers_to_transform[1] must be an integer or a range "
               "such as 8-11, got -3-4\n"
               "the key \"to_q\" is given twice\n"
               "a key of lora.rank_pattern must be text that is not empty, got "
               "\"\"\n"
               "lora.bias must be none, lora_only or all, got 5\n"
               "lora.loraplus_lr_ratio must be a positive number, got .inf\n"
               "lora.dropout must be a number from 0 to below 1, got 1\n"
               "lora.seed must be an integer from 0 on, got -1"));
}

TEST(LoraConfigTest, ValidateChecksAnEnabledConfig) {
  struct Case {
    const char* name;
    LoraConfig config;
    const char* message;  // "": valid.
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<Case> cases = {
      {"default", {}, ""},
      {"full", {true, 16, 0.5, {{"to_q"}}}, ""},
      {"no targets", {true, 16, 0.5, std::vector<std::string>()}, ""},
      {"no rank",
       {true, {}, {}, {}},
       "lora.rank must be a positive integer when enable is true, got nothing"},
      {"rank 0",
       {true, 0, {}, {}},
       "lora.rank must be a positive integer, got 0"},
      {"rank -1",
       {true, -1, {}, {}},
       "lora.rank must be a positive integer, got -1"},
      {"rank 2^31",
       {true, int64_t{1} << 31, {}, {}},
       "lora.rank must be at most 2147483647, got 2147483648"},
      {"alpha 0",
       {true, 1, 0.0, {}},
       "lora.alpha must be a positive number, got 0"},
      {"alpha -8",
       {true, 1, -8.0, {}},
       "lora.alpha must be a positive number, got -8"},
      {"alpha nan",
       {true, 1, nan, {}},
       "lora.alpha must be a positive number, got .nan"},
      {"alpha inf",
       {true, 1, inf, {}},
       "lora.alpha must be a positive number, got .inf"},
      {"an empty target",
       {true, 1, {}, {{"to_q", ""}}},
       "lora.target_modules[1] must be a string that is not empty, got \"\""},
      {"disabled with rank 0", {false, 0, -1.0, {{""}}}, ""},
      {"everything",
       {true, 0, 0.0, {}},
       "lora.rank must be a positive integer, got 0\n"
       "lora.alpha must be a positive number, got 0"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const absl::Status expected = *c.message == '\0'
                                      ? absl::OkStatus()
                                      : absl::InvalidArgumentError(c.message);
    EXPECT_EQ(c.config.Validate(), expected);
    EXPECT_EQ(LoraConfig::Coerce(c.config).status(), expected);
  }
}

TEST(LoraConfigTest, CoercePassesAConfigThrough) {
  LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(
      const std::optional<LoraConfig> config,
      LoraConfig::Coerce(LoraConfig{true, 16, 0.5, {{"to_q", "to_q"}}}));
  EXPECT_TRUE(config->enable);
  EXPECT_EQ(config->rank, 16);
  EXPECT_EQ(config->alpha, 0.5);
  EXPECT_EQ(config->target_modules, Targets({"to_q", "to_q"}));
  EXPECT_THAT(logs.Records(), IsEmpty());

  LORA_ASSERT_OK_AND_ASSIGN(const std::optional<LoraConfig> none,
                            LoraConfig::Coerce(std::nullopt));
  EXPECT_EQ(none.has_value(), false);
}

TEST(LoraConfigTest, CoerceLogsTheIgnoredRankOfAConfigBuiltInCode) {
  LogCapture logs;
  ASSERT_THAT(LoraConfig::Coerce(LoraConfig{false, 16, {}, {}}), IsOk());
  EXPECT_THAT(logs.Messages(LogLevel::kInfo),
              ElementsAre(HasSubstr("LoRA will NOT be applied")));
}

}  // namespace
}  // namespace trainer_lora::config
