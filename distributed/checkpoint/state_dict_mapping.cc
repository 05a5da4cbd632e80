#include "distributed/checkpoint/state_dict_mapping.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "re2/re2.h"
#include "re2/set.h"
#include "re2/stringpiece.h"

namespace trainer_lora::distributed {
namespace {

using ::trainer_lora::config::Printable;

// \0 to \9.
constexpr int kMaxGroups = 10;

// For the automaton of all patterns together; RE2's default is for one.
constexpr int64_t kSetMemory = 64 << 20;

// A rule that is known to be good.
struct CompiledRule {
  std::unique_ptr<const RE2> pattern;
  MappingRule rule;
};

absl::StatusOr<CompiledRule> Compile(MappingRule rule, size_t number) {
  // Quiet: the status carries the error, RE2 need not log it too.
  auto pattern = std::make_unique<const RE2>(rule.pattern, RE2::Quiet);
  const auto error = [&](const auto&... what) {
    return absl::InvalidArgumentError(
        absl::StrCat("mapping rule ", number, " (\"", Printable(rule.pattern),
                     "\"): ", what...));
  };
  if (rule.pattern.empty()) return error("the pattern is empty");
  if (rule.replacement.empty()) return error("the replacement is empty");
  if (!pattern->ok()) {
    return error("the pattern is not a regular expression: ",
                 Printable(pattern->error()));
  }
  std::string replacement_error;
  if (!pattern->CheckRewriteString(rule.replacement, &replacement_error)) {
    return error("the replacement does not fit the pattern: ",
                 replacement_error);
  }
  if (rule.part < 0 || rule.part >= rule.num_parts) {
    return error("there is no part ", rule.part, " of ", rule.num_parts,
                 ": parts count from 0");
  }
  if (rule.num_parts > kMaxParts) {
    return error("a tensor has ", kMaxParts, " parts at most, not ",
                 rule.num_parts);
  }
  return CompiledRule{std::move(pattern), std::move(rule)};
}

}  // namespace

class StateDictMapping::Rules {
 public:
  static absl::StatusOr<std::shared_ptr<const Rules>> Create(
      std::vector<MappingRule> rules) {
    auto result = std::make_shared<Rules>();
    for (MappingRule& rule : rules) {
      LORA_ASSIGN_OR_RETURN(
          CompiledRule compiled,
          Compile(std::move(rule), result->rules_.size() + 1));
      result->rules_.push_back(std::move(compiled));
    }
    result->set_ = MakeSet(result->rules_);
    return result;
  }

  // The first rule that matches `key`, or nullptr.
  const CompiledRule* Find(re2::StringPiece key) const {
    if (set_ != nullptr) {
      std::vector<int> matching;
      RE2::Set::ErrorInfo error;
      if (set_->Match(key, &matching, &error)) {
        return &rules_[*std::min_element(matching.begin(), matching.end())];
      }
      if (error.kind == RE2::Set::kNoError) return nullptr;
    }
    // The set has run out of memory. A single pattern can do with less.
    for (const CompiledRule& rule : rules_) {
      if (RE2::FullMatch(key, *rule.pattern)) return &rule;
    }
    return nullptr;
  }

 private:
  // All patterns as one automaton, or nullptr if they are too large for it.
  static std::unique_ptr<const RE2::Set> MakeSet(
      const std::vector<CompiledRule>& rules) {
    RE2::Options options(RE2::Quiet);
    options.set_max_mem(kSetMemory);
    auto set = std::make_unique<RE2::Set>(options, RE2::ANCHOR_BOTH);
    for (const CompiledRule& rule : rules) {
      if (set->Add(rule.rule.pattern, nullptr) < 0) return nullptr;
    }
    return set->Compile() ? std::move(set) : nullptr;
  }

  std::vector<CompiledRule> rules_;
  std::unique_ptr<const RE2::Set> set_;
};

StateDictMapping::StateDictMapping(std::shared_ptr<const Rules> rules)
    : rules_(std::move(rules)) {}

absl::StatusOr<StateDictMapping> StateDictMapping::Create(
    std::vector<MappingRule> rules) {
  if (rules.empty()) return StateDictMapping();
  LORA_ASSIGN_OR_RETURN(std::shared_ptr<const Rules> compiled,
                        Rules::Create(std::move(rules)));
  return StateDictMapping(std::move(compiled));
}

MappedKey StateDictMapping::Map(absl::string_view key) const {
  const re2::StringPiece text(key.data(), key.size());
  const CompiledRule* const found =
      rules_ == nullptr ? nullptr : rules_->Find(text);
  if (found == nullptr) return {std::string(key)};
  const MappingRule& rule = found->rule;
  std::array<re2::StringPiece, kMaxGroups> groups;
  const int num_groups = 1 + RE2::MaxSubmatch(rule.replacement);
  MappedKey mapped = {"", rule.part, rule.num_parts};
  found->pattern->Match(text, 0, text.size(), RE2::ANCHOR_BOTH, groups.data(),
                        num_groups);
  found->pattern->Rewrite(&mapped.name, rule.replacement, groups.data(),
                          num_groups);
  return mapped;
}

}  // namespace trainer_lora::distributed
