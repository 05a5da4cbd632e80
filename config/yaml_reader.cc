#include "config/yaml_reader.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <sstream>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "yaml-cpp/depthguard.h"
#include "yaml-cpp/eventhandler.h"

namespace trainer_lora::config {
namespace {

// Aliases can nest deeper than the text does, and expand to more nodes than a
// file of kMaxYamlBytes can spell out.
constexpr int kMaxDepth = 1000;
constexpr int64_t kMaxNodes = kMaxYamlBytes;

constexpr char kMergeKey[] = "<<";

// --- Scalars ---------------------------------------------------------------

enum class ScalarStyle { kPlain, kQuoted, kUnknownTag };

ScalarStyle StyleOf(const YAML::Node& scalar) {
  const std::string& tag = scalar.Tag();
  if (tag.empty() || tag == "?" || tag == "tag:yaml.org,2002:int" ||
      tag == "tag:yaml.org,2002:float" || tag == "tag:yaml.org,2002:bool") {
    return ScalarStyle::kPlain;
  }
  if (tag == "!" || tag == "tag:yaml.org,2002:str") return ScalarStyle::kQuoted;
  return ScalarStyle::kUnknownTag;
}

bool IsPlain(const YAML::Node& node) {
  return node.IsScalar() && StyleOf(node) == ScalarStyle::kPlain;
}

bool IsMergeKey(const YAML::Node& key) {
  return IsPlain(key) && key.Scalar() == kMergeKey;
}

// The booleans of YAML 1.1, without y and n, which its readers disagree about.
std::optional<bool> ParseBool(const std::string& text) {
  for (const char* word :
       {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"}) {
    if (text == word) return true;
  }
  for (const char* word :
       {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"}) {
    if (text == word) return false;
  }
  return std::nullopt;
}

bool HasLeadingZero(absl::string_view number) {
  number = absl::StripLeadingAsciiWhitespace(number);
  if (absl::StartsWith(number, "-") || absl::StartsWith(number, "+")) {
    number.remove_prefix(1);
  }
  return number.size() > 1 && number[0] == '0' &&
         absl::ascii_isdigit(number[1]);
}

std::optional<double> ParseNumber(const std::string& text) {
  // SimpleAtod also takes inf, nan and hexadecimal digits.
  constexpr char kDecimal[] = "0123456789+-.eE \t";
  double value = 0;
  if (text.find_first_not_of(kDecimal) != std::string::npos ||
      !absl::SimpleAtod(text, &value) || !std::isfinite(value) ||
      HasLeadingZero(text)) {
    return std::nullopt;
  }
  return value;
}

// Whether an unquoted `text` is a number to YAML, even one not accepted here.
bool LooksLikeNumber(const std::string& text) {
  const std::string lower = absl::AsciiStrToLower(text);
  absl::string_view unsigned_text = lower;
  if (absl::StartsWith(unsigned_text, "-") ||
      absl::StartsWith(unsigned_text, "+")) {
    unsigned_text.remove_prefix(1);
  }
  if (unsigned_text == ".inf" || unsigned_text == ".nan") return true;
  double number = 0;
  uint64_t hexadecimal = 0;
  if (absl::StartsWith(unsigned_text, "0x")) {
    return absl::SimpleHexAtoi(unsigned_text, &hexadecimal);
  }
  // "inf" and "nan" are words.
  return std::any_of(lower.begin(), lower.end(), absl::ascii_isdigit) &&
         absl::SimpleAtod(lower, &number);
}

std::optional<double> NumberIn(const YAML::Node& node) {
  if (!node.IsScalar() || StyleOf(node) == ScalarStyle::kUnknownTag) {
    return std::nullopt;
  }
  return ParseNumber(node.Scalar());
}

bool IsIntegral(double number) { return number == std::trunc(number); }

std::optional<int64_t> IntegerIn(const YAML::Node& node) {
  const std::optional<double> number = NumberIn(node);
  if (!number || !IsIntegral(*number)) return std::nullopt;
  if (int64_t read = 0; absl::SimpleAtoi(node.Scalar(), &read)) return read;
  // Written as 16.0 or 1e3: exact only as far as a double is.
  constexpr double kMaxExact = int64_t{1} << 53;
  if (std::abs(*number) > kMaxExact) return std::nullopt;
  return static_cast<int64_t>(*number);
}

// An integer, which is a range of one, or a range such as 8-11.
std::optional<std::pair<int64_t, int64_t>> RangeIn(const YAML::Node& node) {
  if (const std::optional<int64_t> integer = IntegerIn(node)) {
    return std::make_pair(*integer, *integer);
  }
  if (!IsYamlString(node)) return std::nullopt;
  const auto parse = [](const std::string& text, int64_t* value) {
    return std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
           !HasLeadingZero(text) && absl::SimpleAtoi(text, value);
  };
  const std::vector<std::string> ends = absl::StrSplit(node.Scalar(), '-');
  std::pair<int64_t, int64_t> range;
  if (ends.size() != 2 || !parse(ends[0], &range.first) ||
      !parse(ends[1], &range.second)) {
    return std::nullopt;
  }
  return range;
}

// --- Messages --------------------------------------------------------------

// For where a string was expected: on means true, 16 is a number.
absl::string_view QuotingHint(const YAML::Node& node) {
  return IsPlain(node) ? " (quote it if it is text)" : "";
}

// `key`, with the known key that was meant.
std::string WithSuggestion(const std::string& key,
                           const std::vector<std::string>& known_keys) {
  return absl::StrCat(absl::Utf8SafeCEscape(Shorten(key)),
                      DidYouMean(key, known_keys));
}

// --- Mappings --------------------------------------------------------------

// yaml-cpp keeps both of two equal keys and finds the first.
void AddDuplicateKeys(const YAML::Node& mapping, YamlErrors* errors) {
  std::map<std::string, int> first_lines;
  for (const auto& entry : mapping) {
    if (!entry.first.IsScalar()) continue;
    const YAML::Mark mark = entry.first.Mark();
    const auto [first, is_new] =
        first_lines.emplace(entry.first.Scalar(), mark.line + 1);
    if (is_new) continue;
    std::string message =
        absl::StrCat("the key \"", absl::Utf8SafeCEscape(Shorten(first->first)),
                     "\" is given twice");
    if (errors->IsInFile(mark)) {
      absl::StrAppend(&message, ", first on line ", first->second);
    }
    errors->Add(mark, message);
  }
}

// Replaces merge keys, which yaml-cpp leaves alone, in a whole tree, and finds
// duplicate keys.
class TreeNormalizer {
 public:
  explicit TreeNormalizer(YamlErrors* errors) : errors_(errors) {}

  // The error is one that leaves no sense in going on; others are collected.
  absl::Status Visit(const YAML::Node& node, int depth = 0) {
    LORA_RETURN_IF_ERROR(Count(node.Mark()));
    if (depth > kMaxDepth) {
      return Fatal(node.Mark(),
                   "an alias contains itself, or aliases nest too deeply");
    }
    if (node.IsSequence()) {
      for (const auto& element : node) {
        LORA_RETURN_IF_ERROR(Visit(element, depth + 1));
      }
    }
    if (!node.IsMap()) return absl::OkStatus();

    YAML::Node merged(YAML::NodeType::Undefined);
    for (const auto& entry : node) {
      LORA_RETURN_IF_ERROR(Visit(entry.first, depth + 1));
      LORA_RETURN_IF_ERROR(Visit(entry.second, depth + 1));
      if (IsMergeKey(entry.first)) merged.reset(entry.second);
    }
    AddDuplicateKeys(node, errors_);
    if (!merged.IsDefined()) return absl::OkStatus();
    return Merge(merged, node);
  }

 private:
  absl::Status Fatal(const YAML::Mark& mark, absl::string_view message) const {
    return absl::InvalidArgumentError(errors_->Locate(mark, message));
  }

  absl::Status Count(const YAML::Mark& mark) {
    if (++nodes_ <= kMaxNodes) return absl::OkStatus();
    return Fatal(mark, "aliases expand to too many nodes");
  }

  // Adds to `mapping` what it lacks of `merged`, a mapping or a list of
  // mappings of which the first goes before the later.
  absl::Status Merge(const YAML::Node& merged, YAML::Node mapping) {
    std::vector<YAML::Node> sources;
    if (merged.IsSequence()) {
      for (const auto& source : merged) sources.push_back(source);
    } else {
      sources.push_back(merged);
    }
    mapping.remove(kMergeKey);
    std::set<std::string> keys;
    for (const auto& entry : mapping) {
      if (entry.first.IsScalar()) keys.insert(entry.first.Scalar());
    }
    for (const YAML::Node& source : sources) {
      if (!source.IsMap()) {
        errors_->Add(
            source.Mark(),
            absl::StrCat("the merge key << must be a mapping or a list of "
                         "mappings, got ",
                         DescribeYaml(source)));
        continue;
      }
      for (const auto& entry : source) {
        LORA_RETURN_IF_ERROR(Count(entry.first.Mark()));
        if (entry.first.IsScalar() &&
            !keys.insert(entry.first.Scalar()).second) {
          continue;
        }
        mapping.force_insert(entry.first, entry.second);
      }
    }
    return absl::OkStatus();
  }

  YamlErrors* errors_;
  int64_t nodes_ = 0;
};

// --- Text ------------------------------------------------------------------

// YAML text is UTF-8 without control characters. yaml-cpp would replace the
// first and take some of the second (U+0004) for the end of the file.
void AddBadCharacter(absl::string_view text, YamlErrors* errors) {
  YAML::Mark mark;
  while (!text.empty()) {
    const size_t size = Utf8CharacterSize(text);
    if (size == 0) {
      errors->Add(mark, "not UTF-8");
      return;
    }
    const unsigned char c = text[0];
    if (c == 0x7F || (c < 0x20 && c != '\t' && c != '\n' && c != '\r')) {
      errors->Add(mark, absl::StrFormat("control character U+%04X", c));
      return;
    }
    if (c == '\n') {
      ++mark.line;
      mark.column = 0;
    } else {
      ++mark.column;
    }
    text.remove_prefix(size);
  }
}

bool IsIndentedWithTab(const std::string& text, int line) {
  size_t begin = 0;
  for (; line > 0 && begin != std::string::npos; --line) {
    begin = text.find('\n', begin);
    if (begin != std::string::npos) ++begin;
  }
  if (begin == std::string::npos) return false;
  const size_t indent_end = text.find_first_not_of(" \t", begin);
  return absl::string_view(text)
             .substr(begin, indent_end == std::string::npos
                                ? std::string::npos
                                : indent_end - begin)
             .find('\t') != absl::string_view::npos;
}

// Notes where documents start, and nothing else.
class DocumentStarts : public YAML::EventHandler {
 public:
  const std::vector<YAML::Mark>& marks() const { return marks_; }

  void OnDocumentStart(const YAML::Mark& mark) override {
    marks_.push_back(mark);
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t,
                const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}

 private:
  std::vector<YAML::Mark> marks_;
};

// Whether more may follow `document`, the first in `text`. A mapping in block
// style that starts its line goes on up to a line that starts with one of these
// marks; parsing such a file a second time would double what it costs.
bool MayHaveSuccessor(const YAML::Node& document, const std::string& text) {
  const bool fills_lines = document.IsMap() && document.Mark().column == 0 &&
                           document.Style() == YAML::EmitterStyle::Block;
  if (!fills_lines) return true;
  int line = 0;
  for (absl::string_view rest : absl::StrSplit(text, '\n')) {
    const bool is_mark = absl::StartsWith(rest, "---") ||
                         absl::StartsWith(rest, "...") ||
                         absl::StartsWith(rest, "%");
    if (line++ > document.Mark().line && is_mark) return true;
  }
  return false;
}

// An error if `text` has a second document. YAML::LoadAll is of no use for
// that: it makes documents without end of some malformed text.
absl::Status CheckOneDocument(const std::string& text,
                              const YamlErrors& errors) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  DocumentStarts starts;
  if (parser.HandleNextDocument(starts)) parser.HandleNextDocument(starts);
  if (starts.marks().size() <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(errors.Locate(
      starts.marks()[1], "a second document starts here; there must be one"));
}

// The one document in `text`. yaml-cpp's exceptions end here, as errors.
absl::StatusOr<YAML::Node> TryLoadDocument(absl::string_view text,
                                           const YamlErrors& errors) {
  // With an explicit end, a quoted string that is never closed is an error to
  // yaml-cpp; it would take the end of the file for a quote.
  const std::string lines =
      absl::StrCat(text, absl::EndsWith(text, "\n") ? "" : "\n");
  const std::string terminated = absl::StrCat(lines, "...\n");
  try {
    YAML::Node document = YAML::Load(terminated);
    if (MayHaveSuccessor(document, lines)) {
      LORA_RETURN_IF_ERROR(CheckOneDocument(terminated, errors));
    }
    return document;
  } catch (const YAML::DeepRecursion& e) {
    return absl::InvalidArgumentError(
        errors.Locate(e.mark, "nested too deeply"));
  } catch (const YAML::Exception& e) {
    std::string message = absl::StrCat("not valid YAML: ", e.msg);
    if (e.msg == YAML::ErrorMsg::DOC_IN_SCALAR) {
      message = "not valid YAML: a quoted string is not closed";
    } else if (IsIndentedWithTab(terminated, e.mark.line)) {
      message += " (the line is indented with a tab; use spaces)";
    }
    return absl::InvalidArgumentError(errors.Locate(e.mark, message));
  }
}

// The one document in `text`, null if it is empty, with merge keys resolved.
absl::StatusOr<YAML::Node> ParseDocument(absl::string_view text,
                                         YamlErrors* errors) {
  AddBadCharacter(text, errors);
  LORA_RETURN_IF_ERROR(errors->ToStatus());
  LORA_ASSIGN_OR_RETURN(YAML::Node document, TryLoadDocument(text, *errors));
  LORA_RETURN_IF_ERROR(TreeNormalizer(errors).Visit(document));
  LORA_RETURN_IF_ERROR(errors->ToStatus());
  return document;
}

}  // namespace

absl::StatusOr<YAML::Node> ParseYaml(absl::string_view text,
                                     absl::string_view file) {
  YamlErrors errors(file);
  const auto refuse = [&](absl::string_view message) {
    return absl::InvalidArgumentError(
        errors.Locate(YAML::Mark::null_mark(), message));
  };
  if (text.size() > kMaxYamlBytes) {
    return refuse(
        absl::StrCat("the file is larger than ", kMaxYamlBytes >> 20, " MiB"));
  }
  LORA_ASSIGN_OR_RETURN(YAML::Node document, ParseDocument(text, &errors));
  if (document.IsNull()) return refuse("the file is empty");
  return document;
}

absl::StatusOr<YAML::Node> ParseYamlAt(int first_line, absl::string_view text) {
  YamlErrors errors("");
  // A node takes its position from the text, and there is no other way.
  return ParseDocument(absl::StrCat(std::string(first_line, '\n'), text),
                       &errors);
}

std::string DescribeYaml(const YAML::Node& node) {
  if (!node.IsDefined()) return "nothing";
  if (node.IsNull()) return "null";
  if (node.IsSequence()) return node.size() == 0 ? "an empty list" : "a list";
  if (node.IsMap()) return "a mapping";
  const std::string text = Shorten(node.Scalar());
  switch (StyleOf(node)) {
    case ScalarStyle::kPlain:
      return text;
    case ScalarStyle::kQuoted:
      return absl::StrCat("\"", absl::Utf8SafeCEscape(text), "\"");
    case ScalarStyle::kUnknownTag:
      break;
  }
  return absl::StrCat(Shorten(node.Tag()), " ", text);
}

bool IsYamlString(const YAML::Node& node) {
  if (!node.IsScalar()) return false;
  const ScalarStyle style = StyleOf(node);
  if (style != ScalarStyle::kPlain) return style == ScalarStyle::kQuoted;
  return !ParseBool(node.Scalar()) && !LooksLikeNumber(node.Scalar());
}

void YamlErrors::AddSource(int first_line, absl::string_view source) {
  sources_[first_line] = Printable(source);
}

bool YamlErrors::IsInFile(const YAML::Mark& mark) const {
  return !file_.empty() && !mark.is_null() && SourceOf(mark) == nullptr;
}

const std::string* YamlErrors::SourceOf(const YAML::Mark& mark) const {
  const auto after = sources_.upper_bound(mark.line);
  return after == sources_.begin() ? nullptr : &std::prev(after)->second;
}

void YamlErrors::Add(const YAML::Mark& mark, absl::string_view message) {
  errors_.push_back({mark, std::string(message)});
}

std::string YamlErrors::Locate(const YAML::Mark& mark,
                               absl::string_view message) const {
  const std::string line = Printable(message);
  if (const std::string* source = SourceOf(mark)) {
    return absl::StrCat(*source, ": ", line);
  }
  if (file_.empty()) return line;
  if (mark.is_null()) return absl::StrCat(file_, ": ", line);
  return absl::StrCat(file_, ":", mark.line + 1, ":", mark.column + 1, ": ",
                      line);
}

absl::Status YamlErrors::ToStatus() const {
  if (errors_.empty()) return absl::OkStatus();
  std::vector<Error> sorted = errors_;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Error& a, const Error& b) {
                     return std::tie(a.mark.line, a.mark.column) <
                            std::tie(b.mark.line, b.mark.column);
                   });
  std::vector<std::string> lines;
  for (const Error& error : sorted) {
    std::string line = Locate(error.mark, error.message);
    // What an alias names is read again for each alias.
    if (lines.empty() || lines.back() != line) lines.push_back(std::move(line));
  }
  return absl::InvalidArgumentError(absl::StrJoin(lines, "\n"));
}

YamlMapping::YamlMapping(const YAML::Node& node, absl::string_view path,
                         YamlErrors* errors)
    : path_(path), errors_(errors) {
  if (!node.IsDefined() || node.IsNull()) return;
  mark_ = node.Mark();
  if (!node.IsMap()) {
    AddError(node, PathOf(""), "a mapping");
    return;
  }
  AddDuplicateKeys(node, errors_);
  for (const auto& entry : node) {
    const YAML::Mark mark = entry.first.Mark();
    if (IsMergeKey(entry.first)) {
      errors_->Add(mark, absl::StrCat(PathOf(""),
                                      " has a merge key (<<), which only "
                                      "ParseYaml resolves"));
    } else if (!IsYamlString(entry.first)) {
      errors_->Add(
          mark, absl::StrCat("a key of ", PathOf(""), " must be a string, got ",
                             DescribeYaml(entry.first)));
    } else {
      // The first of two equal keys, which are an error, as everywhere.
      index_.emplace(entry.first.Scalar(), entries_.size());
      entries_.push_back({entry.first.Scalar(), mark, entry.second});
    }
  }
}

void YamlMapping::Read(absl::string_view key, bool* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  const std::optional<bool> read =
      IsPlain(*node) ? ParseBool(node->Scalar()) : std::nullopt;
  if (!read) return Refuse(key, expected);
  *value = *read;
}

void YamlMapping::Read(absl::string_view key, int64_t* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  if (const std::optional<int64_t> integer = IntegerIn(*node)) {
    *value = *integer;
    return;
  }
  const std::optional<double> number = NumberIn(*node);
  AddError(*node, PathOf(key), expected,
           number && IsIntegral(*number) ? " (out of range)" : "");
}

void YamlMapping::Read(absl::string_view key, double* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  const std::optional<double> number = NumberIn(*node);
  if (!number) return Refuse(key, expected);
  *value = *number;
}

void YamlMapping::Read(absl::string_view key, std::string* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  if (!IsYamlString(*node)) {
    return AddError(*node, PathOf(key), expected, QuotingHint(*node));
  }
  *value = node->Scalar();
}

void YamlMapping::Read(absl::string_view key, std::vector<std::string>* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  if (!node->IsSequence()) {
    if (!IsYamlString(*node) || node->Scalar().empty()) {
      return AddError(*node, PathOf(key), expected, QuotingHint(*node));
    }
    *value = {node->Scalar()};
    return;
  }
  std::vector<std::string> read;
  const size_t errors_before = errors_->size();
  for (size_t i = 0; i < node->size(); ++i) {
    const YAML::Node element = (*node)[i];
    if (IsYamlString(element) && !element.Scalar().empty()) {
      read.push_back(element.Scalar());
    } else {
      AddError(element, absl::StrCat(PathOf(key), "[", i, "]"),
               "a string that is not empty", QuotingHint(element));
    }
  }
  if (errors_->size() == errors_before) *value = std::move(read);
}

void YamlMapping::Read(absl::string_view key,
                       std::vector<std::pair<int64_t, int64_t>>* value,
                       absl::string_view expected) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return;
  if (!node->IsSequence()) {
    const auto range = RangeIn(*node);
    if (!range) return Refuse(key, expected);
    *value = {*range};
    return;
  }
  std::vector<std::pair<int64_t, int64_t>> read;
  const size_t errors_before = errors_->size();
  for (size_t i = 0; i < node->size(); ++i) {
    if (const auto range = RangeIn((*node)[i])) {
      read.push_back(*range);
    } else {
      RefuseElement(key, i, "an integer or a range such as 8-11");
    }
  }
  if (errors_->size() == errors_before) *value = std::move(read);
}

template <typename T>
void YamlMapping::ReadPairs(absl::string_view key,
                            std::vector<std::pair<std::string, T>>* value,
                            absl::string_view expected) {
  if (Value(key) == nullptr) return;
  const size_t errors_before = errors_->size();
  std::vector<std::pair<std::string, T>> read;
  YamlMapping pairs = ReadMapping(key);
  for (size_t i = 0; i < pairs.entries().size(); ++i) {
    const std::string& name = pairs.entries()[i].key;
    if (name.empty()) RefuseElementKey(key, i, "text that is not empty");
    if (!pairs.Has(name)) pairs.Refuse(name, expected);
    T element{};
    pairs.Read(name, &element, expected);
    read.emplace_back(name, element);
  }
  if (errors_->size() == errors_before) *value = std::move(read);
}

void YamlMapping::Read(absl::string_view key,
                       std::vector<std::pair<std::string, int64_t>>* value,
                       absl::string_view expected) {
  ReadPairs(key, value, expected);
}

void YamlMapping::Read(absl::string_view key,
                       std::vector<std::pair<std::string, double>>* value,
                       absl::string_view expected) {
  ReadPairs(key, value, expected);
}

std::optional<size_t> YamlMapping::ReadWord(
    absl::string_view key, const std::vector<std::string>& words) {
  const YAML::Node* node = Value(key);
  if (node == nullptr) return std::nullopt;
  if (IsYamlString(*node)) {
    const auto found = std::find(words.begin(), words.end(), node->Scalar());
    if (found != words.end()) return found - words.begin();
  }
  AddError(*node, PathOf(key), JoinAlternatives(words),
           node->IsScalar() ? DidYouMean(node->Scalar(), words) : "");
  return std::nullopt;
}

YamlMapping YamlMapping::ReadMapping(absl::string_view key) {
  return YamlMapping(ReadNode(key), PathOf(key), errors_);
}

YAML::Node YamlMapping::ReadNode(absl::string_view key) {
  Declare(key);
  const Entry* entry = Find(key);
  return entry == nullptr ? YAML::Node(YAML::NodeType::Undefined)
                          : entry->value;
}

bool YamlMapping::Has(absl::string_view key) const {
  const Entry* entry = Find(key);
  return entry != nullptr && !entry->value.IsNull();
}

void YamlMapping::Refuse(absl::string_view key, absl::string_view expected) {
  const Entry* entry = Find(key);
  if (entry == nullptr || entry->value.IsNull()) {
    // A null may have no place of its own in the file.
    errors_->Add(entry == nullptr ? mark_ : entry->mark,
                 absl::StrCat(PathOf(key), " must be ", expected, ", got ",
                              entry == nullptr ? "nothing" : "null"));
    return;
  }
  AddError(entry->value, PathOf(key), expected);
}

void YamlMapping::RefuseElement(absl::string_view key, size_t i,
                                absl::string_view expected,
                                absl::string_view remark) {
  const YAML::Node value = ReadNode(key);
  if (value.IsSequence()) {
    AddError(value[i], absl::StrCat(PathOf(key), "[", i, "]"), expected,
             remark);
  } else if (value.IsMap()) {
    const Entry& entry = ElementsOf(key).at(i);
    AddError(entry.value, absl::StrCat(PathOf(key), ".", entry.key), expected,
             remark);
  } else {
    AddError(value, PathOf(key), expected, remark);
  }
}

void YamlMapping::RefuseElementKey(absl::string_view key, size_t i,
                                   absl::string_view expected,
                                   absl::string_view remark) {
  const Entry& entry = ElementsOf(key).at(i);
  errors_->Add(
      entry.mark,
      absl::StrCat("a key of ", PathOf(key), " must be ", expected, ", got \"",
                   absl::Utf8SafeCEscape(Shorten(entry.key)), "\"", remark));
}

const std::vector<YamlMapping::Entry>& YamlMapping::ElementsOf(
    absl::string_view key) {
  const auto found = elements_.find(key);
  if (found != elements_.end()) return found->second;
  return elements_.emplace(key, ReadMapping(key).entries()).first->second;
}

std::vector<std::string> YamlMapping::UnknownKeys() const {
  std::set<std::string> unknown;
  for (const Entry& entry : entries_) {
    if (declared_.count(entry.key) == 0) unknown.insert(entry.key);
  }
  return {unknown.begin(), unknown.end()};
}

std::string YamlMapping::DescribeUnknownKeys() const {
  const std::string message = UnknownKeysMessage();
  return message.empty() ? "" : errors_->Locate(mark_, message);
}

void YamlMapping::RefuseUnknownKeys() {
  const std::string message = UnknownKeysMessage();
  if (!message.empty()) errors_->Add(mark_, message);
}

std::string YamlMapping::UnknownKeysMessage() const {
  std::vector<std::string> unknown = UnknownKeys();
  if (unknown.empty()) return "";
  for (std::string& key : unknown) key = WithSuggestion(key, known_keys_);
  return absl::StrCat(PathOf(""),
                      " has unknown keys: ", absl::StrJoin(unknown, ", "),
                      "; valid keys: ", absl::StrJoin(known_keys_, ", "));
}

void YamlMapping::Declare(absl::string_view key) {
  if (declared_.find(key) != declared_.end()) return;
  declared_.emplace(key);
  known_keys_.emplace_back(key);
}

const YamlMapping::Entry* YamlMapping::Find(absl::string_view key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const YAML::Node* YamlMapping::Value(absl::string_view key) {
  Declare(key);
  return Has(key) ? &Find(key)->value : nullptr;
}

std::string YamlMapping::PathOf(absl::string_view key) const {
  if (key.empty()) return path_.empty() ? "the file" : path_;
  if (path_.empty()) return std::string(key);
  return absl::StrCat(path_, ".", key);
}

void YamlMapping::AddError(const YAML::Node& value, absl::string_view path,
                           absl::string_view expected,
                           absl::string_view remark) {
  errors_->Add(value.Mark(), absl::StrCat(path, " must be ", expected, ", got ",
                                          DescribeYaml(value), remark));
}

}  // namespace trainer_lora::config
