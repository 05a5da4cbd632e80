// Reads the mappings of a YAML file field by field and collects every problem,
// each with its place and the full name of the key, instead of stopping at the
// first or guessing:
//
//   absl::StatusOr<YAML::Node> root = ParseYaml(text, "train.yaml");
//   if (!root.ok()) return root.status();
//   YamlErrors errors("train.yaml");
//   double learning_rate = 1e-4;
//   std::optional<int64_t> steps;
//   YamlMapping optimizer((*root)["optimizer"], "optimizer", &errors);
//   optimizer.Read("learning_rate", &learning_rate, "a positive number");
//   optimizer.Read("steps", &steps);
//   if (learning_rate <= 0) {
//     optimizer.Refuse("learning_rate", "a positive number");
//   }
//   optimizer.RefuseUnknownKeys();
//   return errors.ToStatus();
//
// gives, for instance,
//
//   train.yaml:3:18: optimizer.learning_rate must be a positive number, got
//   fast
#ifndef TRAINER_LORA_CONFIG_YAML_READER_H_
#define TRAINER_LORA_CONFIG_YAML_READER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {

// The largest file that is parsed: yaml-cpp needs about 100 times its size in
// memory.
inline constexpr int64_t kMaxYamlBytes = 4 << 20;

// Parses one document; `file` is the name in messages. In the result merge keys
// (`<<`) are replaced by what they merge, a key of the mapping itself going
// before, and no mapping has a key twice.
// kInvalidArgument, with file, line and column, for what is not one document of
// valid YAML in UTF-8, for an empty one, for duplicate keys (all of them), more
// than kMaxYamlBytes, nesting of 500 levels, and aliases that contain
// themselves or expand to millions of nodes.
absl::StatusOr<YAML::Node> ParseYaml(absl::string_view text,
                                     absl::string_view file);

// Parses a value that isn't part of a file, such as one of a command line, by
// the same rules, but that it may be empty: null. The positions of its nodes
// start at `first_line`, counted from 0. Errors name no position.
absl::StatusOr<YAML::Node> ParseYamlAt(int first_line, absl::string_view text);

// Whether a node is text: a scalar that is quoted, or neither a number nor a
// boolean.
bool IsYamlString(const YAML::Node& node);

// What messages call a value: 16, "text", null, a list, an empty list, ...
std::string DescribeYaml(const YAML::Node& node);

// Words of a file and the values that they stand for.
template <typename T>
using YamlWords = std::vector<std::pair<const char*, T>>;

// The problems found in one file. Not thread-safe.
class YamlErrors {
 public:
  // Without a name of a file, messages have no position.
  explicit YamlErrors(absl::string_view file) : file_(file) {}

  // Makes the lines from `first_line` on, counted from 0 and past those of the
  // file and of earlier sources, belong to `source` instead of the file: to
  // what ParseYamlAt parsed.
  void AddSource(int first_line, absl::string_view source);

  // Adds a problem at a position; Locate() says how its line begins.
  void Add(const YAML::Mark& mark, absl::string_view message);

  // The message, on one line whatever it quotes, after "file:line:column: ", or
  // "file: " without a position; after "source: " for a line that belongs to a
  // source.
  std::string Locate(const YAML::Mark& mark, absl::string_view message) const;

  // Whether messages about the position have a line of the file.
  bool IsInFile(const YAML::Mark& mark) const;

  // The number of problems so far.
  size_t size() const { return errors_.size(); }

  // Ok without errors; otherwise kInvalidArgument with one line an error, in
  // the order of the file.
  absl::Status ToStatus() const;

 private:
  struct Error {
    YAML::Mark mark;
    std::string message;
  };

  // The source that the position belongs to, null if it is the file.
  const std::string* SourceOf(const YAML::Mark& mark) const;

  std::string file_;
  std::map<int, std::string> sources_;  // By their first line.
  std::vector<Error> errors_;
};

// One mapping whose fields are read by name. A field that is missing or null
// leaves its variable as it is, and so does one with an error. Not thread-safe.
class YamlMapping {
 public:
  // A field.
  struct Entry {
    // The name of the field, without that of the mapping.
    std::string key;
    // Where the key is.
    YAML::Mark mark;
    // Any node, null included; shares its tree with the others.
    YAML::Node value;
  };

  // `node` may be undefined or null: a mapping without fields. Anything else
  // but a mapping with string keys is an error. `path` is the name of the
  // mapping in messages, "" for the root. `errors` must outlive this object.
  YamlMapping(const YAML::Node& node, absl::string_view path,
              YamlErrors* errors);

  // This and those below each read one field; `expected` completes "<field>
  // must be …" when the value is of another type.
  //
  // A boolean: true, false, and YAML 1.1's yes, no, on, off, unquoted.
  void Read(absl::string_view key, bool* value,
            absl::string_view expected = "true or false without quotes");
  // An integer: decimal, may be quoted, and also written as 16.0 or 1e3. Not
  // accepted: 010 (8 to some readers of YAML, 10 to others).
  void Read(absl::string_view key, int64_t* value,
            absl::string_view expected = "an integer");
  // A finite number: decimal, may be quoted. Not accepted: .inf and .nan.
  void Read(absl::string_view key, double* value,
            absl::string_view expected = "a number");
  // A string; an unquoted number or boolean isn't one.
  void Read(absl::string_view key, std::string* value,
            absl::string_view expected = "a string");
  // A list of strings that aren't empty, or such a string alone.
  void Read(absl::string_view key, std::vector<std::string>* value,
            absl::string_view expected = "a list of strings");
  // A list of integers and of ranges of them such as 8-11, or one of these
  // alone: the first and the last integer of each, whichever is larger. An
  // integer may be negative, the ends of a range may not.
  void Read(absl::string_view key,
            std::vector<std::pair<int64_t, int64_t>>* value,
            absl::string_view expected = "a list of integers and ranges");
  // A mapping from text that isn't empty to integers, in the order of the file;
  // `expected` is what each integer must be.
  void Read(absl::string_view key,
            std::vector<std::pair<std::string, int64_t>>* value,
            absl::string_view expected = "an integer");
  // The same of finite numbers.
  void Read(absl::string_view key,
            std::vector<std::pair<std::string, double>>* value,
            absl::string_view expected = "a number");
  // One of several words that each stand for a value.
  template <typename T>
  void Read(absl::string_view key, T* value, const YamlWords<T>& words) {
    std::vector<std::string> names;
    for (const auto& word : words) names.push_back(word.first);
    if (const std::optional<size_t> i = ReadWord(key, names)) {
      *value = words[*i].second;
    }
  }
  // A field of one of these types for a variable that may stay unset, with what
  // that type takes for `expected`.
  template <typename T, typename... Expected>
  void Read(absl::string_view key, std::optional<T>* value,
            Expected... expected) {
    if (!Has(key)) {
      Declare(key);
      return;
    }
    T read = value->value_or(T());
    const size_t errors_before = errors_->size();
    Read(key, &read, expected...);
    if (errors_->size() == errors_before) *value = std::move(read);
  }

  // The mapping under `key`, empty if there is none.
  YamlMapping ReadMapping(absl::string_view key);

  // The node under `key`, undefined if there is none.
  YAML::Node ReadNode(absl::string_view key);

  // Whether the key is there with a value that isn't null.
  bool Has(absl::string_view key) const;

  // Adds the error "<path>.<key> must be <expected>, got <value>".
  void Refuse(absl::string_view key, absl::string_view expected);

  // The same about element `i` of the list or the mapping under `key`, or about
  // its only value if it is neither; `remark` comes last.
  void RefuseElement(absl::string_view key, size_t i,
                     absl::string_view expected, absl::string_view remark = "");
  // The same about the key of element `i` of the mapping under `key`.
  void RefuseElementKey(absl::string_view key, size_t i,
                        absl::string_view expected,
                        absl::string_view remark = "");

  // The keys that nothing read so far, sorted.
  std::vector<std::string> UnknownKeys() const;

  // One line that names place, unknown keys (with the known key that each may
  // be meant for) and known keys; empty if there is no unknown key. For callers
  // that warn.
  std::string DescribeUnknownKeys() const;

  // Makes that line an error.
  void RefuseUnknownKeys();

  // All fields in the order of the file.
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void Declare(absl::string_view key);
  const Entry* Find(absl::string_view key) const;
  // Declares `key`; its value, or null if the field is to be left as it is.
  const YAML::Node* Value(absl::string_view key);
  // The index of the word that the field has.
  std::optional<size_t> ReadWord(absl::string_view key,
                                 const std::vector<std::string>& words);
  template <typename T>
  void ReadPairs(absl::string_view key,
                 std::vector<std::pair<std::string, T>>* value,
                 absl::string_view expected);
  // The fields of the mapping under `key`.
  const std::vector<Entry>& ElementsOf(absl::string_view key);
  std::string PathOf(absl::string_view key) const;
  std::string UnknownKeysMessage() const;
  void AddError(const YAML::Node& value, absl::string_view path,
                absl::string_view expected, absl::string_view remark = "");

  std::string path_;
  YAML::Mark mark_ = YAML::Mark::null_mark();
  YamlErrors* errors_;
  std::vector<Entry> entries_;
  std::map<std::string, size_t, std::less<>> index_;  // Into entries_.
  std::vector<std::string> known_keys_;  // In the order of their first use.
  std::set<std::string, std::less<>> declared_;  // The same keys.
  // Of mappings with elements that were refused.
  std::map<std::string, std::vector<Entry>, std::less<>> elements_;
};

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_YAML_READER_H_
