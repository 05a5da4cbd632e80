#include "config/internal/message_text.h"

#include <string>

#include "gtest/gtest.h"

namespace trainer_lora::config {
namespace {

TEST(MessageTextTest, PrintableKeepsUtf8AndEscapesAllElse) {
  struct Case {
    std::string text;
    std::string printable;
  };
  const Case cases[] = {
      {"", ""},
      {"to_q \"'\\", "to_q \"'\\"},
      {"\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80",
       "\xc3\xa4 \xe2\x82\xac \xf0\x9f\x98\x80"},
      {std::string("a\0\t\n\x1b\x7f", 6), R"(a\x00\x09\x0a\x1b\x7f)"},
      {"\xff\x80", R"(\xff\x80)"},
      // Cut, overlong, a surrogate, above U+10FFFF.
      {"a\xe2\x82", R"(a\xe2\x82)"},
      {"\xc3(", R"(\xc3()"},
      {"\xc0\xaf", R"(\xc0\xaf)"},
      {"\xe0\x80\xaf", R"(\xe0\x80\xaf)"},
      {"\xed\xa0\x80", R"(\xed\xa0\x80)"},
      {"\xf4\x90\x80\x80", R"(\xf4\x90\x80\x80)"},
  };
  for (const Case& c : cases) EXPECT_EQ(Printable(c.text), c.printable);
}

TEST(MessageTextTest, ShortenCutsBetweenCharacters) {
  EXPECT_EQ(Shorten("abc", 3), "abc");
  EXPECT_EQ(Shorten("abcd", 3), "abc...");
  EXPECT_EQ(Shorten("ab\xc3\xa4", 3), "ab...");
  EXPECT_EQ(Shorten("ab\xc3\xa4x", 4), "ab\xc3\xa4...");
}

TEST(MessageTextTest, DidYouMeanFindsTheNearest) {
  EXPECT_EQ(DidYouMean("rnk", {"alpha", "rank"}), " (did you mean rank?)");
  EXPECT_EQ(DidYouMean("tank", {"rnk_", "rank"}), " (did you mean rank?)");
  EXPECT_EQ(DidYouMean("seed", {"alpha", "rank"}), "");
}

TEST(MessageTextTest, JoinsAlternatives) {
  EXPECT_EQ(JoinAlternatives({"a"}), "a");
  EXPECT_EQ(JoinAlternatives({"a", "b"}), "a or b");
  EXPECT_EQ(JoinAlternatives({"a", "b", "c"}), "a, b or c");
}

}  // namespace
}  // namespace trainer_lora::config
