#include "examples/sentence_encoder/word_piece_tokenizer.h"

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "utf8proc.h"

namespace trainer_lora::examples {
namespace {

constexpr absl::string_view kSpecialTokens[] = {"[PAD]", "[UNK]", "[CLS]",
                                                "[SEP]", "[MASK]"};

// A longer word becomes [UNK] as a whole.
constexpr int kMaxCharactersPerWord = 100;

using CodePoint = utf8proc_int32_t;

void AppendUtf8(CodePoint code_point, std::string& text) {
  utf8proc_uint8_t bytes[4];
  text.append(reinterpret_cast<const char*>(bytes),
              utf8proc_encode_char(code_point, bytes));
}

// The number of bytes that the character at the start of `text` takes, and the
// character; negative if the bytes there are not UTF-8.
std::ptrdiff_t DecodeUtf8(absl::string_view text, CodePoint& code_point) {
  return utf8proc_iterate(
      reinterpret_cast<const utf8proc_uint8_t*>(text.data()), text.size(),
      &code_point);
}

bool IsWhitespace(CodePoint c) {
  if (c == '\t' || c == '\n' || c == '\r') return true;
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return true;
    default:
      return false;
  }
}

bool IsControl(CodePoint c) {
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
      return true;
    default:
      return false;
  }
}

// All of ASCII that is neither a letter, a digit nor a space is punctuation to
// BERT, also what is a symbol to Unicode: ^ ` $ + < = > | ~.
bool IsPunctuation(CodePoint c) {
  if ((c >= '!' && c <= '/') || (c >= ':' && c <= '@') ||
      (c >= '[' && c <= '`') || (c >= '{' && c <= '~')) {
    return true;
  }
  switch (utf8proc_category(c)) {
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
      return true;
    default:
      return false;
  }
}

bool IsMark(CodePoint c) {
  return utf8proc_category(c) == UTF8PROC_CATEGORY_MN;
}

// Ideographs, each of which is a word. Hangul and kana are not among them.
bool IsIdeograph(CodePoint c) {
  // Unicode's sixth range starts at U+2B820. Hugging Face's tokenizer starts it
  // at U+2B920, and its ids are what this one has to give.
  constexpr std::pair<CodePoint, CodePoint> kRanges[] = {
      {0x4E00, 0x9FFF},   {0x3400, 0x4DBF},   {0x20000, 0x2A6DF},
      {0x2A700, 0x2B73F}, {0x2B740, 0x2B81F}, {0x2B920, 0x2CEAF},
      {0xF900, 0xFAFF},   {0x2F800, 0x2FA1F}};
  for (const auto& [first, last] : kRanges) {
    if (c >= first && c <= last) return true;
  }
  return false;
}

// Without control characters and broken UTF-8, with every whitespace character
// a space, and with spaces around ideographs.
std::string CleanText(absl::string_view text) {
  constexpr CodePoint kReplacementCharacter = 0xFFFD;
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    CodePoint c;
    const std::ptrdiff_t length = DecodeUtf8(text, c);
    text.remove_prefix(std::max<std::ptrdiff_t>(length, 1));
    if (length <= 0 || c == kReplacementCharacter) continue;
    if (IsWhitespace(c)) {
      clean += ' ';
    } else if (IsControl(c)) {
      continue;
    } else if (IsIdeograph(c)) {
      clean += ' ';
      AppendUtf8(c, clean);
      clean += ' ';
    } else {
      AppendUtf8(c, clean);
    }
  }
  return clean;
}

// The characters of `text`, which is UTF-8, in normalization form D.
std::vector<CodePoint> Decompose(const std::string& text) {
  const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  std::vector<CodePoint> characters(text.size());
  const auto decompose = [&] {
    return utf8proc_decompose(bytes, text.size(), characters.data(),
                              characters.size(), UTF8PROC_DECOMPOSE);
  };
  // It returns the size that is needed, also if that is more than was given.
  std::ptrdiff_t size = decompose();
  if (size > static_cast<std::ptrdiff_t>(characters.size())) {
    characters.resize(size);
    size = decompose();
  }
  characters.resize(std::max<std::ptrdiff_t>(size, 0));
  return characters;
}

}  // namespace

absl::StatusOr<WordPieceTokenizer> WordPieceTokenizer::Load(
    const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat(path, ": the vocabulary can't be read"));
  }
  WordPieceTokenizer tokenizer;
  std::string piece;
  for (int64_t id = 0; std::getline(file, piece); ++id) {
    if (piece.empty()) {
      return absl::DataLossError(
          absl::StrCat(path, ":", id + 1, ": the word piece is empty"));
    }
    const auto [existing, inserted] = tokenizer.vocabulary_.emplace(piece, id);
    if (!inserted) {
      return absl::DataLossError(
          absl::StrCat(path, ":", id + 1, ": '", piece, "' was on line ",
                       existing->second + 1, " already"));
    }
  }
  for (const absl::string_view token : kSpecialTokens) {
    if (tokenizer.vocabulary_.count(std::string(token)) == 0) {
      return absl::DataLossError(
          absl::StrCat(path, ": the vocabulary has no ", token));
    }
  }
  tokenizer.pad_id_ = tokenizer.vocabulary_.at("[PAD]");
  tokenizer.unknown_id_ = tokenizer.vocabulary_.at("[UNK]");
  tokenizer.begin_id_ = tokenizer.vocabulary_.at("[CLS]");
  tokenizer.end_id_ = tokenizer.vocabulary_.at("[SEP]");
  return tokenizer;
}

std::vector<int64_t> WordPieceTokenizer::Encode(absl::string_view text,
                                                int max_length) const {
  std::vector<int64_t> ids = {begin_id_};
  size_t segment_end = 0;
  while (segment_end < text.size()) {
    const absl::string_view special =
        SpecialTokenPrefix(text.substr(segment_end));
    if (special.empty()) {
      ++segment_end;
      continue;
    }
    AppendText(text.substr(0, segment_end), ids);
    ids.push_back(vocabulary_.at(std::string(special)));
    text.remove_prefix(segment_end + special.size());
    segment_end = 0;
  }
  AppendText(text, ids);
  const size_t limit = std::max(max_length, 2) - 1;
  if (ids.size() > limit) ids.resize(limit);
  ids.push_back(end_id_);
  return ids;
}

absl::string_view WordPieceTokenizer::SpecialTokenPrefix(
    absl::string_view text) {
  for (const absl::string_view token : kSpecialTokens) {
    if (absl::StartsWith(text, token)) return token;
  }
  return {};
}

void WordPieceTokenizer::AppendText(absl::string_view text,
                                    std::vector<int64_t>& ids) const {
  std::string word;
  const auto end_word = [&] {
    if (!word.empty()) AppendWord(word, ids);
    word.clear();
  };
  for (CodePoint c : Decompose(CleanText(text))) {
    if (IsMark(c)) continue;
    c = utf8proc_tolower(c);
    if (IsWhitespace(c)) {
      end_word();
    } else if (IsPunctuation(c)) {
      end_word();
      AppendUtf8(c, word);
      end_word();
    } else {
      AppendUtf8(c, word);
    }
  }
  end_word();
}

// Takes the longest piece of the vocabulary from the front, again and again; a
// word that does not come out even is unknown as a whole.
void WordPieceTokenizer::AppendWord(absl::string_view word,
                                    std::vector<int64_t>& ids) const {
  // Where characters end: a piece never ends inside one.
  std::vector<size_t> ends;
  for (size_t begin = 0; begin < word.size();) {
    CodePoint unused;
    begin += DecodeUtf8(word.substr(begin), unused);
    ends.push_back(begin);
  }
  const size_t ids_before = ids.size();
  size_t begin = 0;     // In bytes.
  size_t consumed = 0;  // In characters.
  while (ends.size() <= kMaxCharactersPerWord && consumed < ends.size()) {
    size_t end = ends.size();
    auto piece = vocabulary_.end();
    for (; end > consumed; --end) {
      piece = vocabulary_.find(absl::StrCat(
          begin > 0 ? "##" : "", word.substr(begin, ends[end - 1] - begin)));
      if (piece != vocabulary_.end()) break;
    }
    if (piece == vocabulary_.end()) break;
    ids.push_back(piece->second);
    consumed = end;
    begin = ends[end - 1];
  }
  if (consumed < ends.size()) {
    ids.resize(ids_before);
    ids.push_back(unknown_id_);
  }
}

}  // namespace trainer_lora::examples
