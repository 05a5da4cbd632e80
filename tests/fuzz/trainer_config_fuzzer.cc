// A trainer's configuration. The input has lines: overrides, as of a command
// line; an empty line; the YAML file.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "config/name_pattern.h"
#include "config/trainer_config.h"
#include "config/yaml_reader.h"
#include "re2/re2.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_input.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using ::trainer_lora::fuzz::IsLine;

constexpr char kFile[] = "train.yaml";

// One problem a line, each with its place.
void CheckError(const absl::Status& status) {
  static const auto& place =
      *new RE2(R"((train\.yaml(:\d+:\d+)?|override ".*"): .+)");
  FUZZ_CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
  for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) {
    FUZZ_CHECK(IsLine(line) && RE2::FullMatch(std::string(line), place))
        << status;
  }
}

bool IsPositive(double number) { return std::isfinite(number) && number > 0; }

bool IsRank(int64_t rank) { return rank >= 1 && rank <= INT32_MAX; }

// Neither an empty one nor one twice.
void CheckNames(const std::vector<std::string>& names) {
  const std::set<std::string> set(names.begin(), names.end());
  FUZZ_CHECK(set.size() == names.size() && set.count("") == 0);
}

void CheckPattern(const std::string& pattern, TargetMatching matching) {
  const auto parsed = NamePattern::Create(pattern, matching);
  FUZZ_CHECK(parsed.ok()) << pattern << ": " << parsed.status();
}

void CheckLayers(const std::vector<LayerRange>& ranges) {
  FUZZ_CHECK(!ranges.empty());
  for (const LayerRange& range : ranges) {
    FUZZ_CHECK(0 <= range.first && range.first <= range.last);
  }
  for (size_t i = 1; i < ranges.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      FUZZ_CHECK(ranges[i].last < ranges[j].first ||
                 ranges[j].last < ranges[i].first);
    }
  }
}

// What LoraConfig says of its fields.
void CheckEnabled(const LoraConfig& lora) {
  FUZZ_CHECK(lora.rank.has_value() && IsRank(*lora.rank));
  FUZZ_CHECK(!lora.alpha || IsPositive(*lora.alpha));
  FUZZ_CHECK(IsPositive(lora.EffectiveAlpha()));
  for (const auto& [pattern, rank] : lora.rank_pattern) {
    CheckPattern(pattern, lora.target_matching);
    FUZZ_CHECK(IsRank(rank));
  }
  for (const auto& [pattern, alpha] : lora.alpha_pattern) {
    CheckPattern(pattern, lora.target_matching);
    FUZZ_CHECK(IsPositive(alpha));
  }
  if (lora.target_modules) {
    for (const std::string& target : *lora.target_modules) {
      CheckPattern(target, lora.target_matching);
    }
  }
  for (const std::string& exclusion : lora.exclude_modules) {
    CheckPattern(exclusion, lora.target_matching);
  }
  if (lora.layers_to_transform) CheckLayers(*lora.layers_to_transform);
  FUZZ_CHECK(lora.layers_pattern.empty() || lora.layers_to_transform);
  FUZZ_CHECK(lora.dropout >= 0 && lora.dropout < 1);
  FUZZ_CHECK(lora.seed >= 0);
  FUZZ_CHECK(!lora.loraplus_lr_ratio || IsPositive(*lora.loraplus_lr_ratio));
  FUZZ_CHECK(lora.Validate().ok()) << lora.Validate();
}

void CheckRole(const RoleConfig& role) {
  if (!role.lora) return;
  if (role.lora->target_modules) CheckNames(*role.lora->target_modules);
  CheckNames(role.lora->exclude_modules);
  CheckNames(role.lora->layers_pattern);
  if (!role.lora->enable) return;
  FUZZ_CHECK(role.trainable) << role.name;
  CheckEnabled(*role.lora);
}

int Depth(const YAML::Node& node) {
  int depth = 0;
  if (node.IsSequence()) {
    for (const auto& element : node) depth = std::max(depth, Depth(element));
  } else if (node.IsMap()) {
    for (const auto& entry : node) {
      depth = std::max({depth, Depth(entry.first), Depth(entry.second)});
    }
  }
  return depth + 1;
}

void CheckReadsBack(const TrainerConfig& config) {
  const std::string text = config.ToYaml();
  // What aliases and overrides make may be more than a file can spell out.
  constexpr int kMaxDepth = 200;
  if (text.size() > kMaxYamlBytes || Depth(config.root) > kMaxDepth) return;
  const auto again = TrainerConfig::Parse(text, kFile);
  FUZZ_CHECK(again.ok()) << again.status() << " in\n" << text;
  FUZZ_CHECK(*again == config) << text;
  FUZZ_CHECK(again->ToYaml() == text) << text << "becomes\n" << again->ToYaml();
  FUZZ_CHECK(again->models.size() == config.models.size());
  for (size_t i = 0; i < config.models.size(); ++i) {
    FUZZ_CHECK(again->models[i].name == config.models[i].name);
    FUZZ_CHECK(again->models[i].trainable == config.models[i].trainable);
    FUZZ_CHECK(again->models[i].lora == config.models[i].lora) << text;
  }
}

void TestConfig(absl::string_view file,
                const std::vector<std::string>& overrides) {
  const auto config = TrainerConfig::Parse(file, kFile, overrides);
  if (!config.ok()) return CheckError(config.status());
  FUZZ_CHECK(!config->models.empty());
  for (const RoleConfig& role : config->models) CheckRole(role);
  CheckReadsBack(*config);
}

void CheckLogLine(const LogRecord& record) {
  FUZZ_CHECK(IsLine(record.message)) << record.message;
}

}  // namespace
}  // namespace trainer_lora::config

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace config = ::trainer_lora::config;
  // Once: what is logged is checked instead.
  static const config::LogSink before =
      config::SetLogSink(config::CheckLogLine);
  absl::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> overrides =
      trainer_lora::fuzz::ConsumeLines(input);
  config::TestConfig(input, overrides);
  return 0;
}
