#include "examples/sentence_encoder/wordnet.h"

#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::examples {

bool operator==(const GlossPair& a, const GlossPair& b) {
  return a.lemma == b.lemma && a.definition == b.definition;
}

void PrintTo(const GlossPair& pair, std::ostream* stream) {
  *stream << pair.lemma << ": " << pair.definition;
}

namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;

std::string WriteNouns(const std::string& name, const std::string& content) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << content;
  return path;
}

TEST(LoadNounDefinitionsTest, FindsThePairsOfWordNet) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const auto pairs,
      LoadNounDefinitions(RunfilePath("wordnet/wordnet/data.noun")));
  // As many as a count in Python by the same rule.
  EXPECT_EQ(pairs.size(), 61'251);
  EXPECT_EQ(pairs.front(),
            (GlossPair{"entity",
                       "that which is perceived or known or inferred to have "
                       "its own distinct existence (living or nonliving)"}));
}

TEST(LoadNounDefinitionsTest, TakesFirstWordAndGlossUpToTheExamples) {
  const std::string path = WriteNouns(
      "rules.noun",
      "  1 a license of some lines  \n"
      "00000001 03 n 02 plain_word 0 other 1 001 @ 00000002 n 0000 | "
      "one two three four  \n"
      "00000002 03 n 01 a-b 0 000 | (law) one; two three; \"an example\"; "
      "\"another\"  \n"
      "00000003 03 n 01 Proper_Name 0 000 | a definition of a name  \n"
      "00000004 03 n 01 7_dwarfs 0 000 | starts with a digit | really  \n"
      "00000005 03 n 01 short 0 000 | just three words; \"and an example\"\n"
      "00000006 03 n 01 c_Battery 0 000 | capitals inside are fine\n");
  LORA_ASSERT_OK_AND_ASSIGN(const auto pairs, LoadNounDefinitions(path));
  EXPECT_THAT(pairs,
              ElementsAre(GlossPair{"plain word", "one two three four"},
                          GlossPair{"a-b", "(law) one; two three"},
                          GlossPair{"7 dwarfs", "starts with a digit | really"},
                          GlossPair{"c Battery", "capitals inside are fine"}));
}

TEST(LoadNounDefinitionsTest, NamesTheLineOfABrokenSynset) {
  const std::string good = "00000001 03 n 01 word 0 000 | one two three four\n";
  const struct {
    std::string name;
    std::string line;
    std::string complaint;
  } kCases[] = {
      {"no_gloss.noun", "00000002 03 n 01 word 0 000", "no gloss"},
      {"verb.noun", "00000002 29 v 01 go 0 000 | move from here to there",
       "'v'"},
      {"cut.noun", "00000002 03 n | one two three four", "six fields"},
      {"empty_line.noun", "", "no gloss"},
  };
  for (const auto& test_case : kCases) {
    const std::string path = WriteNouns(
        test_case.name, absl::StrCat(good, test_case.line, "\n", good));
    EXPECT_THAT(LoadNounDefinitions(path),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr(test_case.name + ":2: "),
                               HasSubstr(test_case.complaint))));
  }
}

TEST(LoadNounDefinitionsTest, NamesAFileThatIsNotThere) {
  EXPECT_THAT(LoadNounDefinitions("no_such.noun"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such.noun")));
}

// Pairs w0: d0, w1: d1, ..., and three more definitions of each tenth word.
std::vector<GlossPair> SomePairs() {
  std::vector<GlossPair> pairs;
  for (int i = 0; i < 100; ++i) {
    const int senses = i % 10 == 0 ? 4 : 1;
    for (int sense = 0; sense < senses; ++sense) {
      pairs.push_back({absl::StrCat("w", i), absl::StrCat("d", i, ".", sense)});
    }
  }
  return pairs;
}

TEST(SplitHeldOutTest, HoldsOutDifferentWordsThatTrainingNeverSees) {
  LORA_ASSERT_OK_AND_ASSIGN(const GlossSplit split,
                            SplitHeldOut(SomePairs(), 40, /*seed=*/1));
  std::set<std::string> held_out;
  for (const GlossPair& pair : split.held_out) held_out.insert(pair.lemma);
  EXPECT_EQ(held_out.size(), 40);
  EXPECT_EQ(split.held_out.size(), 40);
  std::vector<GlossPair> rest;
  for (const GlossPair& pair : SomePairs()) {
    if (held_out.count(pair.lemma) == 0) rest.push_back(pair);
  }
  EXPECT_EQ(split.train, rest);
}

TEST(SplitHeldOutTest, DependsOnTheSeedAlone) {
  LORA_ASSERT_OK_AND_ASSIGN(const auto first, SplitHeldOut(SomePairs(), 9, 1));
  LORA_ASSERT_OK_AND_ASSIGN(const auto again, SplitHeldOut(SomePairs(), 9, 1));
  LORA_ASSERT_OK_AND_ASSIGN(const auto other, SplitHeldOut(SomePairs(), 9, 2));
  EXPECT_EQ(first.held_out, again.held_out);
  EXPECT_NE(first.held_out, other.held_out);
}

// The reported recall is comparable only while the split stays what it is.
TEST(SplitHeldOutTest, KeepsItsGoldenOrder) {
  LORA_ASSERT_OK_AND_ASSIGN(const auto split, SplitHeldOut(SomePairs(), 4, 0));
  std::vector<std::string> definitions;
  for (const auto& pair : split.held_out)
    definitions.push_back(pair.definition);
  EXPECT_THAT(definitions, ElementsAre("d55.0", "d20.2", "d76.0", "d90.3"));
}

TEST(SplitHeldOutTest, RefusesMoreThanThereAreWords) {
  EXPECT_THAT(SplitHeldOut(SomePairs(), 101, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("101"), HasSubstr("100 different"))));
  EXPECT_THAT(SplitHeldOut(SomePairs(), -1, 0),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("-1")));
}

}  // namespace
}  // namespace trainer_lora::examples
