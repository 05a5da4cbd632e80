#include "config/name_pattern.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::config {
namespace {

using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

constexpr TargetMatching kSubstring = TargetMatching::kSubstring;
constexpr TargetMatching kExact = TargetMatching::kExact;
constexpr TargetMatching kSuffix = TargetMatching::kSuffix;
constexpr TargetMatching kGlob = TargetMatching::kGlob;
constexpr TargetMatching kRegex = TargetMatching::kRegex;

TEST(NamePatternTest, MatchesTheFullNameInEachOfItsWays) {
  struct Case {
    std::string pattern;
    TargetMatching matching;
    std::string name;
    bool matches;
  };
  const Case cases[] = {
      {"to_q", kSubstring, "blocks.0.attn1.to_q", true},
      {"to_q", kSubstring, "to_q", true},
      {"to_q", kSubstring, "blocks.0.attn1.to_k", false},
      {"to_q", kSubstring, "TO_Q", false},
      {"linear_q", kSubstring, "decoder.linear_query", true},
      {"blocks.1.", kSubstring, "blocks.1.to_k", true},
      {"blocks.1.", kSubstring, "blocks.11.to_k", false},
      // A list index is part of the name.
      {"to_add_out.0", kSubstring, "attn.to_add_out.0", true},
      {"ff.0", kSubstring, "block.ff.0", true},
      // Nothing is special in a substring.
      {"to.q", kSubstring, "to_q", false},
      {"*", kSubstring, "to_q", false},

      {"attn.to_q", kExact, "attn.to_q", true},
      {"to_q", kExact, "attn.to_q", false},
      {"linear_q", kExact, "linear_query", false},
      {"ff.0", kExact, "ff.0", true},

      {"to_q", kSuffix, "to_q", true},
      {"to_q", kSuffix, "blocks.0.attn.to_q", true},
      {"attn.to_q", kSuffix, "blocks.0.attn.to_q", true},
      {"attn.to_q", kSuffix, "blocks.0.self_attn.to_q", false},
      {"linear_q", kSuffix, "decoder.linear_query", false},
      {"to_q", kSuffix, "add_to_q", false},
      {"to_q", kSuffix, "to_q.0", false},
      {"ff.0", kSuffix, "block.ff.0", true},

      {"*", kGlob, "blocks.0.attn.to_q", true},
      {"to_q", kGlob, "blocks.0.to_q", false},
      {"*.to_q", kGlob, "blocks.0.attn.to_q", true},
      {"*.to_q", kGlob, "to_q", false},
      {"blocks.*.to_?", kGlob, "blocks.0.attn.to_v", true},
      {"blocks.?.to_q", kGlob, "blocks.10.to_q", false},
      {"*to_[qv]", kGlob, "attn.to_v", true},
      {"*to_[qv]", kGlob, "attn.to_k", false},
      {"*to_[!qv]", kGlob, "attn.to_k", true},
      {"*to_[!qv]", kGlob, "attn.to_q", false},
      {"blocks.[0-3].*", kGlob, "blocks.2.to_q", true},
      {"blocks.[0-3].*", kGlob, "blocks.4.to_q", false},
      {"a[]]b", kGlob, "a]b", true},
      {"a[!]]b", kGlob, "a]b", false},
      {"a[.]b", kGlob, "a.b", true},
      {"a[.]b", kGlob, "axb", false},
      {"a[_-]b", kGlob, "a_b", true},
      {"a[^]b", kGlob, "a^b", true},
      // A dot, and what a regular expression has, stand for themselves.
      {"a.b", kGlob, "axb", false},
      {"a+(b)|c", kGlob, "a+(b)|c", true},

      {".*\\.to_[qkv]", kRegex, "blocks.0.to_k", true},
      {"to_q", kRegex, "blocks.0.to_q", false},
      {"blocks\\.(1[0-9]|2)\\..*", kRegex, "blocks.17.to_q", true},
      {"blocks\\.(1[0-9]|2)\\..*", kRegex, "blocks.1.to_q", false},
  };
  for (const Case& test : cases) {
    LORA_ASSERT_OK_AND_ASSIGN(const NamePattern pattern,
                              NamePattern::Create(test.pattern, test.matching));
    EXPECT_EQ(pattern.Matches(test.name), test.matches)
        << test.pattern << " on " << test.name;
    EXPECT_EQ(pattern.text(), test.pattern);
  }
}

TEST(NamePatternTest, RefusesWhatIsNoPattern) {
  struct Case {
    std::string pattern;
    TargetMatching matching;
    std::string reason;
  };
  const Case cases[] = {
      {"", kSubstring, "empty"},
      {"", kRegex, "empty"},
      {"to_[qv", kGlob, "a [ is not closed"},
      {"to_[]", kGlob, "a [ is not closed"},
      {"to_[z-a]", kGlob, "range"},
      {"to_(q", kRegex, "missing"},
      {"*to_q", kRegex, "repetition"},
      {"(?=to_q)", kRegex, "(?="},
      {"to_[\xff]", kGlob, "UTF-8"},
      // The message has a part of the pattern.
      {"[[:a\xff:]]", kRegex, "[:a\\xff:]"},
      // More memory than a pattern may take.
      {"((((to_q{100}){100}){100}){100})", kRegex, "repetition"},
  };
  for (const Case& test : cases) {
    EXPECT_THAT(
        NamePattern::Create(test.pattern, test.matching),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(test.reason)))
        << test.pattern;
  }
}

// Time that is exponential in the name would not end.
TEST(NamePatternTest, MatchesALongNameInLinearTime) {
  const std::string name(100000, 'a');
  for (const auto& [text, matching] :
       {std::pair("(a*)*b", kRegex), std::pair("*a*a*a*a*a*a*b", kGlob)}) {
    LORA_ASSERT_OK_AND_ASSIGN(const NamePattern pattern,
                              NamePattern::Create(text, matching));
    EXPECT_FALSE(pattern.Matches(name));
  }
}

}  // namespace
}  // namespace trainer_lora::config
