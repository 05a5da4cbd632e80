#include "lora/target_matcher.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

TEST(TargetMatcherTest, TheLayerIndexIsTheFirstNumberOrThatAfterAList) {
  using Index = std::optional<int64_t>;
  struct Case {
    std::vector<std::string> lists;
    const char* name;
    Index index;
  };
  const std::vector<Case> cases = {
      {{}, "blocks.7.attn.to_q", 7},
      {{}, "model.layers.12.experts.3.to_q", 12},
      {{}, "12.to_q", 12},
      {{}, "attn.to_out.0", 0},
      {{}, "blocks.007.to_q", 7},
      {{}, "embedder.to_q", std::nullopt},
      {{}, "block7.q2.to_q_3", std::nullopt},
      {{}, "blocks.-7.+7. 7.7a.to_q", std::nullopt},
      {{}, "blocks.99999999999999999999.to_q", std::nullopt},
      {{}, "", std::nullopt},
      {{"blocks"}, "blocks.7.attn.to_q", 7},
      {{"blocks"}, "dit.3.blocks.7.to_q", 7},
      {{"blocks"}, "my_blocks.7.to_q", std::nullopt},
      {{"blocks"}, "blocks.attn.7.to_q", std::nullopt},
      {{"blocks"}, "7.to_q", std::nullopt},
      {{"blocks"}, "blocks", std::nullopt},
      // The first with a number after it.
      {{"blocks"}, "blocks.a.blocks.5.blocks.6", 5},
      {{"transformer.h"}, "gpt.transformer.h.7.to_q", 7},
      {{"transformer.h"}, "gpt.h.7.to_q", std::nullopt},
      {{"experts", "layers"}, "layers.1.experts.2.to_q", 2},
      {{"experts", "layers"}, "layers.1.attn.to_q", 1},
      // The name of a list is no pattern.
      {{"b.*"}, "blocks.7.to_q", std::nullopt},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    LoraConfig config = Config({"to_q"}, TargetMatching::kRegex);
    config.layers_pattern = c.lists;
    LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher matcher,
                              TargetMatcher::Create(config));
    EXPECT_EQ(matcher.LayerIndex(c.name), c.index);
  }
}

TEST(TargetMatcherTest, RangesOfLayersHaveBothEnds) {
  LoraConfig config = Config({"to_q"});
  LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher all,
                            TargetMatcher::Create(config));
  EXPECT_TRUE(all.IsInLayers("blocks.7.to_q"));
  EXPECT_TRUE(all.IsInLayers("to_q"));
  config.layers_to_transform = {{{8, 10}, {3, 3}}};
  LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher some,
                            TargetMatcher::Create(config));
  for (int64_t layer = 0; layer < 12; ++layer) {
    EXPECT_EQ(some.IsInLayers(absl::StrCat("blocks.", layer, ".to_q")),
              layer == 3 || (layer >= 8 && layer <= 10))
        << layer;
  }
  EXPECT_FALSE(some.IsInLayers("embedder.to_q"));
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
  LoraConfig list = Config({"to_q"});
  list.layers_pattern = {""};
  EXPECT_THAT(TargetMatcher::Create(list),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
  EXPECT_THAT(TargetMatcher::Create(Config({"to_q"}), {""}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("empty")));
}

}  // namespace
}  // namespace trainer_lora::lora
