#include "config/yaml_writer.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "config/yaml_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using testutil::IsOk;

TEST(WriteYamlTest, WritesWhatReadersLike) {
  LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root, ParseYaml(R"(
# A comment.
shared: &shared {z: 1, a: [x, 2]}
alias: *shared
merged: {<<: *shared, a: 3}
quoted: ['16', "true", plain, "null", '']
plain: [16, 1e3, on, .inf, .nan, 2024-01-01, a b]
empty: [[], {}, ~]
text: |
  two
  lines
tagged: [!!str 16, !!int "7", !custom x, !pair [a], !!binary aGk=, !!seq [a],
         !!omap [a], !!set {}, !!null ""]
? [complex, key]
: 1
)",
                                                             "f.yaml"));
  EXPECT_EQ(WriteYaml(root), R"(shared:
  z: 1
  a: [x, 2]
alias:
  z: 1
  a: [x, 2]
merged:
  a: 3
  z: 1
quoted: ["16", "true", plain, "null", ""]
plain: [16, 1e3, on, .inf, .nan, 2024-01-01, a b]
empty:
  - []
  - {}
  - ~
text: "two\nlines\n"
tagged:
  - "16"
  - 7
  - !<!custom> x
  - !<!pair> [a]
  - !<tag:yaml.org,2002:binary> aGk=
  - [a]
  - !<tag:yaml.org,2002:omap> [a]
  - !<tag:yaml.org,2002:set> {}
  - !<tag:yaml.org,2002:null> ""
? [complex, key]
: 1
)");
}

// --- Random trees ------------------------------------------------------------

class RandomTrees {
 public:
  explicit RandomTrees(int seed) : random_(seed) {}

  YAML::Node Tree(int depth) {
    // Shared nodes come from aliases.
    if (!nodes_.empty() && Below(8) == 0) return nodes_[Below(nodes_.size())];
    YAML::Node node = depth == 0 || Below(3) == 0 ? Scalar() : Branch(depth);
    nodes_.push_back(node);
    return node;
  }

  YAML::Node Branch(int depth) {
    const int size = Below(5);
    if (Below(2) == 0) {
      YAML::Node list(YAML::NodeType::Sequence);
      for (int i = 0; i < size; ++i) list.push_back(Tree(depth - 1));
      return list;
    }
    YAML::Node mapping(YAML::NodeType::Map);
    for (int i = 0; i < size; ++i) {
      // The number keeps keys apart.
      mapping.force_insert(YamlString(absl::StrCat(Text(), i)),
                           Tree(depth - 1));
    }
    return mapping;
  }

 private:
  size_t Below(size_t limit) { return random_() % limit; }

  YAML::Node Scalar() {
    YAML::Node node;
    switch (Below(5)) {
      case 0:
        return YAML::Node(YAML::NodeType::Null);
      case 1: {
        const std::vector<const char*> plain = {
            "true", "off", "16",   "-1", "1e3",   ".inf", "-.inf",
            ".nan", "010", "0x1F", "+5", "1_000", "12:30"};
        return YAML::Node(plain[Below(plain.size())]);
      }
      case 2:
        return YamlNumber(std::ldexp(static_cast<double>(random_()),
                                     static_cast<int>(Below(200)) - 100));
      case 3:
        node = YAML::Node(Text());
        node.SetTag("!");
        return node;
      default:
        return YamlString(Text());
    }
  }

  std::string Text() {
    const std::vector<const char*> parts = {
        "a",    "B7",     " ",      ":",      ": ",     "#",    " #",  "-",
        "- ",   "? ",     "[",      "]",      "{",      "}",    ",",   "&",
        "*",    "!",      "|",      ">",      "'",      "\"",   "\\",  "%",
        "@",    "`",      "\n",     "\t",     "é",      "世",   "😀",   "~",
        "null", "16",     "1.5",    "<<",     "=",      "yes",  "...", "---",
        "\r",   "\u00A0", "\u0085", "\u2028", "\uFEFF", "\n\n", "  "};
    std::string text;
    for (size_t i = Below(5); i > 0; --i) text += parts[Below(parts.size())];
    if (Below(50) == 0) text += std::string(2000, 'x');
    return text;
  }

  std::mt19937 random_;
  std::vector<YAML::Node> nodes_;
};

TEST(WriteYamlTest, RandomTreesAreReadBackTheSame) {
  for (int seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const YAML::Node root = RandomTrees(seed).Branch(5);
    const std::string text = WriteYaml(root);
    const absl::StatusOr<YAML::Node> read = ParseYaml(text, "f.yaml");
    ASSERT_THAT(read, IsOk()) << text;
    ASSERT_TRUE(SameYaml(*read, root)) << text << WriteYaml(*read);
    ASSERT_EQ(WriteYaml(*read), text);
  }
}

TEST(SameYamlTest, ComparesMeaningAndOrder) {
  struct Case {
    const char* a;
    const char* b;
    bool same;
  };
  const std::vector<Case> cases = {
      {"{a: 1}", "a: 1", true},
      {"[x]", "['x']", true},
      {"[16]", "['16']", false},
      {"[on]", "['on']", false},
      {"[16]", "[16.0]", false},
      {"[~]", "[null]", true},
      {"['']", "[null]", false},
      {"[!!str 16]", "['16']", true},
      {"[!x a]", "[a]", false},
      {"[!x a]", "[!y a]", false},
      {"[!!binary a]", "[a]", false},
      {"[!!map {}]", "[{}]", true},
      {"[!!set {}]", "[{}]", false},
      {"[a, b]", "[b, a]", false},
      {"[a, b]", "[a]", false},
      {"{a: 1, b: 2}", "{b: 2, a: 1}", false},
      {"{a: 1}", "{b: 1}", false},
      {"{a: 1}", "{'a': 1}", true},
      {"[]", "{}", false},
      {"a: &x [1]\nb: *x", "a: [1]\nb: [1]", true},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(absl::StrCat(c.a, " and ", c.b));
    EXPECT_EQ(SameYaml(YAML::Load(c.a), YAML::Load(c.b)), c.same);
    EXPECT_EQ(SameYaml(YAML::Load(c.b), YAML::Load(c.a)), c.same);
  }
}

TEST(YamlNumberTest, IsReadBackBitForBit) {
  for (const double number : {0.0, 1.0, 32.0, 0.1, 1.0 / 3, 1e-5, -2.5, 1e22,
                              5e-324, std::numeric_limits<double>::max()}) {
    YAML::Node node(YAML::NodeType::Map);
    node["key"] = YamlNumber(number);
    SCOPED_TRACE(WriteYaml(node));
    LORA_ASSERT_OK_AND_ASSIGN(const YAML::Node root,
                              ParseYaml(WriteYaml(node), "f.yaml"));
    YamlErrors errors("f.yaml");
    double read = 7;
    YamlMapping(root, "", &errors).Read("key", &read);
    EXPECT_THAT(errors.ToStatus(), IsOk());
    EXPECT_EQ(read, number);
  }
  EXPECT_EQ(YamlNumber(0.1).Scalar(), "0.1");
  EXPECT_EQ(YamlNumber(32).Scalar(), "32");
}

TEST(WithFieldTest, ReplacesInPlaceOrAppends) {
  const YAML::Node mapping = YAML::Load("{b: 1, a: 2}");
  EXPECT_TRUE(SameYaml(WithField(mapping, "b", YAML::Node(3)),
                       YAML::Load("{b: 3, a: 2}")));
  EXPECT_TRUE(SameYaml(WithField(mapping, "c", YAML::Node(3)),
                       YAML::Load("{b: 1, a: 2, c: 3}")));
  EXPECT_TRUE(SameYaml(WithField(YAML::Node(), "c", YAML::Node(3)),
                       YAML::Load("{c: 3}")));
  EXPECT_TRUE(SameYaml(mapping, YAML::Load("{b: 1, a: 2}")));
}

}  // namespace
}  // namespace trainer_lora::config
