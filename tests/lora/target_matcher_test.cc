#include "lora/target_matcher.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::trainer_lora::config::LoraConfig;
using ::trainer_lora::config::TargetMatching;
using ::trainer_lora::testutil::StatusIs;

LoraConfig Config(std::vector<std::string> targets,
                  TargetMatching matching = TargetMatching::kSubstring) {
  LoraConfig config;
  config.target_modules = std::move(targets);
  config.target_matching = matching;
  return config;
}

TEST(TargetMatcherTest, NamesEveryTargetThatMatches) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TargetMatcher matcher,
      TargetMatcher::Create(Config({"to_q", "attn", "to_k"})));
  EXPECT_THAT(matcher.MatchingTargets("attn.to_q"), ElementsAre(0, 1));
  EXPECT_THAT(matcher.MatchingTargets("to_k"), ElementsAre(2));
  EXPECT_THAT(matcher.MatchingTargets("norm"), IsEmpty());
}

TEST(TargetMatcherTest, TheMatchingModeHoldsForTargetsAndExclusions) {
  LoraConfig config = Config({"to_q"}, TargetMatching::kSuffix);
  config.exclude_modules = {"0.to_q"};
  LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher matcher,
                            TargetMatcher::Create(config, {"embed"}));
  EXPECT_THAT(matcher.MatchingTargets("blocks.0.to_q"), ElementsAre(0));
  EXPECT_THAT(matcher.MatchingTargets("blocks.0.to_qkv"), IsEmpty());
  EXPECT_TRUE(matcher.IsExcluded("blocks.0.to_q"));
  EXPECT_FALSE(matcher.IsExcluded("blocks.10.to_q"));
  EXPECT_FALSE(matcher.IsExcluded("0.to_q.0"));
  // The architecture's are substrings.
  EXPECT_TRUE(matcher.IsExcluded("embedder.to_q"));
}

TEST(TargetMatcherTest, NoTargetsMeansTheContractsDefaultsAsSubstrings) {
  for (LoraConfig config : {Config({}, TargetMatching::kExact), LoraConfig()}) {
    LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher matcher,
                              TargetMatcher::Create(config));
    EXPECT_THAT(
        matcher.targets(),
        ElementsAre("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k",
                    "to_v", "to_out", "to_qkv", "to_gate_compress"));
    EXPECT_THAT(matcher.MatchingTargets("blocks.0.to_qkv"), ElementsAre(4, 8));
  }
}

TEST(TargetMatcherTest, AllLinearMatchesEveryNameInEveryMode) {
  for (const TargetMatching matching :
       {TargetMatching::kSubstring, TargetMatching::kExact,
        TargetMatching::kSuffix, TargetMatching::kGlob,
        TargetMatching::kRegex}) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const TargetMatcher matcher,
        TargetMatcher::Create(Config({"all-linear"}, matching)));
    EXPECT_THAT(matcher.targets(), ElementsAre("all-linear"));
    EXPECT_THAT(matcher.MatchingTargets("blocks.0.ff"), ElementsAre(0));
  }
}

TEST(TargetMatcherTest, MergesRepetitionsInTheOrderGiven) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TargetMatcher matcher,
      TargetMatcher::Create(Config({"to_v", "to_q", "to_v"})));
  EXPECT_THAT(matcher.targets(), ElementsAre("to_v", "to_q"));
}

TEST(TargetMatcherTest, RefusesPatternsThatAreNone) {
  LoraConfig exclusion = Config({"to_q"}, TargetMatching::kRegex);
  exclusion.exclude_modules = {"to_(q"};
  for (const LoraConfig& config :
       {Config({"to_q", ""}), Config({"to_(q"}, TargetMatching::kRegex),
        exclusion}) {
    EXPECT_THAT(TargetMatcher::Create(config),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         ContainsRegex("empty|missing")));
  }
  EXPECT_THAT(TargetMatcher::Create(Config({"to_q"}), {""}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
}

}  // namespace
}  // namespace trainer_lora::lora
