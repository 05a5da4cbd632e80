#include "config/internal/message_text.h"

#include <algorithm>

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
