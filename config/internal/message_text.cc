#include "config/internal/message_text.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace trainer_lora::config {
namespace {

// No name that could be meant is longer.
constexpr size_t kMaxNameBytes = 60;

// Levenshtein distance.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

size_t Utf8CharacterSize(absl::string_view text) {
  const auto byte = [&](size_t i) -> unsigned {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
  };
  const auto in = [&](size_t i, unsigned min, unsigned max) {
    return byte(i) >= min && byte(i) <= max;
  };
  const auto tail = [&](size_t i) { return in(i, 0x80, 0xBF); };
  if (byte(0) < 0x80) return 1;
  if (in(0, 0xC2, 0xDF)) return tail(1) ? 2 : 0;
  // Not overlong (E0, F0), no surrogates (ED), not above U+10FFFF (F4).
  if (in(0, 0xE0, 0xEF)) {
    const unsigned min = byte(0) == 0xE0 ? 0xA0 : 0x80;
    const unsigned max = byte(0) == 0xED ? 0x9F : 0xBF;
    return in(1, min, max) && tail(2) ? 3 : 0;
  }
  if (in(0, 0xF0, 0xF4)) {
    const unsigned min = byte(0) == 0xF0 ? 0x90 : 0x80;
    const unsigned max = byte(0) == 0xF4 ? 0x8F : 0xBF;
    return in(1, min, max) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

std::string Printable(absl::string_view text) {
  std::string result;
  while (!text.empty()) {
    const size_t size = Utf8CharacterSize(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (size == 0 || absl::ascii_iscntrl(first)) {
      absl::StrAppend(&result, "\\x", absl::Hex(first, absl::kZeroPad2));
    } else {
      absl::StrAppend(&result, text.substr(0, size));
    }
    text.remove_prefix(std::max<size_t>(size, 1));
  }
  return result;
}

std::string Shorten(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  size_t end = max_bytes;
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;
  return absl::StrCat(text.substr(0, end), "...");
}

std::string DidYouMean(absl::string_view word,
                       const std::vector<std::string>& known) {
  if (word.size() > kMaxNameBytes) return "";
  for (size_t distance : {1, 2}) {
    for (const std::string& name : known) {
      if (name.size() > distance && EditDistance(word, name) == distance) {
        return absl::StrCat(" (did you mean ", name, "?)");
      }
    }
  }
  return "";
}

std::string JoinAlternatives(const std::vector<std::string>& words) {
  std::string joined;
  for (size_t i = 0; i < words.size(); ++i) {
    const char* separator = i == 0 ? "" : i + 1 < words.size() ? ", " : " or ";
    absl::StrAppend(&joined, separator, words[i]);
  }
  return joined;
}

}  // namespace trainer_lora::config
