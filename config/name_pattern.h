// A pattern for the full, dotted names of modules, as LoRA targets, exclusions
// and the patterns for ranks are:
//
//   absl::StatusOr<NamePattern> pattern =
//       NamePattern::Create("blocks.*.to_q", TargetMatching::kGlob);
//   if (!pattern.ok()) return pattern.status();
//   pattern->Matches("blocks.0.attn.to_q");  // true
#ifndef TRAINER_LORA_CONFIG_NAME_PATTERN_H_
#define TRAINER_LORA_CONFIG_NAME_PATTERN_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace re2 {
class RE2;
}  // namespace re2

namespace trainer_lora::config {

// How targets, exclusions and patterns match the full, dotted name of a module,
// such as blocks.0.attn.to_q. Letter case counts.
enum class TargetMatching {
  // A part of the name: to_q also matches blocks.0.to_query.
  kSubstring,
  // The whole name.
  kExact,
  // The whole name, or its end after a dot: to_q matches blocks.0.attn.to_q.
  kSuffix,
  // The whole name; * stands for any text, dots included, ? for one character,
  // [abc], [a-c] and [!abc] for one of a set or outside it.
  kGlob,
  // The whole name, as a regular expression in RE2's syntax.
  kRegex,
};

// An immutable pattern, for names in UTF-8; cheap to copy, safe to share
// between threads. Matching takes time linear in the name, whatever the
// pattern.
class NamePattern {
 public:
  // kInvalidArgument, with the reason, for an empty pattern, which would match
  // everything or nothing, a glob with an unclosed [ or a range that ends
  // before it begins, and whatever RE2 refuses, such as text that is not UTF-8.
  static absl::StatusOr<NamePattern> Create(absl::string_view text,
                                            TargetMatching matching);

  // Whether it matches `name`, as its TargetMatching says. Takes time linear in
  // the name, whatever the pattern.
  bool Matches(absl::string_view name) const;

  // As given to Create().
  const std::string& text() const { return text_; }

 private:
  NamePattern(absl::string_view text, TargetMatching matching)
      : text_(text), matching_(matching) {}

  std::string text_;
  TargetMatching matching_;
  // For globs and regular expressions.
  std::shared_ptr<const re2::RE2> regex_;
};

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_NAME_PATTERN_H_
