#include "lora/target_matcher.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;
using Strings = std::vector<std::string>;

TEST(TargetMatcherTest, SelectsByPartOfTheFullName) {
  struct Case {
    Strings targets;
    Strings exclusions;
    std::string name;
    bool selected;
  };
  const Case cases[] = {
      {{"to_q"}, {}, "blocks.0.attn1.to_q", true},
      {{"to_q"}, {}, "to_q", true},
      {{"to_q"}, {}, "blocks.0.attn1.to_k", false},
      {{"to_q", "to_k"}, {}, "blocks.0.attn1.to_k", true},
      {{"blocks.1."}, {}, "blocks.1.attn1.to_k", true},
      {{"blocks.1."}, {}, "blocks.11.attn1.to_k", false},
      // A list index is part of the name.
      {{"to_add_out.0"}, {}, "attn.to_add_out.0", true},
      {{"ff.0"}, {}, "block.ff.0", true},
      // The contract's substrings match both; other modes are for later.
      {{"linear_q"}, {}, "decoder.linear_query", true},
      {{"to_q"}, {"embedder"}, "embedder.to_q", false},
      {{"to_q"}, {"embedder"}, "blocks.0.to_q", true},
      {{"to_q"}, {"blocks.0", "blocks.1"}, "blocks.1.to_q", false},
      // The root module has no name and is never adapted.
      {{"to_q"}, {}, "", false},
      // Letter case counts.
      {{"to_q"}, {}, "TO_Q", false},
  };
  for (const Case& test : cases) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const TargetMatcher matcher,
        TargetMatcher::Create(test.targets, test.exclusions));
    EXPECT_EQ(matcher.Selects(test.name), test.selected) << test.name;
  }
}

TEST(TargetMatcherTest, AnEmptyListMeansTheContractsDefaults) {
  LORA_ASSERT_OK_AND_ASSIGN(const TargetMatcher matcher,
                            TargetMatcher::Create({}, {}));
  EXPECT_THAT(
      matcher.targets(),
      ElementsAre("q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k",
                  "to_v", "to_out", "to_qkv", "to_gate_compress"));
}

TEST(TargetMatcherTest, MergesRepetitionsInTheOrderGiven) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TargetMatcher matcher,
      TargetMatcher::Create({"to_v", "to_q", "to_v", "to_q"}, {}));
  EXPECT_THAT(matcher.targets(), ElementsAre("to_v", "to_q"));
}

TEST(TargetMatcherTest, RefusesAnEmptyString) {
  EXPECT_THAT(TargetMatcher::Create({"to_q", ""}, {}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("LoRA target is an empty string")));
  EXPECT_THAT(TargetMatcher::Create({"to_q"}, {""}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("LoRA exclusion is an empty string")));
}

TEST(TargetMatcherTest, NamesEveryTargetThatMatches) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const TargetMatcher matcher,
      TargetMatcher::Create({"to_q", "attn", "to_k"}, {"attn"}));
  EXPECT_THAT(matcher.MatchingTargets("attn.to_q"),
              ElementsAre("to_q", "attn"));
}

}  // namespace
}  // namespace trainer_lora::lora
