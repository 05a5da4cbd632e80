#include "lora/target_matcher.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::lora {

using ::trainer_lora::config::LayerRange;
using ::trainer_lora::config::NamePattern;
using ::trainer_lora::config::TargetMatching;

namespace {

std::optional<int64_t> ParseIndex(absl::string_view component) {
  int64_t index = 0;
  if (std::all_of(component.begin(), component.end(), absl::ascii_isdigit) &&
      absl::SimpleAtoi(component, &index)) {
    return index;
  }
  return std::nullopt;
}

}  // namespace

const std::vector<std::string>& DefaultLoraTargetModules() {
  static const auto* const kTargets = new std::vector<std::string>{
      "q_proj", "k_proj", "v_proj", "o_proj", "to_q",
      "to_k",   "to_v",   "to_out", "to_qkv", "to_gate_compress"};
  return *kTargets;
}

std::optional<int64_t> LayerIndexAfter(const NamePattern& list,
                                       absl::string_view module_name) {
  size_t begin = 0;
  for (const absl::string_view component : absl::StrSplit(module_name, '.')) {
    const auto index = ParseIndex(component);
    if (index &&
        list.Matches(module_name.substr(0, begin == 0 ? 0 : begin - 1))) {
      return index;
    }
    begin += component.size() + 1;
  }
  return std::nullopt;
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
  if (config.layers_to_transform) {
    matcher.layer_ranges_ = *config.layers_to_transform;
  }
  for (const std::string& list : config.layers_pattern) {
    LORA_ASSIGN_OR_RETURN(NamePattern pattern,
                          NamePattern::Create(list, TargetMatching::kSuffix));
    matcher.layer_lists_.push_back(std::move(pattern));
  }
  if (matcher.layer_lists_.empty()) {
    LORA_ASSIGN_OR_RETURN(NamePattern any,
                          NamePattern::Create("*", TargetMatching::kGlob));
    matcher.layer_lists_.push_back(std::move(any));
  }
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

std::optional<int64_t> TargetMatcher::LayerIndex(
    absl::string_view module_name) const {
  for (const NamePattern& list : layer_lists_) {
    if (const auto index = LayerIndexAfter(list, module_name)) return index;
  }
  return std::nullopt;
}

bool TargetMatcher::IsInLayers(absl::string_view module_name) const {
  if (layer_ranges_.empty()) return true;
  const std::optional<int64_t> index = LayerIndex(module_name);
  return index && std::any_of(layer_ranges_.begin(), layer_ranges_.end(),
                              [&](const LayerRange& range) {
                                return range.first <= *index &&
                                       *index <= range.last;
                              });
}

}  // namespace trainer_lora::lora
