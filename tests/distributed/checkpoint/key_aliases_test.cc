#include "distributed/checkpoint/key_aliases.h"

#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

TEST(KeyAliasesTest, ResolvesAnAliasInBothDirections) {
  KeyAliases aliases;
  ASSERT_THAT(aliases.Add("to_q.weight", "to_q.base_layer.weight"), IsOk());
  EXPECT_EQ(aliases.Resolve("to_q.weight"), "to_q.base_layer.weight");
  EXPECT_EQ(aliases.Reverse("to_q.base_layer.weight"), "to_q.weight");
}

TEST(KeyAliasesTest, LeavesAKeyWithoutAliasAsItIs) {
  KeyAliases aliases;
  EXPECT_TRUE(aliases.empty());
  ASSERT_THAT(aliases.Add("to_q.weight", "to_q.base_layer.weight"), IsOk());
  for (const std::string key : {"", "to_q", "to_q.weight.", "norm.weight"}) {
    EXPECT_EQ(aliases.Resolve(key), key);
    EXPECT_EQ(aliases.Reverse(key), key);
  }
}

TEST(KeyAliasesTest, ResolvesOneStepOnly) {
  KeyAliases aliases;
  ASSERT_THAT(aliases.Add("a", "b"), IsOk());
  ASSERT_THAT(aliases.Add("b", "c"), IsOk());
  EXPECT_EQ(aliases.Resolve("a"), "b");
  EXPECT_EQ(aliases.Resolve("b"), "c");
}

TEST(KeyAliasesTest, IteratesInTheOrderOfTheKeys) {
  KeyAliases aliases;
  for (const std::string key : {"b", "a", "ä", "A", "c"}) {
    ASSERT_THAT(aliases.Add(key, key + "'"), IsOk());
  }
  EXPECT_THAT(aliases,
              ElementsAre(Pair("A", "A'"), Pair("a", "a'"), Pair("b", "b'"),
                          Pair("c", "c'"), Pair("ä", "ä'")));
  EXPECT_EQ(aliases.size(), 5);
}

TEST(KeyAliasesTest, LeadsSeveralKeysToOneNameAndBackToTheFirstAdded) {
  KeyAliases aliases;
  ASSERT_THAT(aliases.Add("second.weight", "first.base_layer.weight"), IsOk());
  ASSERT_THAT(aliases.Add("first.weight", "first.base_layer.weight"), IsOk());
  EXPECT_EQ(aliases.Resolve("first.weight"), "first.base_layer.weight");
  EXPECT_EQ(aliases.Resolve("second.weight"), "first.base_layer.weight");
  EXPECT_EQ(aliases.Reverse("first.base_layer.weight"), "second.weight");
}

TEST(KeyAliasesTest, AddingAPairAgainChangesNothing) {
  KeyAliases aliases;
  ASSERT_THAT(aliases.Add("a", "x"), IsOk());
  EXPECT_THAT(aliases.Add("a", "x"), IsOk());
  EXPECT_EQ(aliases.size(), 1);
}

TEST(KeyAliasesTest, RefusesASecondNameForAKey) {
  KeyAliases aliases;
  ASSERT_THAT(aliases.Add("key", "old_name"), IsOk());
  EXPECT_THAT(aliases.Add("key", "new_name"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"key\""), HasSubstr("\"old_name\""),
                             HasSubstr("\"new_name\""))));
  EXPECT_EQ(aliases.Resolve("key"), "old_name");
  EXPECT_EQ(aliases.Reverse("new_name"), "new_name");
  EXPECT_THAT(
      aliases.Add("key", "\xff\n"),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(R"("\xff\x0a")")));
}

TEST(KeyAliasesTest, RefusesEmptySides) {
  KeyAliases aliases;
  EXPECT_THAT(aliases.Add("", "name"),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("name")));
  EXPECT_THAT(aliases.Add("key", ""),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("key")));
  EXPECT_TRUE(aliases.empty());
}

TEST(KeyAliasesTest, CopiesAreIndependent) {
  KeyAliases original;
  ASSERT_THAT(original.Add("a", "x"), IsOk());
  KeyAliases copy = original;
  ASSERT_THAT(copy.Add("b", "y"), IsOk());
  EXPECT_EQ(original.Resolve("b"), "b");
  original = KeyAliases();
  EXPECT_EQ(copy.Resolve("a"), "x");
}

}  // namespace
}  // namespace trainer_lora::distributed
