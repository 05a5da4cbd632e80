#include "distributed/checkpoint/state_dict_mapping.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::Matcher;
using ::trainer_lora::testutil::StatusIs;

Matcher<MappedKey> IsPart(int64_t part, int64_t num_parts, std::string name) {
  return AllOf(Field("name", &MappedKey::name, std::move(name)),
               Field("part", &MappedKey::part, part),
               Field("num_parts", &MappedKey::num_parts, num_parts));
}

Matcher<MappedKey> IsWhole(std::string name) {
  return IsPart(0, 1, std::move(name));
}

TEST(StateDictMappingTest, IsTheIdentityWithoutRules) {
  LORA_ASSERT_OK_AND_ASSIGN(const StateDictMapping empty,
                            StateDictMapping::Create({}));
  for (const std::string key : {"", "a.weight", "\\1", "\xff"}) {
    EXPECT_THAT(StateDictMapping().Map(key), IsWhole(key));
    EXPECT_THAT(empty.Map(key), IsWhole(key));
  }
}

TEST(StateDictMappingTest, FillsInWhatTheGroupsMatched) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const StateDictMapping mapping,
      StateDictMapping::Create(
          {{R"(h\.(\d+)\.(attn|mlp)\.(.*))", R"(\2.\1.\3.\1)"},
           {R"(whole.*)", R"(\0)"},
           {R"(backslash)", R"(a\\b)"},
           {R"((a)(b)(c)(d)(e)(f)(g)(h)(i))", R"(\9\8\7\6\5\4\3\2\1)"}}));
  EXPECT_THAT(mapping.Map("h.12.attn.q.weight"),
              IsWhole("attn.12.q.weight.12"));
  EXPECT_THAT(mapping.Map("h.0.mlp."), IsWhole("mlp.0..0"));
  EXPECT_THAT(mapping.Map("whole.key"), IsWhole("whole.key"));
  EXPECT_THAT(mapping.Map("backslash"), IsWhole(R"(a\b)"));
  EXPECT_THAT(mapping.Map("abcdefghi"), IsWhole("ihgfedcba"));
}

TEST(StateDictMappingTest, LeavesOutAGroupThatTookNoPart) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const StateDictMapping mapping,
      StateDictMapping::Create({{R"((?:(a)|b)\.(c))", R"(<\1>\2)"}}));
  EXPECT_THAT(mapping.Map("a.c"), IsWhole("<a>c"));
  EXPECT_THAT(mapping.Map("b.c"), IsWhole("<>c"));
}

TEST(StateDictMappingTest, MatchesFromEndToEnd) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const StateDictMapping mapping,
      StateDictMapping::Create({{"to_q", "q"}, {"a|ab", "alternative"}}));
  EXPECT_THAT(mapping.Map("to_q"), IsWhole("q"));
  for (const std::string key : {"to_q.weight", "x.to_q", "to_qto_q", "", "b"}) {
    EXPECT_THAT(mapping.Map(key), IsWhole(key));
  }
  // The shorter alternative alone would leave the b.
  EXPECT_THAT(mapping.Map("ab"), IsWhole("alternative"));
}

TEST(StateDictMappingTest, AppliesTheFirstRuleThatMatches) {
  // More than ten, so that an order as of texts would show.
  std::vector<MappingRule> rules;
  for (int i = 0; i < 12; ++i) {
    rules.push_back({absl::StrCat("x{", i, ",}"), absl::StrCat("rule", i)});
  }
  for (const bool reversed : {false, true}) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const StateDictMapping mapping,
        StateDictMapping::Create(
            reversed ? std::vector<MappingRule>(rules.rbegin(), rules.rend())
                     : rules));
    for (int length = 0; length < 20; ++length) {
      const int first = reversed ? std::min(length, 11) : 0;
      EXPECT_THAT(mapping.Map(std::string(length, 'x')),
                  IsWhole(absl::StrCat("rule", first)));
    }
  }
}

TEST(StateDictMappingTest, MapsOnce) {
  LORA_ASSERT_OK_AND_ASSIGN(const StateDictMapping mapping,
                            StateDictMapping::Create({{"a", "b"}, {"b", "c"}}));
  EXPECT_THAT(mapping.Map("a"), IsWhole("b"));
  EXPECT_THAT(mapping.Map("b"), IsWhole("c"));
}

TEST(StateDictMappingTest, SaysWhichPartAKeyHolds) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const StateDictMapping mapping,
      StateDictMapping::Create(
          {{R"((.*)\.to_q\.(.*))", R"(\1.qkv.\2)", 0, 3},
           {R"((.*)\.to_k\.(.*))", R"(\1.qkv.\2)", 1, 3},
           {R"((.*)\.to_v\.(.*))", R"(\1.qkv.\2)", 2, 3}}));
  EXPECT_THAT(mapping.Map("a.to_q.bias"), IsPart(0, 3, "a.qkv.bias"));
  EXPECT_THAT(mapping.Map("a.to_k.bias"), IsPart(1, 3, "a.qkv.bias"));
  EXPECT_THAT(mapping.Map("a.to_v.bias"), IsPart(2, 3, "a.qkv.bias"));
  EXPECT_THAT(mapping.Map("a.to_o.bias"), IsWhole("a.to_o.bias"));
}

TEST(StateDictMappingTest, CopiesShareTheRules) {
  LORA_ASSERT_OK_AND_ASSIGN(StateDictMapping mapping,
                            StateDictMapping::Create({{"a", "b"}}));
  const StateDictMapping copy = mapping;
  mapping = StateDictMapping();
  EXPECT_THAT(copy.Map("a"), IsWhole("b"));
  EXPECT_THAT(mapping.Map("a"), IsWhole("a"));
}

// A backtracking matcher would need 2^n steps, or n frames of the stack.
TEST(StateDictMappingTest, TakesLongKeysAndHardPatterns) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const StateDictMapping mapping,
      StateDictMapping::Create({{"(a*)*b", "hard"}, {"(?:a|b|c)*", "long"}}));
  const std::string key(100'000, 'a');
  EXPECT_THAT(mapping.Map(key + "b"), IsWhole("hard"));
  EXPECT_THAT(mapping.Map(key), IsWhole("long"));
  EXPECT_THAT(mapping.Map(key + "d"), IsWhole(key + "d"));
}

// Each pattern fits into the memory that one may take; together they are too
// large for a common automaton.
TEST(StateDictMappingTest, MatchesRulesThatAreTooLargeTogether) {
  std::vector<MappingRule> rules;
  for (int i = 0; i < 30; ++i) {
    rules.push_back(
        {absl::StrCat("key", i, R"((\pL{50})?)"), absl::StrCat("rule", i)});
  }
  LORA_ASSERT_OK_AND_ASSIGN(const StateDictMapping mapping,
                            StateDictMapping::Create(rules));
  for (int i = 0; i < 30; ++i) {
    EXPECT_THAT(mapping.Map(absl::StrCat("key", i)),
                IsWhole(absl::StrCat("rule", i)));
  }
  EXPECT_THAT(mapping.Map("key"), IsWhole("key"));
}

TEST(StateDictMappingTest, RefusesABadRuleByNumberAndPattern) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  struct Case {
    MappingRule rule;
    std::string message;
  };
  const Case cases[] = {
      {{"", "x"}, R"((""): the pattern is empty)"},
      {{"x", ""}, R"(("x"): the replacement is empty)"},
      {{R"(h\.(\d+)", "x"}, "not a regular expression"},
      {{"(?=x)", "x"}, "not a regular expression"},
      {{"(((x{1000}){1000}){1000}", "x"}, "not a regular expression"},
      {{"(\\pL{1000}){1,2}", "x"}, "not a regular expression"},
      {{"\xff", "x"}, R"(("\xff"): the pattern is not a regular)"},
      {{"\x1b(\xc3", "x"}, R"(("\x1b(\xc3"): the pattern is not a regular)"},
      {{"(a)(b)", R"(\3)"}, "the replacement does not fit the pattern"},
      {{"a", R"(\1)"}, "the replacement does not fit the pattern"},
      {{"a", R"(\q)"}, "the replacement does not fit the pattern"},
      {{"a", "\\"}, "the replacement does not fit the pattern"},
      {{"x", "y", 1, 1}, "no part 1 of 1"},
      {{"x", "y", -1, 1}, "no part -1 of 1"},
      {{"x", "y", 0, 0}, "no part 0 of 0"},
      {{"x", "y", 0, -1}, "no part 0 of -1"},
      {{"x", "y", 0, kMaxParts + 1}, "has 65536 parts at most, not 65537"},
      {{"x", "y", 0, int64_t{1} << 62}, "has 65536 parts at most"},
      {{"x", "y", kMin, kMin}, "no part -9223372036854775808"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.message);
    EXPECT_THAT(
        StateDictMapping::Create({{"good", "rule"}, c.rule}),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("mapping rule 2 (\""), HasSubstr(c.message))));
  }
}

TEST(StateDictMappingTest, NamesThePatternOfABadRule) {
  EXPECT_THAT(StateDictMapping::Create({{R"(blöcke\.(\d+)", "x"}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(R"(mapping rule 1 ("blöcke\.(\d+"): )")));
}

}  // namespace
}  // namespace trainer_lora::distributed
