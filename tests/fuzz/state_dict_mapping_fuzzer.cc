// The rules of a configuration and the keys of a checkpoint. The input has
// lines: `pattern`, tab, `replacement`, tab, `part`, tab, `num_parts`, the last
// two in decimal digits or left out for each rule; an empty line; the keys.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "re2/re2.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_input.h"

namespace trainer_lora::distributed {
namespace {

using ::trainer_lora::fuzz::IsLine;

MappingRule ParseRule(absl::string_view line) {
  const std::vector<std::string> fields = absl::StrSplit(line, '\t');
  MappingRule rule;
  rule.pattern = fields[0];
  if (fields.size() > 1) rule.replacement = fields[1];
  if (fields.size() == 4 && (!absl::SimpleAtoi(fields[2], &rule.part) ||
                             !absl::SimpleAtoi(fields[3], &rule.num_parts))) {
    rule.part = -1;
  }
  return rule;
}

// `replacement` with its groups, spelled out one character at a time.
std::string Expand(absl::string_view replacement,
                   const std::vector<std::string>& groups) {
  std::string result;
  for (size_t i = 0; i < replacement.size(); ++i) {
    if (replacement[i] != '\\') {
      result += replacement[i];
      continue;
    }
    FUZZ_CHECK(++i < replacement.size()) << replacement;
    if (replacement[i] == '\\') {
      result += '\\';
      continue;
    }
    const size_t group = replacement[i] - '0';
    FUZZ_CHECK(group < groups.size()) << replacement;
    result += groups[group];
  }
  return result;
}

// What `pattern` and its groups, at most nine, match of all of `key`, which is
// group 0; nothing if it does not match.
std::vector<std::string> Groups(const RE2& pattern, const std::string& key) {
  std::array<std::string, 9> texts;
  std::array<RE2::Arg, 9> arguments;
  std::array<const RE2::Arg*, 9> pointers;
  for (size_t i = 0; i < texts.size(); ++i) {
    arguments[i] = RE2::Arg(&texts[i]);
    pointers[i] = &arguments[i];
  }
  const int count = std::min(pattern.NumberOfCapturingGroups(), 9);
  if (!RE2::FullMatchN(key, pattern, pointers.data(), count)) return {};
  std::vector<std::string> groups = {key};
  groups.insert(groups.end(), texts.begin(), texts.begin() + count);
  return groups;
}

// One rule after the other, each on its own.
MappedKey MapSlowly(const std::vector<MappingRule>& rules,
                    const std::vector<std::unique_ptr<RE2>>& patterns,
                    const std::string& key) {
  for (size_t i = 0; i < rules.size(); ++i) {
    const std::vector<std::string> groups = Groups(*patterns[i], key);
    if (groups.empty()) continue;
    return {Expand(rules[i].replacement, groups), rules[i].part,
            rules[i].num_parts};
  }
  return {key};
}

void TestMapping(const std::vector<MappingRule>& rules,
                 const std::vector<std::string>& keys) {
  const absl::StatusOr<StateDictMapping> mapping =
      StateDictMapping::Create(rules);
  if (!mapping.ok()) {
    const absl::Status& status = mapping.status();
    FUZZ_CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
    FUZZ_CHECK(IsLine(status.message())) << status;
    return;
  }
  std::vector<std::unique_ptr<RE2>> patterns;
  for (const MappingRule& rule : rules) {
    FUZZ_CHECK(!rule.pattern.empty() && !rule.replacement.empty());
    FUZZ_CHECK(0 <= rule.part && rule.part < rule.num_parts &&
               rule.num_parts <= kMaxParts)
        << rule.pattern;
    patterns.push_back(std::make_unique<RE2>(rule.pattern, RE2::Quiet));
    FUZZ_CHECK(patterns.back()->ok()) << rule.pattern;
  }
  for (const std::string& key : keys) {
    const MappedKey mapped = mapping->Map(key);
    const MappedKey expected = MapSlowly(rules, patterns, key);
    FUZZ_CHECK(mapped.name == expected.name && mapped.part == expected.part &&
               mapped.num_parts == expected.num_parts)
        << key << " leads to " << mapped.name << " instead of "
        << expected.name;
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using ::trainer_lora::distributed::MappingRule;
  absl::string_view input(reinterpret_cast<const char*>(data), size);
  std::vector<MappingRule> rules;
  for (const std::string& line : trainer_lora::fuzz::ConsumeLines(input)) {
    rules.push_back(trainer_lora::distributed::ParseRule(line));
  }
  trainer_lora::distributed::TestMapping(rules, absl::StrSplit(input, '\n'));
  return 0;
}
