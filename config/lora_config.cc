#include "config/lora_config.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/name_pattern.h"
#include "config/yaml_reader.h"
#include "config/yaml_writer.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

const Logger& GetLogger() {
  static const Logger& logger = *new Logger(InitLogger("config"));
  return logger;
}

// --- Rules -------------------------------------------------------------------
// Each returns what a value must be instead, or "" if it may be as it is.

constexpr char kBoolean[] = "true or false without quotes";
constexpr char kNames[] = "a list of strings";
constexpr char kPositiveInteger[] = "a positive integer";
constexpr char kPositiveNumber[] = "a positive number";
constexpr char kFraction[] = "a number from 0 to below 1";
constexpr char kNotNegative[] = "an integer from 0 on";
constexpr char kLayers[] = "a list of layers such as [0, 8-11]";

std::string RankRule(int64_t rank) {
  constexpr int64_t kMaxRank = std::numeric_limits<int32_t>::max();
  if (rank <= 0) return kPositiveInteger;
  if (rank > kMaxRank) return absl::StrCat("at most ", kMaxRank);
  return "";
}

std::string NeededRankRule(const std::optional<int64_t>& rank) {
  if (rank) return RankRule(*rank);
  return absl::StrCat(kPositiveInteger, " when enable is true");
}

std::string PositiveNumberRule(double number) {
  return std::isfinite(number) && number > 0 ? "" : kPositiveNumber;
}

std::string DropoutRule(double dropout) {
  return dropout >= 0 && dropout < 1 ? "" : kFraction;
}

std::string SeedRule(int64_t seed) { return seed >= 0 ? "" : kNotNegative; }

// By their first layer.
using DisjointRanges = std::map<int64_t, LayerRange>;

std::string LayerRangeRule(const LayerRange& range,
                           const DisjointRanges& others) {
  if (range.first < 0) return kNotNegative;
  if (range.first > range.last) return "a range from a lower to a higher layer";
  const auto after = others.upper_bound(range.last);
  if (after == others.begin()) return "";
  const LayerRange& before = std::prev(after)->second;
  if (before.last < range.first) return "";
  return absl::StrCat("apart from ", ToString(before),
                      ", which is there already");
}

// For fields whose type is all that matters.
struct NoRule {};

// For patterns, which keep to the syntax of target_matching.
struct PatternRule {};

// For ranges of layers, which are disjoint, and at least one.
struct LayersRule {};

// For a field that is of no use without another.
struct NeedsKey {
  const char* other;
};

// Why `pattern` can't be used, in words that follow it in a message; nothing if
// it can.
std::optional<std::string> SyntaxError(TargetMatching matching,
                                       const std::string& pattern) {
  const auto parsed = NamePattern::Create(pattern, matching);
  if (!parsed.ok()) return absl::StrCat(" (", parsed.status().message(), ")");
  return std::nullopt;
}

const char* SyntaxName(TargetMatching matching) {
  return matching == TargetMatching::kRegex ? "a regular expression" : "a glob";
}

// Refuses the values of one field that break its rule, and patterns that can't
// be used.
struct FieldChecker {
  const char* key;
  TargetMatching matching;
  YamlMapping* lora;

  template <typename V, typename Rule>
  void Check(const V& value, const Rule& rule) const {
    if (const std::string expected = rule(value); !expected.empty()) {
      lora->Refuse(key, expected);
    }
  }

  // Unset, a field keeps to any rule but one for unset values too.
  template <typename V, typename Rule>
  void Check(const std::optional<V>& value, const Rule& rule) const {
    if constexpr (std::is_invocable_v<Rule, std::optional<V>>) {
      if (const std::string expected = rule(value); !expected.empty()) {
        lora->Refuse(key, expected);
      }
    } else if (value) {
      Check(*value, rule);
    }
  }

  void Check(bool, NoRule) const {}

  void Check(const std::vector<std::string>& names,
             const NeedsKey& rule) const {
    if (names.empty() || lora->Has(rule.other)) return;
    lora->Refuse(key, absl::StrCat("left out without ", rule.other));
  }

  void Check(const std::vector<LayerRange>& ranges, LayersRule) const {
    if (ranges.empty()) {
      lora->Refuse(key, "left out (for all layers) or name at least one");
    }
    DisjointRanges accepted;
    for (size_t i = 0; i < ranges.size(); ++i) {
      if (const std::string expected = LayerRangeRule(ranges[i], accepted);
          expected.empty()) {
        accepted.emplace(ranges[i].first, ranges[i]);
      } else {
        lora->RefuseElement(key, i, expected);
      }
    }
  }

  void Check(const std::vector<std::string>& patterns, PatternRule) const {
    for (size_t i = 0; i < patterns.size(); ++i) {
      if (const auto error = SyntaxError(matching, patterns[i])) {
        lora->RefuseElement(key, i, SyntaxName(matching), *error);
      }
    }
  }

  template <typename V, typename Rule>
  void Check(const std::vector<std::pair<std::string, V>>& patterns,
             const Rule& rule) const {
    for (size_t i = 0; i < patterns.size(); ++i) {
      const auto& [pattern, value] = patterns[i];
      if (const auto error = SyntaxError(matching, pattern)) {
        lora->RefuseElementKey(key, i, SyntaxName(matching), *error);
      }
      if (const std::string expected = rule(value); !expected.empty()) {
        lora->RefuseElement(key, i, expected);
      }
    }
  }
};

// --- Values as YAML ----------------------------------------------------------

YAML::Node ToNode(bool value) { return YAML::Node(value); }
// YAML::Node would write an integer as the global locale does, such as 1,234.
YAML::Node ToNode(int64_t value) { return YAML::Node(absl::StrCat(value)); }
YAML::Node ToNode(double value) { return YamlNumber(value); }
YAML::Node ToNode(const std::string& value) { return YamlString(value); }

YAML::Node ToNode(const std::vector<std::string>& values) {
  YAML::Node list(YAML::NodeType::Sequence);
  for (const std::string& value : values) list.push_back(ToNode(value));
  return list;
}

YAML::Node ToNode(const std::vector<LayerRange>& ranges) {
  YAML::Node list(YAML::NodeType::Sequence);
  for (const LayerRange& range : ranges) {
    list.push_back(YAML::Node(ToString(range)));
  }
  return list;
}

template <typename V>
YAML::Node ToNode(const std::optional<V>& value) {
  return value ? ToNode(*value) : YAML::Node(YAML::NodeType::Undefined);
}

template <typename V>
YAML::Node ToNode(const std::vector<std::pair<std::string, V>>& pairs) {
  YAML::Node mapping(YAML::NodeType::Map);
  for (const auto& [key, value] : pairs) {
    mapping.force_insert(ToNode(key), ToNode(value));
  }
  return mapping;
}

template <typename T>
YAML::Node ToNode(T value, const YamlWords<T>& words) {
  for (const auto& [word, meaning] : words) {
    if (meaning == value) return YamlString(word);
  }
  return ToNode(static_cast<int64_t>(value));  // A cast made it: not valid.
}

// --- Fields ------------------------------------------------------------------

struct Field {
  const char* key;
  std::function<void(YamlMapping* lora, LoraConfig* config)> read;
  // Of an enabled config.
  std::function<void(const LoraConfig& config, YamlMapping* lora)> check;
  // Undefined for an unset value.
  std::function<YAML::Node(const LoraConfig& config)> write;
  std::function<bool(const LoraConfig& a, const LoraConfig& b)> equal;
};

template <typename T>
void ReadValue(const char* key, const char* expected, YamlMapping* lora,
               T* value) {
  lora->Read(key, value, expected);
}

void ReadValue(const char* key, const char* expected, YamlMapping* lora,
               std::optional<std::vector<LayerRange>>* value) {
  std::optional<std::vector<std::pair<int64_t, int64_t>>> ranges;
  lora->Read(key, &ranges, expected);
  if (!ranges) return;
  value->emplace();
  for (const auto& [first, last] : *ranges) (*value)->push_back({first, last});
}

// A field with a value (or a list or mapping of values) that must be `expected`
// and keep to `rule`.
template <typename T, typename Rule>
Field ValueField(const char* key, T LoraConfig::*member, const char* expected,
                 Rule rule) {
  return {key,
          [=](YamlMapping* lora, LoraConfig* config) {
            ReadValue(key, expected, lora, &(config->*member));
          },
          [=](const LoraConfig& config, YamlMapping* lora) {
            FieldChecker{key, config.target_matching, lora}.Check(
                config.*member, rule);
          },
          [=](const LoraConfig& config) { return ToNode(config.*member); },
          [=](const LoraConfig& a, const LoraConfig& b) {
            return a.*member == b.*member;
          }};
}

// A field with one of `words`.
template <typename T>
Field WordField(const char* key, T LoraConfig::*member,
                const YamlWords<T>& words) {
  return {
      key,
      [=](YamlMapping* lora, LoraConfig* config) {
        lora->Read(key, &(config->*member), words);
      },
      [](const LoraConfig&, YamlMapping*) {},
      [=](const LoraConfig& config) { return ToNode(config.*member, words); },
      [=](const LoraConfig& a, const LoraConfig& b) {
        return a.*member == b.*member;
      }};
}

// All that reading, checking, writing and comparing know of the fields.
const std::vector<Field>& Fields() {
  static const auto& fields = *new std::vector<Field>{
      ValueField("enable", &LoraConfig::enable, kBoolean, NoRule()),
      ValueField("rank", &LoraConfig::rank, kPositiveInteger, NeededRankRule),
      ValueField("alpha", &LoraConfig::alpha, kPositiveNumber,
                 PositiveNumberRule),
      ValueField("target_modules", &LoraConfig::target_modules, kNames,
                 PatternRule()),
      ValueField("exclude_modules", &LoraConfig::exclude_modules, kNames,
                 PatternRule()),
      WordField<TargetMatching>("target_matching", &LoraConfig::target_matching,
                                {{"substring", TargetMatching::kSubstring},
                                 {"exact", TargetMatching::kExact},
                                 {"suffix", TargetMatching::kSuffix},
                                 {"glob", TargetMatching::kGlob},
                                 {"regex", TargetMatching::kRegex}}),
      ValueField("layers_to_transform", &LoraConfig::layers_to_transform,
                 kLayers, LayersRule()),
      ValueField("layers_pattern", &LoraConfig::layers_pattern, kNames,
                 NeedsKey{"layers_to_transform"}),
      ValueField("rank_pattern", &LoraConfig::rank_pattern, kPositiveInteger,
                 RankRule),
      ValueField("alpha_pattern", &LoraConfig::alpha_pattern, kPositiveNumber,
                 PositiveNumberRule),
      ValueField("use_rslora", &LoraConfig::use_rslora, kBoolean, NoRule()),
      ValueField("use_dora", &LoraConfig::use_dora, kBoolean, NoRule()),
      ValueField("dropout", &LoraConfig::dropout, kFraction, DropoutRule),
      WordField<BiasTraining>("bias", &LoraConfig::bias,
                              {{"none", BiasTraining::kNone},
                               {"lora_only", BiasTraining::kLoraOnly},
                               {"all", BiasTraining::kAll}}),
      WordField<AdapterDtype>("adapter_dtype", &LoraConfig::adapter_dtype,
                              {{"base", AdapterDtype::kBase},
                               {"float32", AdapterDtype::kFloat32},
                               {"bfloat16", AdapterDtype::kBFloat16},
                               {"float16", AdapterDtype::kFloat16}}),
      WordField<AdapterInitialization>(
          "initialization", &LoraConfig::initialization,
          {{"default", AdapterInitialization::kDefault},
           {"gaussian", AdapterInitialization::kGaussian},
           {"pissa", AdapterInitialization::kPissa},
           {"olora", AdapterInitialization::kOlora}}),
      ValueField("seed", &LoraConfig::seed, kNotNegative, SeedRule),
      ValueField("loraplus_lr_ratio", &LoraConfig::loraplus_lr_ratio,
                 kPositiveNumber, PositiveNumberRule),
  };
  return fields;
}

// Reads all fields, then checks those that could be read.
LoraConfig ReadFields(YamlMapping* lora, YamlErrors* errors) {
  LoraConfig config;
  std::vector<const Field*> read;
  for (const Field& field : Fields()) {
    const size_t errors_before = errors->size();
    field.read(lora, &config);
    if (errors->size() == errors_before) read.push_back(&field);
  }
  if (!config.enable) return config;
  for (const Field* field : read) {
    field->check(config, lora);
  }
  return config;
}

void LogIgnoredRank(const LoraConfig& config, absl::string_view path) {
  if (config.enable || !config.rank) return;
  GetLogger().Info(absl::StrCat(
      path, ".rank=", *config.rank, " is set but ", path,
      ".enable is false: the rank is ignored and LoRA will NOT be applied"));
}

// Most likely the inverse of what was meant.
void WarnOfSlowLoraB(const LoraConfig& config, absl::string_view path) {
  if (!config.enable || config.loraplus_lr_ratio.value_or(1) >= 1) return;
  GetLogger().Warning(absl::StrCat(
      path, ".loraplus_lr_ratio=", *config.loraplus_lr_ratio,
      " makes lora_B learn slower than lora_A; LoRA+ is for ratios above 1"));
}

void RemoveDuplicates(std::vector<std::string>* names) {
  std::set<std::string> seen;
  names->erase(std::remove_if(names->begin(), names->end(),
                              [&](const std::string& name) {
                                return !seen.insert(name).second;
                              }),
               names->end());
}

}  // namespace

std::string ToString(const LayerRange& range) {
  if (range.first == range.last) return absl::StrCat(range.first);
  return absl::StrCat(range.first, "-", range.last);
}

double LoraConfig::EffectiveAlpha() const {
  return alpha.value_or(static_cast<double>(rank.value_or(0)));
}

absl::Status LoraConfig::Validate() const {
  if (!enable) return absl::OkStatus();
  // What can't be read back isn't valid: the rules are in one place.
  YamlErrors errors("");
  YamlMapping lora(ToYaml(), "lora", &errors);
  ReadFields(&lora, &errors);
  return errors.ToStatus();
}

YAML::Node LoraConfig::ToYaml() const {
  YAML::Node lora(YAML::NodeType::Map);
  for (const Field& field : Fields()) {
    if (const YAML::Node value = field.write(*this); value.IsDefined()) {
      lora.force_insert(YamlString(field.key), value);
    }
  }
  return lora;
}

bool operator==(const LoraConfig& a, const LoraConfig& b) {
  return std::all_of(Fields().begin(), Fields().end(),
                     [&](const Field& field) { return field.equal(a, b); });
}

absl::StatusOr<std::optional<LoraConfig>> LoraConfig::Coerce(
    const YAML::Node& node, absl::string_view file, absl::string_view path) {
  YamlErrors errors(file);
  std::optional<LoraConfig> config = Coerce(node, path, &errors);
  LORA_RETURN_IF_ERROR(errors.ToStatus());
  return config;
}

std::optional<LoraConfig> LoraConfig::Coerce(const YAML::Node& node,
                                             absl::string_view path,
                                             YamlErrors* errors) {
  if (!node.IsDefined() || node.IsNull()) return std::nullopt;
  const size_t errors_before = errors->size();
  YamlMapping lora(node, path, errors);
  LoraConfig config = ReadFields(&lora, errors);
  if (const std::string unknown = lora.DescribeUnknownKeys();
      !unknown.empty()) {
    GetLogger().Warning(absl::StrCat(unknown, " (ignored)"));
  }
  if (errors->size() != errors_before) return std::nullopt;
  if (config.target_modules) RemoveDuplicates(&*config.target_modules);
  RemoveDuplicates(&config.exclude_modules);
  RemoveDuplicates(&config.layers_pattern);
  LogIgnoredRank(config, path);
  WarnOfSlowLoraB(config, path);
  return config;
}

absl::StatusOr<std::optional<LoraConfig>> LoraConfig::Coerce(
    std::optional<LoraConfig> config) {
  if (config) {
    LORA_RETURN_IF_ERROR(config->Validate());
    LogIgnoredRank(*config, "lora");
    WarnOfSlowLoraB(*config, "lora");
  }
  return config;
}

}  // namespace trainer_lora::config
