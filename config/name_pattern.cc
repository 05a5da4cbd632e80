#include "config/name_pattern.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "re2/re2.h"

namespace trainer_lora::config {
namespace {

// The position of the ] that closes the set which opens at `begin`; npos
// without one. A ] right after [ or [! is a member of the set.
size_t EndOfSet(absl::string_view glob, size_t begin) {
  size_t first = begin + 1;
  if (first < glob.size() && glob[first] == '!') ++first;
  return glob.find(']', first + 1);
}

absl::StatusOr<std::string> RegexOfGlob(absl::string_view glob) {
  std::string regex;
  for (size_t i = 0; i < glob.size(); ++i) {
    switch (glob[i]) {
      case '*':
        regex += ".*";
        break;
      case '?':
        regex += ".";
        break;
      case '[': {
        const size_t end = EndOfSet(glob, i);
        if (end == absl::string_view::npos) {
          return absl::InvalidArgumentError("a [ is not closed");
        }
        absl::string_view set = glob.substr(i + 1, end - i - 1);
        regex += "[";
        if (absl::StartsWith(set, "!")) {
          regex += "^";
          set.remove_prefix(1);
        }
        for (const char c : set) {  // the - of a range keeps its meaning
          regex += c == '-' ? "-" : RE2::QuoteMeta(std::string(1, c));
        }
        regex += "]";
        i = end;
        break;
      }
      default:
        regex += RE2::QuoteMeta(std::string(1, glob[i]));
    }
  }
  return regex;
}

absl::StatusOr<std::shared_ptr<const RE2>> Compile(const std::string& regex) {
  RE2::Options options(RE2::Quiet);
  options.set_dot_nl(true);
  auto compiled = std::make_shared<const RE2>(regex, options);
  if (!compiled->ok()) {
    return absl::InvalidArgumentError(Printable(compiled->error()));
  }
  return compiled;
}

}  // namespace

absl::StatusOr<NamePattern> NamePattern::Create(absl::string_view text,
                                                TargetMatching matching) {
  if (text.empty()) {
    return absl::InvalidArgumentError(
        "a pattern is an empty string: remove it, or write (part of) the name "
        "of a module");
  }
  NamePattern pattern(text, matching);
  if (matching != TargetMatching::kGlob && matching != TargetMatching::kRegex) {
    return pattern;
  }
  std::string regex(text);
  if (matching == TargetMatching::kGlob) {
    LORA_ASSIGN_OR_RETURN(regex, RegexOfGlob(text));
  }
  LORA_ASSIGN_OR_RETURN(pattern.regex_, Compile(regex));
  return pattern;
}

bool NamePattern::Matches(absl::string_view name) const {
  switch (matching_) {
    case TargetMatching::kSubstring:
      return absl::StrContains(name, text_);
    case TargetMatching::kExact:
      return name == text_;
    case TargetMatching::kSuffix:
      return absl::EndsWith(name, text_) &&
             (name.size() == text_.size() ||
              name[name.size() - text_.size() - 1] == '.');
    case TargetMatching::kGlob:
    case TargetMatching::kRegex:
      break;
  }
  return RE2::FullMatch(re2::StringPiece(name.data(), name.size()), *regex_);
}

}  // namespace trainer_lora::config
