#include "lora/target_matcher.h"

#include <algorithm>

#include "config/internal/status_macros.h"

namespace trainer_lora::lora {

using ::trainer_lora::config::NamePattern;
using ::trainer_lora::config::TargetMatching;

const std::vector<std::string>& DefaultLoraTargetModules() {
  static const auto* const kTargets = new std::vector<std::string>{
      "q_proj", "k_proj", "v_proj", "o_proj", "to_q",
      "to_k",   "to_v",   "to_out", "to_qkv", "to_gate_compress"};
  return *kTargets;
}

absl::StatusOr<TargetMatcher> TargetMatcher::Create(
    const config::LoraConfig& config,
    const std::vector<std::string>& architecture_exclusions) {
  const bool has_targets =
      config.target_modules && !config.target_modules->empty();
  const TargetMatching target_matching =
      has_targets ? config.target_matching : TargetMatching::kSubstring;

  TargetMatcher matcher;
  for (const std::string& target :
       has_targets ? *config.target_modules : DefaultLoraTargetModules()) {
    if (std::find(matcher.targets_.begin(), matcher.targets_.end(), target) !=
        matcher.targets_.end()) {
      continue;
    }
    LORA_ASSIGN_OR_RETURN(NamePattern pattern,
                          target == kAllLinear
                              ? NamePattern::Create("*", TargetMatching::kGlob)
                              : NamePattern::Create(target, target_matching));
    matcher.targets_.push_back(target);
    matcher.target_patterns_.push_back(std::move(pattern));
  }
  const auto exclude = [&](const std::vector<std::string>& exclusions,
                           TargetMatching matching,
                           std::vector<NamePattern>& patterns) -> absl::Status {
    for (const std::string& exclusion : exclusions) {
      LORA_ASSIGN_OR_RETURN(NamePattern pattern,
                            NamePattern::Create(exclusion, matching));
      patterns.push_back(std::move(pattern));
    }
    return absl::OkStatus();
  };
  LORA_RETURN_IF_ERROR(exclude(config.exclude_modules, config.target_matching,
                               matcher.exclusions_));
  LORA_RETURN_IF_ERROR(exclude(architecture_exclusions,
                               TargetMatching::kSubstring,
                               matcher.architecture_exclusions_));
  return matcher;
}

std::vector<size_t> TargetMatcher::MatchingTargets(
    absl::string_view module_name) const {
  std::vector<size_t> matching;
  for (size_t i = 0; i < target_patterns_.size(); ++i) {
    if (target_patterns_[i].Matches(module_name)) matching.push_back(i);
  }
  return matching;
}

bool TargetMatcher::IsExcluded(absl::string_view module_name) const {
  const auto matches = [module_name](const NamePattern& exclusion) {
    return exclusion.Matches(module_name);
  };
  return std::any_of(exclusions_.begin(), exclusions_.end(), matches) ||
         std::any_of(architecture_exclusions_.begin(),
                     architecture_exclusions_.end(), matches);
}

}  // namespace trainer_lora::lora
