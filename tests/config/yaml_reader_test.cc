#include "config/yaml_reader.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::StartsWith;
using testutil::IsOk;
using testutil::StatusIs;

std::string Repeat(const std::string& part, int times) {
  std::string text;
  for (int i = 0; i < times; ++i) text += part;
  return text;
}

// --- ParseYaml -------------------------------------------------------------

TEST(ParseYamlTest, RefusesWithFileLineAndColumn) {
  struct Case {
    const char* name;
    std::string text;
    std::string message;
  };
  std::string deep_block;
  for (int i = 0; i < 1000; ++i) deep_block += std::string(i, ' ') + "a:\n";
  const std::vector<Case> cases = {
      {"0 bytes", "", "f.yaml: the file is empty"},
      {"a comment alone", "# nothing\n", "f.yaml: the file is empty"},
      {"an explicit empty document", "---\n", "f.yaml: the file is empty"},
      {"two documents", "a: 1\n---\nb: 2\n",
       "f.yaml:2:1: a second document starts here"},
      {"two documents, the first marked", "---\na: 1\n--- {b: 2}\n",
       "f.yaml:3:1: a second document starts here"},
      {"two documents, the first ended", "a: 1\n...\nb: 2\n",
       "f.yaml:3:1: a second document starts here"},
      {"a directive after the end", "a: 1\n%YAML 1.2\n---\nb: 2\n",
       "f.yaml:3:1: a second document starts here"},
      {"a document in front of an indented one", "  a: 1\nb: 2\n",
       "f.yaml:2:1: a second document starts here"},
      {"a second document in a mapping's scalar", "a: b\n--- c\n",
       "f.yaml:2:1: a second document starts here"},
      {"a list item in a mapping", "a: 1\n- b\n", "f.yaml:2:1: not valid YAML"},
      {"a mapping after a list", "[a]\nb: 1\n", "f.yaml:2:1: a second"},
      {"a comma after the end", "a\n---\n, b\n", "f.yaml:2:1: a second"},
      {"a bracket after the end", "a\n---\n]\n", "f.yaml:"},
      {"an unclosed list", "a: [1, 2\n", "f.yaml:2:1: not valid YAML"},
      {"an unclosed quote", "a: \"x\nb: 1\n",
       "not valid YAML: a quoted string is not closed"},
      {"an unclosed quote at the end", "a: 'x",
       "not valid YAML: a quoted string is not closed"},
      {"a tab for indentation", "a:\n\tb: 1\n",
       "(the line is indented with a tab; use spaces)"},
      {"a tab in deeper lines", "a:\n  b: 1\n\tc: 2\n",
       "(the line is indented with a tab; use spaces)"},
      {"an unknown alias", "a: *x\n", "f.yaml:1:4: not valid YAML"},
      {"latin-1", "a: 1\nb: caf\xE9\n", "f.yaml:2:7: not UTF-8"},
      {"an overlong character", "a: \xC0\xAF\n", "f.yaml:1:4: not UTF-8"},
      {"an overlong character of 3", "a: \xE0\x80\xAF\n",
       "f.yaml:1:4: not UTF-8"},
      {"a surrogate", "a: \xED\xA0\x80\n", "f.yaml:1:4: not UTF-8"},
      {"above U+10FFFF", "a: \xF4\x90\x80\x80\n", "f.yaml:1:4: not UTF-8"},
      {"a cut character", "a: \xE2\x82", "f.yaml:1:4: not UTF-8"},
      {"UTF-16",
       std::string("\xFF\xFE"
                   "a\0:\0",
                   6),
       "f.yaml:1:1: not UTF-8"},
      {"a NUL", std::string("a: 1\nb\0: 2\n", 11),
       "f.yaml:2:2: control character U+0000"},
      {"an end of transmission", "a: 1\n\x04lost: 2\n",
       "f.yaml:2:1: control character U+0004"},
      {"10,000 open lists", Repeat("[", 10000), "nested too deeply"},
      {"10,000 open mappings", Repeat("{", 10000), "nested too deeply"},
      {"10,000 items on a line", Repeat("- ", 10000), "nested too deeply"},
      {"10,000 complex keys", Repeat("? ", 10000), "nested too deeply"},
      {"1,000 levels of blocks", deep_block, "nested too deeply"},
      {"a list of itself", "a: &x [*x]\n", "an alias contains itself"},
      {"a mapping of itself", "a: &x {b: *x}\n", "an alias contains itself"},
      {"a merge of itself", "a: &x\n  <<: *x\n", "an alias contains itself"},
      {"a duplicate key", "a: 1\nb: 2\na: 3\n",
       "f.yaml:3:1: the key \"a\" is given twice, first on line 1"},
      {"a duplicate key below", "a:\n  - {b: 1, b: 2}\n",
       "f.yaml:2:12: the key \"b\" is given twice, first on line 2"},
      {"a quoted duplicate", "a: 1\n\"a\": 2\n", "f.yaml:2:1: the key \"a\""},
      {"two merge keys", "a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n",
       "f.yaml:4:3: the key \"<<\" is given twice"},
      {"a merge of a number", "a:\n  <<: 16\n",
       "f.yaml:2:7: the merge key << must be a mapping or a list of mappings, "
       "got 16"},
      {"a merge of a list of numbers", "a:\n  <<: [{b: 1}, 16]\n",
       "f.yaml:2:16: the merge key << must be a mapping"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_THAT(ParseYaml(c.text, "f.yaml"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(StartsWith("f.yaml:"), HasSubstr(c.message))));
  }
}

TEST(ParseYamlTest, ReportsAllDuplicateKeysOnce) {
  EXPECT_THAT(ParseYaml("a: &x {b: 1, b: 2}\nc: *x\nd: *x\na: 3\n", "f.yaml"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f.yaml:1:14: the key \"b\" is given twice, first on "
                       "line 1\n"
                       "f.yaml:4:1: the key \"a\" is given twice, first on "
                       "line 1"));
}

TEST(ParseYamlTest, RefusesALargeFileWithoutParsingIt) {
  const std::string line = "# a comment of no importance\n";
  const std::string text =
      Repeat(line, kMaxYamlBytes / static_cast<int>(line.size()) + 1);
  EXPECT_THAT(ParseYaml(text, "f.yaml"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f.yaml: the file is larger than 4 MiB"));
  EXPECT_THAT(
      ParseYaml("a: 1\n" + text.substr(0, kMaxYamlBytes - 6) + "\n", "f.yaml"),
      IsOk());
}

// Nine levels of nine aliases: 10^9 nodes in half a kilobyte.
TEST(ParseYamlTest, RefusesAliasesThatExpandWithoutEnd) {
  std::string text = "a0: &a0 [x]\n";
  for (int i = 1; i <= 9; ++i) {
    absl::StrAppend(&text, "a", i, ": &a", i, " [");
    for (int j = 0; j < 9; ++j) absl::StrAppend(&text, "*a", i - 1, ", ");
    text += "]\n";
  }
  EXPECT_THAT(ParseYaml(text, "f.yaml"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("aliases expand to too many nodes")));
}

TEST(ParseYamlTest, AcceptsWhatYamlAllows) {
  struct Case {
    const char* name;
    std::string text;
  };
  const std::vector<Case> cases = {
      {"a plain mapping", "a: x\n"},
      {"a byte order mark",
       "\xEF\xBB\xBF"
       "a: x\n"},
      {"no final line end", "a: x"},
      {"an explicit start and end", "---\na: x\n...\n"},
      {"a mark in a block scalar", "a: x\nb: |\n  ---\n  ...\n  %\n"},
      {"a directive", "%YAML 1.2\n---\na: x\n"},
      {"comments around", "# 1\n\n---\n# 2\na: x\n# 3\n"},
      {"Windows line ends", "a: x\r\nb: y\r\n"},
      {"a tab before a comment", "a: x\t# comment\n"},
      {"a block scalar at the end", "b: |\n  text\na: x"},
      {"other scripts", "a: x\nb: Καλημέρα 世界 😀\n"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root,
                              ParseYaml(c.text, "f.yaml"));
    EXPECT_EQ(root["a"].as<std::string>(), "x");
  }
}

TEST(ParseYamlTest, AliasStandsForItsValue) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const YAML::Node root,
      ParseYaml("a: &lora {rank: 16}\nb: *lora\n", "f.yaml"));
  EXPECT_EQ(root["b"]["rank"].as<int>(), 16);
}

TEST(ParseYamlTest, ResolvesMergeKeys) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root, ParseYaml(R"(
base: &base {rank: 8, alpha: 16}
other: &other {rank: 4, seed: 1}
own_key_first: {<<: *base, rank: 32}
own_key_last:
  rank: 32
  <<: *base
first_source_wins: {<<: [*base, *other]}
chain: &chain {<<: *base, seed: 2}
of_a_chain: {<<: *chain}
nested: [{deep: {<<: *base}}]
inline: {<<: {rank: 1, <<: *base}}
quoted: {"<<": 7}
)",
                                                             "f.yaml"));
  const auto rank = [](const YAML::Node& node) {
    return node["rank"].as<int>();
  };
  EXPECT_EQ(rank(root["own_key_first"]), 32);
  EXPECT_EQ(root["own_key_first"]["alpha"].as<int>(), 16);
  EXPECT_EQ(root["own_key_first"].size(), 2);
  EXPECT_EQ(rank(root["own_key_last"]), 32);
  EXPECT_EQ(root["own_key_last"]["alpha"].as<int>(), 16);
  EXPECT_EQ(rank(root["first_source_wins"]), 8);
  EXPECT_EQ(root["first_source_wins"].size(), 3);
  EXPECT_EQ(root["first_source_wins"]["seed"].as<int>(), 1);
  EXPECT_EQ(rank(root["of_a_chain"]), 8);
  EXPECT_EQ(root["of_a_chain"]["seed"].as<int>(), 2);
  EXPECT_EQ(rank(root["nested"][0]["deep"]), 8);
  EXPECT_EQ(rank(root["inline"]), 1);
  EXPECT_EQ(root["inline"]["alpha"].as<int>(), 16);
  EXPECT_EQ(root["quoted"]["<<"].as<int>(), 7);
  EXPECT_EQ(root["base"].size(), 2) << "a source must stay as it is";
}

// --- YamlMapping -----------------------------------------------------------

// Reads `text` as the value of the key `key` on line 2; returns the message of
// the error, or "".
template <typename T, typename... Expected>
std::string ReadValue(const std::string& text, T* value, Expected... expected) {
  absl::StatusOr<YAML::Node> root = ParseYaml("\nkey: " + text, "f.yaml");
  if (!root.ok()) return absl::StrCat("PARSE ", root.status().message());
  YamlErrors errors("f.yaml");
  YamlMapping(*root, "", &errors).Read("key", value, expected...);
  return std::string(errors.ToStatus().message());
}

TEST(YamlMappingTest, ReadsBooleans) {
  struct Case {
    const char* text;
    std::optional<bool> value;
    const char* got = "";
  };
  const std::vector<Case> cases = {
      {"true", true},
      {"True", true},
      {"TRUE", true},
      {"yes", true},
      {"on", true},
      {"On", true},
      {"false", false},
      {"False", false},
      {"no", false},
      {"NO", false},
      {"off", false},
      {"!!bool true", true},
      {"\"true\"", {}, "\"true\""},
      {"'false'", {}, "\"false\""},
      {"y", {}, "y"},
      {"n", {}, "n"},
      {"tRUE", {}, "tRUE"},
      {"1", {}, "1"},
      {"0", {}, "0"},
      {"!!str true", {}, "\"true\""},
      {"!mine true", {}, "!mine true"},
      {"[true]", {}, "a list"},
      {"{a: true}", {}, "a mapping"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    bool value = !c.value.value_or(true);
    const std::string error = ReadValue(c.text, &value);
    EXPECT_EQ(value, c.value.value_or(false));
    EXPECT_THAT(error, c.value ? ""
                               : absl::StrCat("f.yaml:2:6: key must be true or "
                                              "false without quotes, got ",
                                              c.got));
  }
}

TEST(YamlMappingTest, ReadsIntegers) {
  struct Case {
    const char* text;
    std::optional<int64_t> value;
  };
  const std::vector<Case> cases = {
      {"16", 16},
      {"+16", 16},
      {"-1", -1},
      {"0", 0},
      {"\"16\"", 16},
      {"'16.0'", 16},
      {"16.0", 16},
      {"1e3", 1000},
      {"1.5e1", 15},
      {"9223372036854775807", INT64_MAX},
      {"-9223372036854775808", INT64_MIN},
      {"9007199254740992.0", int64_t{1} << 53},
      {"!!int 16", 16},
      {"16.7", {}},
      {"1e-3", {}},
      {"true", {}},
      {".nan", {}},
      {"nan", {}},
      {".inf", {}},
      {"-.inf", {}},
      {"inf", {}},
      {"1e400", {}},
      {"1e30", {}},
      {"99999999999999999999", {}},
      {"0x10", {}},
      {"010", {}},
      {"1_000", {}},
      {"sixteen", {}},
      {"\"\"", {}},
      {"16 17", {}},
      {"[16]", {}},
      {"!mine 16", {}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    int64_t value = 77;
    const std::string error = ReadValue(c.text, &value);
    EXPECT_EQ(value, c.value.value_or(77));
    EXPECT_THAT(error, c.value ? Eq("")
                               : testing::Matcher<std::string>(StartsWith(
                                     "f.yaml:2:6: key must be an integer, "
                                     "got ")));
  }
  int64_t value = 0;
  EXPECT_EQ(ReadValue("99999999999999999999", &value, "a step count"),
            "f.yaml:2:6: key must be a step count, got 99999999999999999999 "
            "(out of range)");
}

TEST(YamlMappingTest, ReadsNumbers) {
  struct Case {
    const char* text;
    std::optional<double> value;
  };
  const std::vector<Case> cases = {
      {"0.5", 0.5}, {".5", 0.5},      {"5.", 5.0},  {"1e-5", 1e-5},
      {"-2", -2.0}, {"\"32\"", 32.0}, {"0", 0.0},   {"0.0", 0.0},
      {".nan", {}}, {".inf", {}},     {"nan", {}},  {"1e999", {}},
      {"true", {}}, {"fast", {}},     {"00.5", {}}, {"[1.0]", {}},
      {"\"\"", {}}, {"1,5", {}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    double value = 77;
    const std::string error = ReadValue(c.text, &value);
    EXPECT_EQ(value, c.value.value_or(77));
    EXPECT_EQ(error.empty(), c.value.has_value()) << error;
  }
}

TEST(YamlMappingTest, ReadsStrings) {
  struct Case {
    const char* text;
    std::optional<std::string> value;
  };
  const std::vector<Case> cases = {
      {"adamw", "adamw"},
      {"\"16\"", "16"},
      {"'true'", "true"},
      {"\"\"", ""},
      {"'null'", "null"},
      {"!!str 16", "16"},
      {"2024-01-01", "2024-01-01"},
      {"inf", "inf"},
      {"y", "y"},
      {"|\n  two\n  lines\n", "two\nlines\n"},
      {"16", {}},
      {"1e3", {}},
      {"true", {}},
      {"off", {}},
      {".nan", {}},
      {"0x1F", {}},
      {"010", {}},
      {"[a]", {}},
      {"{a: b}", {}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    std::string value = "before";
    const std::string error = ReadValue(c.text, &value);
    EXPECT_EQ(value, c.value.value_or("before"));
    EXPECT_EQ(error.empty(), c.value.has_value()) << error;
  }
  std::string value;
  EXPECT_EQ(ReadValue("off", &value),
            "f.yaml:2:6: key must be a string, got off (quote it if it is "
            "text)");
}

TEST(YamlMappingTest, ReadsListsOfStrings) {
  struct Case {
    const char* text;
    std::vector<std::string> value;
    const char* error = "";
  };
  const std::vector<std::string> before = {"before"};
  const std::vector<Case> cases = {
      {"[to_q, to_k]", {"to_q", "to_k"}},
      {"\n  - to_q\n  - \"16\"\n", {"to_q", "16"}},
      {"[]", {}},
      {"to_q", {"to_q"}},
      {"16", before,
       "f.yaml:2:6: key must be a list of strings, got 16 (quote it if it is "
       "text)"},
      {"\"\"", before, "f.yaml:2:6: key must be a list of strings, got \"\""},
      {"{a: b}", before,
       "f.yaml:2:6: key must be a list of strings, got a mapping"},
      {"[to_q, \"\", on, null, [x]]", before,
       "f.yaml:2:13: key[1] must be a string that is not empty, got \"\"\n"
       "f.yaml:2:17: key[2] must be a string that is not empty, got on (quote "
       "it if it is text)\n"
       "f.yaml:2:21: key[3] must be a string that is not empty, got null\n"
       "f.yaml:2:27: key[4] must be a string that is not empty, got a list"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    std::vector<std::string> value = before;
    EXPECT_EQ(ReadValue(c.text, &value), c.error);
    EXPECT_EQ(value, c.value);
  }
}

enum class Color { kRed, kGreen };

TEST(YamlMappingTest, ReadsWordsThatStandForValues) {
  struct Case {
    const char* text;
    Color value;
    const char* error = "";
  };
  const std::vector<Case> cases = {
      {"red", Color::kRed},
      {"\"green\"", Color::kGreen},
      {"null", Color::kGreen},
      {"reed", Color::kGreen,
       "f.yaml:2:6: key must be red or green, got reed (did you mean red?)"},
      {"blue", Color::kGreen, "f.yaml:2:6: key must be red or green, got blue"},
      {"1", Color::kGreen, "f.yaml:2:6: key must be red or green, got 1"},
      {"[red]", Color::kGreen,
       "f.yaml:2:6: key must be red or green, got a list"},
  };
  const YamlWords<Color> words = {{"red", Color::kRed},
                                  {"green", Color::kGreen}};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Color value = Color::kGreen;
    EXPECT_EQ(ReadValue(c.text, &value, words), c.error);
    EXPECT_EQ(value, c.value);
  }
}

TEST(YamlMappingTest, ReadsListsOfIntegersAndRanges) {
  using Ranges = std::vector<std::pair<int64_t, int64_t>>;
  struct Case {
    const char* text;
    Ranges value;
    const char* error = "";
  };
  const Ranges before = {{7, 7}};
  const std::vector<Case> cases = {
      {"[0, 3, 8-11]", {{0, 0}, {3, 3}, {8, 11}}},
      {"\n  - 8-11\n  - '0-3'\n", {{8, 11}, {0, 3}}},
      {"5", {{5, 5}}},
      {"\"5\"", {{5, 5}}},
      {"16.0", {{16, 16}}},
      {"-5", {{-5, -5}}},
      {"0-0", {{0, 0}}},
      // Whether it makes sense is not for the reader to say.
      {"11-8", {{11, 8}}},
      {"0-9223372036854775807", {{0, 9223372036854775807}}},
      {"[]", {}},
      {"null", before},
      {"all", before,
       "f.yaml:2:6: key must be a list of integers and ranges, got all"},
      {"{a: 1}", before,
       "f.yaml:2:6: key must be a list of integers and ranges, got a mapping"},
      {"[1, 2.5, a-b, true, [3]]", before,
       "f.yaml:2:10: key[1] must be an integer or a range such as 8-11, got "
       "2.5\n"
       "f.yaml:2:15: key[2] must be an integer or a range such as 8-11, got "
       "a-b\n"
       "f.yaml:2:20: key[3] must be an integer or a range such as 8-11, got "
       "true\n"
       "f.yaml:2:26: key[4] must be an integer or a range such as 8-11, got a "
       "list"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Ranges value = before;
    EXPECT_EQ(ReadValue(c.text, &value), c.error);
    EXPECT_EQ(value, c.value);
  }
  for (const char* text :
       {"8-", "-11-8", "8--11", "8-11-12", "8 - 11", "8..11", "8:11", "08-11",
        "8-011", "1.0-2", "0x1-2", "0-9223372036854775808", "!mine 8-11",
        "!mine 8", "\"\"", "99999999999999999999"}) {
    SCOPED_TRACE(text);
    Ranges value = before;
    EXPECT_THAT(ReadValue(absl::StrCat("[", text, "]"), &value),
                HasSubstr("key[0] must be an integer or a range"));
    EXPECT_EQ(value, before);
  }
}

TEST(YamlMappingTest, ReadsNumbersByTextInOrder) {
  using Pairs = std::vector<std::pair<std::string, int64_t>>;
  struct Case {
    const char* text;
    Pairs value;
    const char* error = "";
  };
  const Pairs before = {{"before", 7}};
  const std::vector<Case> cases = {
      {"{z: 1, a: \"2\", '7': 3}", {{"z", 1}, {"a", 2}, {"7", 3}}},
      {"\n  a.b*[c]: 1\n", {{"a.b*[c]", 1}}},
      {"{}", {}},
      {"null", before},
      {"[z]", before, "f.yaml:2:6: key must be a mapping, got a list"},
      {"z", before, "f.yaml:2:6: key must be a mapping, got z"},
      {"{z: 1, a: x, b: ~, \"\": 1}", before,
       "f.yaml:2:16: key.a must be an integer, got x\n"
       "f.yaml:2:19: key.b must be an integer, got null\n"
       "f.yaml:2:25: a key of key must be text that is not empty, got \"\""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    Pairs value = before;
    EXPECT_EQ(ReadValue(c.text, &value), c.error);
    EXPECT_EQ(value, c.value);
  }
  std::vector<std::pair<std::string, double>> numbers;
  EXPECT_EQ(ReadValue("{a: 0.5, b: 1e3}", &numbers), "");
  EXPECT_THAT(numbers, ElementsAre(Pair("a", 0.5), Pair("b", 1000)));
}

TEST(YamlErrorsTest, NamesTheSourceOfAPosition) {
  YamlErrors errors("f.yaml");
  errors.AddSource(10, "first source");
  errors.AddSource(12, "second source");
  YAML::Mark mark;
  const auto at = [&](int line) {
    mark.line = line;
    return errors.Locate(mark, "wrong");
  };
  EXPECT_EQ(at(9), "f.yaml:10:1: wrong");
  EXPECT_EQ(at(10), "first source: wrong");
  EXPECT_EQ(at(11), "first source: wrong");
  EXPECT_EQ(at(12), "second source: wrong");
  EXPECT_EQ(errors.Locate(YAML::Mark::null_mark(), "wrong"), "f.yaml: wrong");
  EXPECT_EQ(YamlErrors("").Locate(YAML::Mark(), "wrong"), "wrong");
}

TEST(YamlErrorsTest, AMessageIsOneLineOfUtf8WhateverItQuotes) {
  YamlErrors errors("f.yaml");
  errors.AddSource(10, "override \"\xff\"");
  YAML::Mark mark;
  EXPECT_EQ(errors.Locate(mark, "a\nb \xc3\xa4"),
            "f.yaml:1:1: a\\x0ab \xc3\xa4");
  mark.line = 10;
  EXPECT_EQ(errors.Locate(mark, "\xc3"), "override \"\\xff\": \\xc3");
}

TEST(ParseYamlAtTest, StartsAtALineAndMayBeEmpty) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node node, ParseYamlAt(41, "[a,\n b]"));
  EXPECT_EQ(node[0].Mark().line, 41);
  EXPECT_EQ(node[1].Mark().line, 42);
  for (const char* text : {"", " ", "null", "~", "# comment"}) {
    SCOPED_TRACE(text);
    LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node null, ParseYamlAt(3, text));
    EXPECT_TRUE(null.IsNull());
  }
  EXPECT_THAT(ParseYamlAt(3, "{a: 1, a: 2}"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "the key \"a\" is given twice"));
}

TEST(YamlMappingTest, MissingAndNullLeaveTheDefault) {
  for (const char* text : {"other: 1", "key:", "key: null", "key: ~"}) {
    SCOPED_TRACE(text);
    LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root, ParseYaml(text, "f.yaml"));
    YamlErrors errors("f.yaml");
    YamlMapping mapping(root, "", &errors);
    bool boolean = true;
    int64_t integer = 7;
    std::optional<double> number;
    std::optional<std::string> string = "default";
    mapping.Read("key", &boolean);
    mapping.Read("key", &integer);
    mapping.Read("key", &number);
    mapping.Read("key", &string);
    EXPECT_TRUE(boolean);
    EXPECT_EQ(integer, 7);
    EXPECT_EQ(number, std::nullopt);
    EXPECT_EQ(string, "default");
    EXPECT_FALSE(mapping.Has("key"));
    EXPECT_FALSE(mapping.ReadMapping("key").Has("anything"));
    EXPECT_THAT(errors.ToStatus(), IsOk());
  }
}

TEST(YamlMappingTest, AbsentMappingHasNoFields) {
  YamlErrors errors("f.yaml");
  const YAML::Node root(YAML::NodeType::Map);
  YamlMapping mapping(root["absent"], "absent", &errors);
  EXPECT_THAT(mapping.entries(), IsEmpty());
  EXPECT_FALSE(mapping.ReadNode("key").IsDefined());
  mapping.Refuse("key", "there");
  EXPECT_THAT(errors.ToStatus(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f.yaml: absent.key must be there, got nothing"));
}

TEST(YamlMappingTest, CollectsAllErrorsInFileOrderWithTheirPath) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root, ParseYaml(R"(training:
  steps: many
  optimizer:
    learning_rate: fast
    betas: 0.9
  name: 7
)",
                                                             "train.yaml"));
  YamlErrors errors("train.yaml");
  YamlMapping training = YamlMapping(root, "", &errors).ReadMapping("training");
  std::string name;
  int64_t steps = 0;
  double learning_rate = 0;
  training.Read("name", &name);
  YamlMapping optimizer = training.ReadMapping("optimizer");
  optimizer.Read("learning_rate", &learning_rate, "a positive number");
  optimizer.RefuseUnknownKeys();
  training.Read("steps", &steps);
  training.ReadMapping("steps");
  training.Refuse("batch", "set");
  EXPECT_THAT(
      errors.ToStatus(),
      StatusIs(absl::StatusCode::kInvalidArgument,
               "train.yaml:2:3: training.batch must be set, got nothing\n"
               "train.yaml:2:10: training.steps must be an integer, got many\n"
               "train.yaml:2:10: training.steps must be a mapping, got many\n"
               "train.yaml:4:5: training.optimizer has unknown keys: betas; "
               "valid keys: learning_rate\n"
               "train.yaml:4:20: training.optimizer.learning_rate must be a "
               "positive number, got fast\n"
               "train.yaml:6:9: training.name must be a string, got 7 (quote "
               "it if it is text)"));
}

TEST(YamlMappingTest, NamesUnknownKeysSortedWithTheKeyThatWasMeant) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const YAML::Node root,
      ParseYaml("zeta: 1\nrnk: 2\nalpha: 3\nAlpah: 4\n", "f.yaml"));
  YamlErrors errors("f.yaml");
  YamlMapping mapping(root, "", &errors);
  int64_t value = 0;
  mapping.Read("rank", &value);
  mapping.Read("alpha", &value);
  EXPECT_THAT(mapping.UnknownKeys(), ElementsAre("Alpah", "rnk", "zeta"));
  EXPECT_EQ(mapping.DescribeUnknownKeys(),
            "f.yaml:1:1: the file has unknown keys: Alpah, rnk (did you mean "
            "rank?), zeta; valid keys: rank, alpha");
  EXPECT_THAT(errors.ToStatus(), IsOk());
}

TEST(YamlMappingTest, KnowsEveryDeclaredKey) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root,
                            ParseYaml("a: 1\nb: {}\nc: []\n", "f.yaml"));
  YamlErrors errors("f.yaml");
  YamlMapping mapping(root, "", &errors);
  std::optional<int64_t> a;
  mapping.Read("a", &a);
  mapping.ReadMapping("b");
  mapping.ReadNode("c");
  EXPECT_THAT(mapping.UnknownKeys(), IsEmpty());
  EXPECT_EQ(mapping.DescribeUnknownKeys(), "");
  mapping.RefuseUnknownKeys();
  EXPECT_THAT(errors.ToStatus(), IsOk());
}

TEST(YamlMappingTest, RefusesWhatIsNoMappingOfStrings) {
  struct Case {
    const char* text;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"[a]", "f.yaml:1:1: model must be a mapping, got a list"},
      {"text", "f.yaml:1:1: model must be a mapping, got text"},
      {"\"\"", "f.yaml:1:1: model must be a mapping, got \"\""},
      {"16: x", "f.yaml:1:1: a key of model must be a string, got 16"},
      {"on: x", "f.yaml:1:1: a key of model must be a string, got on"},
      {"~: x", "a key of model must be a string, got null"},
      {"? [a]\n: x", "a key of model must be a string, got a list"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.text);
    LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root,
                              ParseYaml(c.text, "f.yaml"));
    YamlErrors errors("f.yaml");
    YamlMapping mapping(root, "model", &errors);
    EXPECT_THAT(mapping.entries(), IsEmpty());
    EXPECT_THAT(errors.ToStatus(), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr(c.message)));
  }
}

// Nodes need not come from ParseYaml.
TEST(YamlMappingTest, RefusesDuplicateAndMergeKeysOfAForeignNode) {
  const YAML::Node root = YAML::Load("a: 1\na: 2\nb: 3\n<<: {c: 4}\n");
  YamlErrors errors("f.yaml");
  YamlMapping mapping(root, "model", &errors);
  EXPECT_THAT(errors.ToStatus(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "f.yaml:2:1: the key \"a\" is given twice, first on "
                       "line 1\n"
                       "f.yaml:4:1: model has a merge key (<<), which only "
                       "ParseYaml resolves"));
}

TEST(YamlMappingTest, ShortensAndEscapesTheValue) {
  bool value = false;
  EXPECT_THAT(ReadValue(std::string(100, 'x'), &value),
              AllOf(HasSubstr("got " + std::string(60, 'x') + "..."),
                    Not(HasSubstr(std::string(61, 'x')))));
  EXPECT_THAT(ReadValue("\"a\\nb\"", &value), HasSubstr("got \"a\\nb\""));
  // 59 bytes, then a character of three that must not be cut.
  EXPECT_THAT(ReadValue(std::string(59, 'x') + "世界", &value),
              HasSubstr("got " + std::string(59, 'x') + "..."));
}

TEST(YamlMappingTest, EntriesKeepTheOrderOfTheFile) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root,
                            ParseYaml("z: 1\na: 2\nm: 3\n", "f.yaml"));
  YamlErrors errors("f.yaml");
  std::vector<std::string> keys;
  const YamlMapping mapping(root, "", &errors);
  for (const YamlMapping::Entry& entry : mapping.entries()) {
    keys.push_back(entry.key);
  }
  EXPECT_THAT(keys, ElementsAre("z", "a", "m"));
}

}  // namespace
}  // namespace trainer_lora::config
