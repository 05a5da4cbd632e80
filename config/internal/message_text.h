// Words for error messages.
#ifndef TRAINER_LORA_CONFIG_INTERNAL_MESSAGE_TEXT_H_
#define TRAINER_LORA_CONFIG_INTERNAL_MESSAGE_TEXT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace trainer_lora::config {

// Bytes of the UTF-8 character that `text` starts with, 0 if it isn't one.
size_t Utf8CharacterSize(absl::string_view text);

// `text` as one line of UTF-8, whatever it was: control characters and bytes
// that are no part of a character become \x0a, \xff, ...
std::string Printable(absl::string_view text);

// `text`, cut after `max_bytes` bytes (never inside a UTF-8 character) with
// "..." instead of the rest.
std::string Shorten(absl::string_view text, size_t max_bytes = 60);

// " (did you mean rank?)" if `word` may be a slip of the finger for one of
// `known`: the nearest, at most two letters away, the first of several. Else
// empty.
std::string DidYouMean(absl::string_view word,
                       const std::vector<std::string>& known);

// "a, b or c".
std::string JoinAlternatives(const std::vector<std::string>& words);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_INTERNAL_MESSAGE_TEXT_H_
