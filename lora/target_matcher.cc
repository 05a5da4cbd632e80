#include "lora/target_matcher.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::lora {
namespace {

absl::StatusOr<std::vector<std::string>> WithoutRepetitions(
    std::vector<std::string> patterns, absl::string_view kind) {
  std::vector<std::string> unique;
  for (std::string& pattern : patterns) {
    if (pattern.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("a LoRA ", kind,
                       " is an empty string, which would match every module: "
                       "remove it or write part of a module name"));
    }
    if (std::find(unique.begin(), unique.end(), pattern) == unique.end()) {
      unique.push_back(std::move(pattern));
    }
  }
  return unique;
}

}  // namespace

const std::vector<std::string>& DefaultLoraTargetModules() {
  static const auto* const kTargets = new std::vector<std::string>{
      "q_proj", "k_proj", "v_proj", "o_proj", "to_q",
      "to_k",   "to_v",   "to_out", "to_qkv", "to_gate_compress"};
  return *kTargets;
}

TargetMatcher::TargetMatcher(std::vector<std::string> targets,
                             std::vector<std::string> exclusions)
    : targets_(std::move(targets)), exclusions_(std::move(exclusions)) {}

absl::StatusOr<TargetMatcher> TargetMatcher::Create(
    std::vector<std::string> targets, std::vector<std::string> exclusions) {
  LORA_ASSIGN_OR_RETURN(targets,
                        WithoutRepetitions(std::move(targets), "target"));
  LORA_ASSIGN_OR_RETURN(exclusions,
                        WithoutRepetitions(std::move(exclusions), "exclusion"));
  if (targets.empty()) targets = DefaultLoraTargetModules();
  return TargetMatcher(std::move(targets), std::move(exclusions));
}

bool TargetMatcher::Selects(absl::string_view module_name) const {
  const auto matches = [module_name](const std::string& pattern) {
    return absl::StrContains(module_name, pattern);
  };
  return !module_name.empty() &&
         std::any_of(targets_.begin(), targets_.end(), matches) &&
         std::none_of(exclusions_.begin(), exclusions_.end(), matches);
}

std::vector<std::string> TargetMatcher::MatchingTargets(
    absl::string_view module_name) const {
  std::vector<std::string> matching;
  for (const std::string& target : targets_) {
    if (absl::StrContains(module_name, target)) matching.push_back(target);
  }
  return matching;
}

}  // namespace trainer_lora::lora
