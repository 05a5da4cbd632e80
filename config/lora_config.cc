#include "config/lora_config.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/yaml_reader.h"

namespace trainer_lora::config {
namespace {

constexpr char kRank[] = "rank";
constexpr char kAlpha[] = "alpha";
constexpr char kTargetModules[] = "target_modules";

constexpr char kPositiveInteger[] = "a positive integer";
constexpr char kPositiveNumber[] = "a positive number";

constexpr int64_t kMaxRank = std::numeric_limits<int32_t>::max();

const Logger& GetLogger() {
  static const Logger& logger = *new Logger(InitLogger("config"));
  return logger;
}

// A field that an enabled config can't have: `key` must be `expected`.
struct Violation {
  std::string key;
  std::string expected;
  std::string actual;
};

// The one list of rules for values, whether from a file or from code.
std::vector<Violation> FindViolations(const LoraConfig& config) {
  std::vector<Violation> violations;
  if (!config.enable) return violations;
  if (!config.rank) {
    violations.push_back(
        {kRank, absl::StrCat(kPositiveInteger, " when enable is true"),
         "nothing"});
  } else if (*config.rank <= 0) {
    violations.push_back({kRank, kPositiveInteger, absl::StrCat(*config.rank)});
  } else if (*config.rank > kMaxRank) {
    violations.push_back({kRank, absl::StrCat("at most ", kMaxRank),
                          absl::StrCat(*config.rank)});
  }
  if (config.alpha && !(std::isfinite(*config.alpha) && *config.alpha > 0)) {
    violations.push_back(
        {kAlpha, kPositiveNumber, absl::StrCat(*config.alpha)});
  }
  if (config.target_modules &&
      std::count(config.target_modules->begin(), config.target_modules->end(),
                 "") > 0) {
    violations.push_back(
        {kTargetModules, "strings that are not empty", "an empty string"});
  }
  return violations;
}

void LogIgnoredRank(const LoraConfig& config, absl::string_view path) {
  if (config.enable || !config.rank) return;
  GetLogger().Info(absl::StrCat(
      path, ".rank=", *config.rank, " is set but ", path,
      ".enable is false: the rank is ignored and LoRA will NOT be applied"));
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

double LoraConfig::EffectiveAlpha() const {
  return alpha.value_or(static_cast<double>(rank.value_or(0)));
}

absl::Status LoraConfig::Validate() const {
  std::vector<std::string> messages;
  for (const Violation& violation : FindViolations(*this)) {
    messages.push_back(absl::StrCat("lora.", violation.key, " must be ",
                                    violation.expected, ", got ",
                                    violation.actual));
  }
  if (messages.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(messages, "\n"));
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
  LoraConfig config;
  YamlMapping lora(node, path, errors);
  lora.Read("enable", &config.enable);
  lora.Read(kRank, &config.rank, kPositiveInteger);
  lora.Read(kAlpha, &config.alpha, kPositiveNumber);
  lora.Read(kTargetModules, &config.target_modules);
  if (const std::string unknown = lora.DescribeUnknownKeys();
      !unknown.empty()) {
    GetLogger().Warning(absl::StrCat(unknown, " (ignored)"));
  }

  // Only on values that could be read: one error a field is enough.
  if (errors->size() == errors_before) {
    for (const Violation& violation : FindViolations(config)) {
      lora.Refuse(violation.key, violation.expected);
    }
  }
  if (errors->size() != errors_before) return std::nullopt;
  if (config.target_modules) RemoveDuplicates(&*config.target_modules);
  LogIgnoredRank(config, path);
  return config;
}

absl::StatusOr<std::optional<LoraConfig>> LoraConfig::Coerce(
    std::optional<LoraConfig> config) {
  if (config) {
    LORA_RETURN_IF_ERROR(config->Validate());
    LogIgnoredRank(*config, "lora");
  }
  return config;
}

}  // namespace trainer_lora::config
