#include "config/yaml_overrides.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "config/yaml_writer.h"

namespace trainer_lora::config {
namespace {

// As deep as a file may be nested, roughly.
constexpr size_t kMaxPathParts = 400;
constexpr size_t kMaxMessageBytes = 200;

// A node of this text at this position. yaml-cpp has no other way to give a
// node its position.
YAML::Node NodeAt(int line, int column, const std::string& text) {
  return YAML::Load(
      absl::StrCat(std::string(line, '\n'), std::string(column, ' '), text));
}

// `text` as a quoted YAML scalar.
std::string Quoted(const std::string& text) {
  return absl::StrCat(
      "\"",
      absl::StrReplaceAll(
          text, {{"\\", "\\\\"}, {"\"", "\\\""}, {"\n", "\\n"}, {"\r", "\\r"}}),
      "\"");
}

bool IsKey(const YAML::Node& key, const std::string& text) {
  return key.IsScalar() && key.Scalar() == text;
}

// One override, whose nodes are on lines from `first_line` on.
class Override {
 public:
  static absl::StatusOr<Override> Parse(const std::string& text,
                                        int first_line) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) {
      return absl::InvalidArgumentError(
          "there is no =: an override is a path of keys, = and a value, such "
          "as models.student.lora.rank=16");
    }
    Override result;
    result.first_line_ = first_line;
    result.path_ = absl::StrSplit(text.substr(0, equals), '.');
    if (std::count(result.path_.begin(), result.path_.end(), "") > 0) {
      return absl::InvalidArgumentError(equals == 0
                                            ? "the path before the = is empty"
                                            : "a part of the path is empty");
    }
    if (result.path_.size() > kMaxPathParts) {
      return absl::InvalidArgumentError("the path has too many parts");
    }
    for (const std::string& part : result.path_) {
      LORA_ASSIGN_OR_RETURN(result.keys_.emplace_back(),
                            ParseYamlAt(first_line, Quoted(part)));
    }
    LORA_ASSIGN_OR_RETURN(result.value_,
                          ParseYamlAt(first_line, text.substr(equals + 1)));
    return result;
  }

  absl::StatusOr<YAML::Node> Apply(const YAML::Node& root,
                                   absl::string_view closed_mapping) const {
    return With(root, 0, closed_mapping);
  }

 private:
  // `node`, which the first `depth` parts of the path lead to, with the value.
  absl::StatusOr<YAML::Node> With(const YAML::Node& node, size_t depth,
                                  absl::string_view closed_mapping) const {
    if (depth == path_.size()) return value_;
    const bool is_missing = !node.IsDefined() || node.IsNull();
    if (!is_missing && !node.IsMap()) return NoMapping(node, depth);

    YAML::Node copy =
        is_missing ? NodeAt(first_line_, 0, "{}") : EmptyLike(node);
    const bool is_last = depth + 1 == path_.size();
    bool found = false;
    for (const auto& entry : node) {
      if (!IsKey(entry.first, path_[depth])) {
        copy.force_insert(entry.first, entry.second);
        continue;
      }
      found = true;
      LORA_ASSIGN_OR_RETURN(const YAML::Node value,
                            With(entry.second, depth + 1, closed_mapping));
      // A null is known by the position of its key.
      copy.force_insert(is_last ? Key(depth, entry.first.Tag()) : entry.first,
                        value);
    }
    if (found) return copy;
    if (depth == 1 && path_[0] == closed_mapping) return NoSuchKey(node);
    LORA_ASSIGN_OR_RETURN(
        const YAML::Node value,
        With(YAML::Node(YAML::NodeType::Undefined), depth + 1, closed_mapping));
    copy.force_insert(Key(depth, YamlString(path_[depth]).Tag()), value);
    return copy;
  }

  static YAML::Node EmptyLike(const YAML::Node& mapping) {
    const YAML::Mark mark = mapping.Mark();
    // A mapping that was made in code has no position.
    YAML::Node empty = mark.is_null() ? YAML::Node(YAML::NodeType::Map)
                                      : NodeAt(mark.line, mark.column, "{}");
    empty.SetTag(mapping.Tag());
    return empty;
  }

  // The key of the path, at the override's position.
  YAML::Node Key(size_t depth, const std::string& tag) const {
    YAML::Node key = keys_[depth];
    key.SetTag(tag);
    return key;
  }

  absl::Status NoMapping(const YAML::Node& node, size_t depth) const {
    const std::string path =
        Printable(absl::StrJoin(path_.begin(), path_.begin() + depth, "."));
    if (node.IsSequence()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, " is a list: replace the list as a whole, ", path, "=[...]"));
    }
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has no keys: it is ", Printable(DescribeYaml(node))));
  }

  absl::Status NoSuchKey(const YAML::Node& node) const {
    const std::string& key = path_[1];
    std::vector<std::string> known;
    for (const auto& entry : node) {
      if (entry.first.IsScalar()) known.push_back(entry.first.Scalar());
    }
    return absl::InvalidArgumentError(Printable(absl::StrCat(
        path_[0], " has no ", key, DidYouMean(key, known), "; it has ",
        known.empty() ? "nothing" : absl::StrJoin(known, ", "))));
  }

  int first_line_ = 0;
  std::vector<std::string> path_;
  std::vector<YAML::Node> keys_;  // The parts of the path, as nodes.
  YAML::Node value_;
};

}  // namespace

YAML::Node ApplyOverrides(const YAML::Node& root,
                          const std::vector<std::string>& overrides,
                          int file_lines, absl::string_view closed_mapping,
                          YamlErrors* errors) {
  YAML::Node result = root;
  int line = file_lines;
  for (const std::string& text : overrides) {
    YAML::Mark mark;
    mark.line = line;
    errors->AddSource(
        line,
        absl::StrCat("override \"",
                     absl::Utf8SafeCEscape(Shorten(text, kMaxMessageBytes)),
                     "\""));
    absl::StatusOr<Override> parsed = Override::Parse(text, line);
    absl::StatusOr<YAML::Node> applied =
        parsed.ok() ? parsed->Apply(result, closed_mapping) : parsed.status();
    if (applied.ok()) {
      result.reset(*applied);
    } else {
      // One problem a line.
      for (const absl::string_view problem :
           absl::StrSplit(applied.status().message(), '\n')) {
        errors->Add(mark, problem);
      }
    }
    line += 1 + std::count(text.begin(), text.end(), '\n');
  }
  return result;
}

}  // namespace trainer_lora::config
