// Which modules a pattern selects. The input has lines: how it matches, as YAML
// has it (glob if it is no such word); the pattern; the name of a list of
// layers, or nothing for any; then the names of modules.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/lora_config.h"
#include "config/name_pattern.h"
#include "lora/target_matcher.h"
#include "re2/re2.h"
#include "tests/fuzz/fuzz_check.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::config::LoraConfig;
using ::trainer_lora::config::TargetMatching;
using ::trainer_lora::fuzz::IsLine;
using ::trainer_lora::fuzz::IsUtf8;

TargetMatching ParseMatching(absl::string_view word) {
  if (word == "substring") return TargetMatching::kSubstring;
  if (word == "exact") return TargetMatching::kExact;
  if (word == "suffix") return TargetMatching::kSuffix;
  if (word == "regex") return TargetMatching::kRegex;
  return TargetMatching::kGlob;
}

// --- Globs, without regular expressions --------------------------------------

// The characters of a text in UTF-8.
std::vector<std::string> Characters(absl::string_view text) {
  std::vector<std::string> characters;
  for (const char byte : text) {
    if ((byte & 0xC0) != 0x80) characters.emplace_back();
    characters.back() += byte;
  }
  return characters;
}

// What stands for one character of a name, or for any number of them.
struct GlobItem {
  bool is_star = false;
  bool is_negated = false;
  // The order of UTF-8 is that of the characters.
  std::vector<std::pair<std::string, std::string>> ranges;

  bool Has(const std::string& character) const {
    return is_negated !=
           std::any_of(ranges.begin(), ranges.end(), [&](const auto& range) {
             return range.first <= character && character <= range.second;
           });
  }
};

// The item for the set that opens at `begin`, which becomes the place of its ].
// Nothing if it is not closed or a range ends before it begins.
std::optional<GlobItem> ParseSet(const std::vector<std::string>& glob,
                                 size_t& begin) {
  GlobItem item;
  item.is_negated = begin + 1 < glob.size() && glob[begin + 1] == "!";
  const size_t first = begin + (item.is_negated ? 2 : 1);
  size_t end = first + 1;  // A ] that comes first is a member.
  while (end < glob.size() && glob[end] != "]") ++end;
  if (end >= glob.size()) return std::nullopt;
  for (size_t i = first; i < end; ++i) {
    const bool is_range = i + 2 < end && glob[i + 1] == "-";
    const std::string& last = glob[is_range ? i + 2 : i];
    if (last < glob[i]) return std::nullopt;
    item.ranges.emplace_back(glob[i], last);
    if (is_range) i += 2;
  }
  begin = end;
  return item;
}

std::optional<std::vector<GlobItem>> ParseGlob(
    const std::vector<std::string>& glob) {
  std::vector<GlobItem> items;
  for (size_t i = 0; i < glob.size(); ++i) {
    GlobItem item;
    if (glob[i] == "[") {
      const std::optional<GlobItem> set = ParseSet(glob, i);
      if (!set) return std::nullopt;
      item = *set;
    } else if (glob[i] == "*") {
      item.is_star = true;
    } else if (glob[i] == "?") {
      item.is_negated = true;
    } else {
      item.ranges = {{glob[i], glob[i]}};
    }
    items.push_back(std::move(item));
  }
  return items;
}

bool GlobMatches(const std::vector<GlobItem>& glob,
                 const std::vector<std::string>& name) {
  // Whether the items so far match the first characters of the name.
  std::vector<bool> matches(name.size() + 1, false);
  matches[0] = true;
  for (const GlobItem& item : glob) {
    std::vector<bool> next(name.size() + 1, false);
    for (size_t i = 0; i <= name.size(); ++i) {
      if (item.is_star) {
        next[i] = matches[i] || (i > 0 && next[i - 1]);
      } else if (i > 0) {
        next[i] = matches[i - 1] && item.Has(name[i - 1]);
      }
    }
    matches = std::move(next);
  }
  return matches.back();
}

// --- What the pattern is to match --------------------------------------------

class SlowPattern {
 public:
  SlowPattern(std::string text, TargetMatching matching)
      : text_(std::move(text)), matching_(matching) {}

  bool IsValid() const {
    if (text_.empty()) return false;
    if (matching_ == TargetMatching::kRegex) {
      return RE2(text_, RE2::Quiet).ok();
    }
    return matching_ != TargetMatching::kGlob ||
           (IsUtf8(text_) && ParseGlob(Characters(text_)).has_value());
  }

  // Of a valid pattern.
  bool Matches(const std::string& name) const {
    switch (matching_) {
      case TargetMatching::kSubstring:
        return name.find(text_) != name.npos;
      case TargetMatching::kExact:
        return name == text_;
      case TargetMatching::kSuffix:
        return absl::EndsWith("." + name, "." + text_);
      case TargetMatching::kGlob:
        return GlobMatches(*ParseGlob(Characters(text_)), Characters(name));
      case TargetMatching::kRegex:
        break;
    }
    RE2::Options options(RE2::Quiet);
    options.set_dot_nl(true);
    return RE2::FullMatch(name, RE2(text_, options));
  }

 private:
  const std::string text_;
  const TargetMatching matching_;
};

// The first number that stands after `list`, or after anything if it is empty.
std::optional<int64_t> SlowLayerIndex(const std::string& list,
                                      const std::string& name) {
  const std::vector<std::string> components = absl::StrSplit(name, '.');
  for (size_t i = 0; i < components.size(); ++i) {
    int64_t index = 0;
    if (components[i].find_first_not_of("0123456789") != std::string::npos ||
        !absl::SimpleAtoi(components[i], &index)) {
      continue;
    }
    const std::string before =
        absl::StrJoin(components.begin(), components.begin() + i, ".");
    if (list.empty() || absl::EndsWith("." + before, "." + list)) return index;
  }
  return std::nullopt;
}

// -----------------------------------------------------------------------------

void TestMatcher(const std::string& pattern, TargetMatching matching,
                 const std::string& list,
                 const std::vector<std::string>& names) {
  LoraConfig config;
  config.target_modules = {pattern};
  config.exclude_modules = {pattern};
  config.target_matching = matching;
  if (!list.empty()) config.layers_pattern = {list};

  const absl::StatusOr<TargetMatcher> matcher = TargetMatcher::Create(config);
  const SlowPattern slow(pattern, matching);
  FUZZ_CHECK(matcher.ok() == slow.IsValid()) << matcher.status();
  if (!matcher.ok()) {
    const absl::Status& status = matcher.status();
    FUZZ_CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
    FUZZ_CHECK(IsLine(status.message())) << status;
    return;
  }
  for (const std::string& name : names) {
    if (!IsUtf8(name)) continue;
    const bool expected = slow.Matches(name);
    FUZZ_CHECK(matcher->IsExcluded(name) == expected)
        << pattern << " on " << name;
    FUZZ_CHECK(matcher->MatchingTargets(name).size() ==
               (expected || pattern == kAllLinear ? 1 : 0))
        << pattern << " on " << name;
    FUZZ_CHECK(matcher->LayerIndex(name) == SlowLayerIndex(list, name))
        << list << " in " << name;
  }
}

}  // namespace
}  // namespace trainer_lora::lora

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace lora = ::trainer_lora::lora;
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> lines = absl::StrSplit(input, '\n');
  if (lines.size() < 4) return -1;  // Not worth keeping: it tests nothing.
  lora::TestMatcher(lines[1], lora::ParseMatching(lines[0]), lines[2],
                    {lines.begin() + 3, lines.end()});
  return 0;
}
