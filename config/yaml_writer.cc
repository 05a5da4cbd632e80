#include "config/yaml_writer.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <locale>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "config/yaml_reader.h"
#include "yaml-cpp/null.h"

namespace trainer_lora::config {
namespace {

// YAML's parsers find a key only in front of a colon that is near.
constexpr size_t kMaxShortKeyBytes = 128;

// Whether the node is taken for one of this type of YAML's without its tag, if
// strings are quoted.
bool SaysType(const YAML::Node& node, absl::string_view type) {
  if (node.IsMap()) return type == "map";
  if (node.IsSequence()) return type == "seq";
  return type == "str" || type == "int" || type == "float" || type == "bool";
}

// A tag that has to be written: of an application, or a type such as !!binary.
std::string ForeignTag(const YAML::Node& node) {
  const std::string& tag = node.Tag();
  if (tag == "?" || tag == "!") return "";
  absl::string_view type = tag;
  const bool is_yaml_type = absl::ConsumePrefix(&type, "tag:yaml.org,2002:");
  return is_yaml_type && SaysType(node, type) ? "" : tag;
}

bool IsQuoted(const YAML::Node& scalar) {
  return scalar.Tag() == "!" || scalar.Tag() == "tag:yaml.org,2002:str";
}

// yaml-cpp quotes what it has to, but misses the marks between documents and
// Unicode's line breaks.
bool NeedsQuotes(const std::string& text) {
  return absl::StartsWith(text, "---") || absl::StartsWith(text, "...") ||
         !std::all_of(text.begin(), text.end(), absl::ascii_isprint);
}

// Lists of scalars and whatever is empty read best on one line.
bool FitsOneLine(const YAML::Node& node) {
  if (!node.IsSequence()) return node.IsMap() && node.size() == 0;
  return std::all_of(node.begin(), node.end(), [](const auto& element) {
    return element.IsScalar() || element.IsNull();
  });
}

void Write(const YAML::Node& node, YAML::Emitter* out) {
  if (const std::string tag = ForeignTag(node); !tag.empty()) {
    *out << YAML::VerbatimTag(tag);
  }
  if (FitsOneLine(node)) *out << YAML::Flow;
  switch (node.Type()) {
    case YAML::NodeType::Undefined:
    case YAML::NodeType::Null:
      *out << YAML::Null;
      return;
    case YAML::NodeType::Scalar:
      if (IsQuoted(node) || NeedsQuotes(node.Scalar())) {
        *out << YAML::DoubleQuoted;
      }
      *out << node.Scalar();
      return;
    case YAML::NodeType::Sequence:
      *out << YAML::BeginSeq;
      for (const auto& element : node) Write(element, out);
      *out << YAML::EndSeq;
      return;
    case YAML::NodeType::Map:
      *out << YAML::BeginMap;
      for (const auto& entry : node) {
        if (!entry.first.IsScalar() ||
            entry.first.Scalar().size() > kMaxShortKeyBytes) {
          *out << YAML::LongKey;
        }
        *out << YAML::Key;
        Write(entry.first, out);
        *out << YAML::Value;
        Write(entry.second, out);
      }
      *out << YAML::EndMap;
      return;
  }
}

}  // namespace

std::string WriteYaml(const YAML::Node& root) {
  YAML::Emitter out;
  Write(root, &out);
  return std::string(out.c_str(), out.size()) + "\n";
}

YAML::Node YamlString(absl::string_view text) {
  YAML::Node node{std::string(text)};
  if (!IsYamlString(node) || YAML::IsNullString(node.Scalar())) {
    node.SetTag("!");
  }
  return node;
}

YAML::Node YamlNumber(double number) {
  if (std::isnan(number)) return YAML::Node(".nan");
  if (std::isinf(number)) return YAML::Node(number < 0 ? "-.inf" : ".inf");
  // The fewest digits that give the number back.
  std::string text;
  for (int digits : {15, 16, 17}) {
    double read = 0;
    // Where a program has set a locale, printf() may write a comma.
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream << std::setprecision(digits) << number;
    text = stream.str();
    if (absl::SimpleAtod(text, &read) && read == number) break;
  }
  return YAML::Node(text);
}

bool SameYaml(const YAML::Node& a, const YAML::Node& b) {
  if (a.Type() != b.Type() || ForeignTag(a) != ForeignTag(b)) return false;
  if (a.IsScalar()) {
    return a.Scalar() == b.Scalar() && IsYamlString(a) == IsYamlString(b);
  }
  if (a.size() != b.size()) return false;
  auto other = b.begin();
  for (const auto& element : a) {
    if (a.IsSequence() ? !SameYaml(element, *other)
                       : !SameYaml(element.first, other->first) ||
                             !SameYaml(element.second, other->second)) {
      return false;
    }
    ++other;
  }
  return true;
}

YAML::Node WithField(const YAML::Node& mapping, absl::string_view key,
                     const YAML::Node& value) {
  YAML::Node copy(YAML::NodeType::Map);
  bool replaced = false;
  for (const auto& entry : mapping) {
    const bool is_key = entry.first.IsScalar() && entry.first.Scalar() == key;
    copy.force_insert(entry.first, is_key ? value : entry.second);
    replaced = replaced || is_key;
  }
  if (!replaced) copy.force_insert(YamlString(key), value);
  return copy;
}

}  // namespace trainer_lora::config
