#include "lora/internal/adapter_config.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::lora::internal {
namespace {

using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

// A file of these entries beside the ones that it must have.
std::string With(const std::string& entries) {
  return absl::StrCat(R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16)",
                      entries.empty() ? "" : ", ", entries, "}");
}

TEST(AdapterConfigTest, ReadsNumbersAndKindsOfAdapters) {
  LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig plain,
                            AdapterConfig::Parse(With("")));
  EXPECT_EQ(plain.RankOf("to_q"), 8);
  EXPECT_EQ(plain.AlphaOf("to_q"), 16);
  EXPECT_FALSE(plain.use_dora());
  EXPECT_FALSE(plain.use_rslora());

  LORA_ASSERT_OK_AND_ASSIGN(
      const AdapterConfig variants,
      AdapterConfig::Parse(
          With(R"("use_dora": true, "use_rslora": true, "use_qalora": null)")));
  EXPECT_TRUE(variants.use_dora());
  EXPECT_TRUE(variants.use_rslora());
}

// Python's re.match(rf"(.*\.)?({pattern})$", name), of the first that matches.
TEST(AdapterConfigTest, PatternsMatchAtTheEndOfANameAsInPeft) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const AdapterConfig config,
      AdapterConfig::Parse(With(
          R"("rank_pattern": {"to_q": 1, "^to_[vw]": 2, "a\\.0|b": 3, ".*_k": 4})")));
  struct Case {
    std::string name;
    double rank;
  };
  const Case cases[] = {
      {"to_q", 1}, {"blocks.0.to_q", 1}, {"into_q", 8}, {"to_q.0", 8},
      {"to_v", 2}, {"blocks.0.to_v", 8}, {"x.a.0", 3},  {"x.b", 3},
      {"a.00", 8}, {"x.y.to_k", 4},      {"", 8},
  };
  for (const Case& c : cases) {
    EXPECT_EQ(config.RankOf(c.name), c.rank) << c.name;
    EXPECT_EQ(config.AlphaOf(c.name), 16) << c.name;
  }
}

TEST(AdapterConfigTest, OfTwoEqualKeysTheLastCountsAsInPython) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const AdapterConfig config,
      AdapterConfig::Parse(
          With(R"("r": 2, "alpha_pattern": {"a": 1, "a": 3})")));
  EXPECT_EQ(config.RankOf("a"), 2);
  EXPECT_EQ(config.AlphaOf("a"), 3);
}

TEST(AdapterConfigTest, RefusesWithWhatIsWrong) {
  std::string patterns = R"("rank_pattern": {"": 0)";
  for (int i = 0; i < 100000; ++i)
    absl::StrAppend(&patterns, ", \"", i, "\": 0");
  patterns += "}";
  struct Case {
    std::string json;
    absl::StatusCode code;
    std::string message;
  };
  const absl::StatusCode kDataLoss = absl::StatusCode::kDataLoss;
  const absl::StatusCode kFailedPrecondition =
      absl::StatusCode::kFailedPrecondition;
  const Case cases[] = {
      {"", kDataLoss, "not valid JSON at its byte 1"},
      {R"({"r": )", kDataLoss, "not valid JSON at its byte 7"},
      {"{\xff}", kDataLoss, "not valid JSON at its byte 2"},
      {"{\"\xff\": 1}", kDataLoss, "not valid JSON at its byte 3"},
      {With("") + "x", kDataLoss, "not valid JSON at its byte"},
      {"\xef\xbb\xbf" + With(""), kDataLoss, "byte order mark"},
      {With("") + std::string(1, '\0'), kDataLoss, "zero byte"},
      {"[]", kDataLoss, "not a JSON object"},
      {R"([{"a": {"b": 1}}])", kDataLoss, "not a JSON object"},
      {With(R"("r": 1e999)"), kDataLoss, "out of range"},
      {With(patterns), kDataLoss, "rank_pattern has more than 100000 patterns"},
      {std::string(kMaxAdapterConfigBytes + 1, ' '), kDataLoss,
       "larger than 16 MiB"},
      {"{}", kFailedPrecondition, "peft_type is not LORA"},
      {R"({"peft_type": "IA3"})", kFailedPrecondition, "peft_type is not LORA"},
      {R"({"peft_type": "LORA", "lora_alpha": 1})", kDataLoss,
       "r must be a number"},
      {With(R"("r": "8")"), kDataLoss, "r must be a number"},
      {With(R"("lora_alpha": null)"), kDataLoss, "lora_alpha must be a number"},
      {With(R"("use_dora": 1)"), kDataLoss, "use_dora must be true or false"},
      {With(R"("use_rslora": "yes")"), kDataLoss,
       "use_rslora must be true or false"},
      {With(R"("use_qalora": true)"), kFailedPrecondition,
       "use_qalora is not supported"},
      {With(R"("rank_pattern": ["a"])"), kDataLoss,
       "rank_pattern must be an object"},
      {With(R"("alpha_pattern": {"a\n": "2"})"), kDataLoss,
       R"(alpha_pattern.a\x0a must be a number)"},
      {With(R"-("rank_pattern": {"(?=a)": 2})-"), kFailedPrecondition,
       "the pattern rank_pattern.(?=a) is not supported"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(AdapterConfig::Parse(c.json),
                StatusIs(c.code, HasSubstr(c.message)))
        << c.json.substr(0, 100);
  }
}

TEST(AdapterConfigTest, WritesPeftsKeysAndWhatDiffersFromTheFirstLayer) {
  AdapterDescription description;
  description.layers = {{"a.q", 2, 4}, {"b.a.q", 3, 0.5}, {"v", 2, 4}};
  description.dropout = 0.25;
  description.bias = config::BiasTraining::kLoraOnly;
  description.use_rslora = true;
  description.task_type = "CAUSAL_LM";
  LORA_ASSERT_OK_AND_ASSIGN(const std::string json,
                            AdapterConfigJson(description));
  EXPECT_EQ(nlohmann::json::parse(json), nlohmann::json::parse(R"({
    "peft_type": "LORA", "task_type": "CAUSAL_LM",
    "base_model_name_or_path": null, "inference_mode": true,
    "r": 2, "lora_alpha": 4, "target_modules": "a\\.q|b\\.a\\.q|v",
    "lora_dropout": 0.25, "bias": "lora_only", "fan_in_fan_out": false,
    "init_lora_weights": true, "modules_to_save": null,
    "rank_pattern": {"^b\\.a\\.q": 3}, "alpha_pattern": {"^b\\.a\\.q": 0.5},
    "use_dora": false, "use_rslora": true})"));
}

// Also those whose names are regular expressions, or end in another's.
TEST(AdapterConfigTest, ReadsBackTheNumbersOfEachLayer) {
  AdapterDescription description;
  description.layers = {
      {"q", 1, 1},          {"a.q", 2, 0.1},         {"b.a.q", 3, 1e300},
      {".*", 4, 5e-324},    {"a|q", 5, 3},           {"x(y", 6, 1e15},
      {"\xc3\xa4\t", 7, 7}, {"2147483647", 8, 1e16},
  };
  LORA_ASSERT_OK_AND_ASSIGN(const std::string json,
                            AdapterConfigJson(description));
  LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig config,
                            AdapterConfig::Parse(json));
  for (const AdapterLayer& layer : description.layers) {
    EXPECT_EQ(config.RankOf(layer.name), layer.rank) << layer.name;
    EXPECT_EQ(config.AlphaOf(layer.name), layer.alpha) << layer.name;
  }
}

TEST(AdapterConfigTest, RefusesToWriteTextThatIsNotUtf8) {
  const std::vector<AdapterLayer> layers = {{"q", 1, 1}};
  AdapterDescription name, path, task;
  name.layers = {{"q\xff", 1, 1}};
  path.layers = layers;
  path.base_model_name_or_path = "\xff";
  task.layers = layers;
  task.task_type = "\xff";
  for (const AdapterDescription& description : {name, path, task}) {
    EXPECT_THAT(
        AdapterConfigJson(description),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not UTF-8")));
  }
}

}  // namespace
}  // namespace trainer_lora::lora::internal
