#include "lora/internal/adapter_config.h"

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::lora::internal {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

// A file of these entries beside the ones that it must have.
std::string With(const std::string& entries) {
  return absl::StrCat(R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16)",
                      entries.empty() ? "" : ", ", entries, "}");
}

TEST(AdapterConfigTest, ReadsNumbersAndKindsOfAdapters) {
  LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig plain,
                            AdapterConfig::Parse(With(""), {"to_q", "to_k"}));
  EXPECT_THAT(plain.ranks(), ElementsAre(8, 8));
  EXPECT_THAT(plain.alphas(), ElementsAre(16, 16));
  EXPECT_FALSE(plain.use_dora());
  EXPECT_FALSE(plain.use_rslora());

  LORA_ASSERT_OK_AND_ASSIGN(
      const AdapterConfig variants,
      AdapterConfig::Parse(
          With(R"("use_dora": true, "use_rslora": true, "use_qalora": null)"),
          {}));
  EXPECT_TRUE(variants.use_dora());
  EXPECT_TRUE(variants.use_rslora());
}

// Python's re.match(rf"(.*\.)?({pattern})$", name), of the first that matches.
TEST(AdapterConfigTest, PatternsMatchAtTheEndOfANameAsInPeft) {
  struct Case {
    std::string name;
    double rank;
  };
  const Case cases[] = {
      {"to_q", 1}, {"blocks.0.to_q", 1}, {"into_q", 8}, {"to_q.0", 8},
      {"to_v", 2}, {"blocks.0.to_v", 8}, {"x.a.0", 3},  {"x.b", 3},
      {"a.00", 8}, {"x.y.to_k", 4},      {"", 8},
  };
  std::vector<std::string> names;
  for (const Case& c : cases) names.push_back(c.name);
  LORA_ASSERT_OK_AND_ASSIGN(
      const AdapterConfig config,
      AdapterConfig::Parse(
          With(
              R"("rank_pattern": {"to_q": 1, "^to_[vw]": 2, "a\\.0|b": 3, ".*_k": 4})"),
          names));
  ASSERT_EQ(config.ranks().size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(config.ranks()[i], cases[i].rank) << names[i];
  }
  EXPECT_THAT(config.alphas(), Each(16));
}

// A dict keeps the last value at the place of the first.
TEST(AdapterConfigTest, OfTwoEqualKeysTheLastCountsAsInPython) {
  LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig config,
                            AdapterConfig::Parse(With(R"("r": "x", "r": 2,
          "rank_pattern": {"(": 5}, "rank_pattern": null,
          "alpha_pattern": {"a": 9}, "alpha_pattern": [],
          "alpha_pattern": {"a": {"a": 1}, "[ab]": 4, "a": 3})"),
                                                 {"a", "b"}));
  EXPECT_THAT(config.ranks(), ElementsAre(2, 2));
  EXPECT_THAT(config.alphas(), ElementsAre(3, 4));
}

// `count` times `text`, with commas between them.
std::string Repeat(const std::string& text, int count) {
  return absl::StrJoin(std::vector<std::string>(count, text), ",");
}

// A DOM with a callback took a time quadratic in them: minutes.
TEST(AdapterConfigTest, LeavesManyValuesOutInNoTime) {
  constexpr int kCount = 350'000;
  const absl::Time start = absl::Now();
  for (const std::string& value :
       {absl::StrCat("[", Repeat("{}", kCount), "]"),
        absl::StrCat("[", Repeat("[]", kCount), "]"),
        absl::StrCat("{", Repeat(R"("":{})", kCount), "}")}) {
    for (const std::string key : {"other", "rank_pattern"}) {
      const std::string json = With(
          absl::StrCat("\"", key, "\": ", value, R"(, "rank_pattern": {})"));
      LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig config,
                                AdapterConfig::Parse(json, {"q"}));
      EXPECT_THAT(config.ranks(), ElementsAre(8));
    }
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST(AdapterConfigTest, FollowsNestedValuesSixtyFourLevelsDeep) {
  const auto nested = [](int depth) {
    return With(absl::StrCat(R"("other": )", std::string(depth, '['),
                             std::string(depth, ']')));
  };
  EXPECT_THAT(AdapterConfig::Parse(nested(63), {}), IsOk());
  const auto too_deep = StatusIs(absl::StatusCode::kDataLoss,
                                 HasSubstr("nested more than 64 levels deep"));
  EXPECT_THAT(AdapterConfig::Parse(nested(64), {}), too_deep);
  EXPECT_THAT(
      AdapterConfig::Parse(With(R"("other": )") + std::string(1 << 20, '['),
                           {}),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("not valid JSON")));
  for (const std::string key : {"other", "rank_pattern", "r"}) {
    EXPECT_THAT(
        AdapterConfig::Parse(
            absl::StrCat("{\"", key, "\": ", std::string(1 << 20, '[')), {}),
        too_deep);
  }
}

// Ten bytes can make a thousand instructions.
TEST(AdapterConfigTest, LimitsWhatThePatternsTakeTogether) {
  const auto patterns = [](int count) {
    std::string entries;
    for (int i = 0; i < count; ++i) {
      absl::StrAppend(&entries, i == 0 ? "" : ", ", "\"", i, ".{1000}\": 0");
    }
    return absl::StrCat("{", entries, "}");
  };
  EXPECT_THAT(
      AdapterConfig::Parse(With(R"("rank_pattern": )" + patterns(500)), {"q"}),
      IsOk());
  EXPECT_THAT(
      AdapterConfig::Parse(
          With(absl::StrCat(R"("rank_pattern": )", patterns(500),
                            R"(, "alpha_pattern": )", patterns(10'000))),
          {"q"}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("the pattern alpha_pattern."),
                     HasSubstr("too complex, together with those before"))));
}

TEST(AdapterConfigTest, LimitsWhatAPatternTakes) {
  const auto parse = [](const std::string& pattern) {
    return AdapterConfig::Parse(
        With(absl::StrCat(R"("rank_pattern": {")", pattern, R"(": 1})")),
        {"q"});
  };
  EXPECT_THAT(parse(std::string(9'900, 'x')), IsOk());
  EXPECT_THAT(parse("(?:abcdefghi){1000}"), IsOk());
  EXPECT_THAT(parse(std::string(10'001, 'x')),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("is too long")));
  EXPECT_THAT(parse("(?:abcdefghijk){1000}"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("is too complex")));
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
    EXPECT_THAT(AdapterConfig::Parse(c.json, {"a"}),
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
  std::vector<std::string> names;
  for (const AdapterLayer& layer : description.layers) {
    names.push_back(layer.name);
  }
  LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig config,
                            AdapterConfig::Parse(json, names));
  ASSERT_EQ(config.ranks().size(), names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(config.ranks()[i], description.layers[i].rank) << names[i];
    EXPECT_EQ(config.alphas()[i], description.layers[i].alpha) << names[i];
  }
}

TEST(AdapterConfigTest, WritesNoNameThatItWouldNotRead) {
  // Escaped, these take four bytes each, or two, or one.
  for (const char* character : {"\0", "+", "q"}) {
    const std::string name(kMaxLayerNameSize, *character);
    AdapterDescription description;
    description.layers = {{"q.v", 1, 1}, {name, 2, 3}};
    LORA_ASSERT_OK_AND_ASSIGN(const std::string json,
                              AdapterConfigJson(description));
    LORA_ASSERT_OK_AND_ASSIGN(const AdapterConfig config,
                              AdapterConfig::Parse(json, {"q.v", name}));
    EXPECT_THAT(config.ranks(), ElementsAre(1, 2));
    EXPECT_THAT(config.alphas(), ElementsAre(1, 3));

    description.layers[1].name += *character;
    EXPECT_THAT(
        AdapterConfigJson(description),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2001 bytes")));
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
