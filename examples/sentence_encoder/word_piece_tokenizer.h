// Splits text into the word pieces of an uncased BERT model, as Hugging Face's
// tokenizer of all-MiniLM-L6-v2 does.
//
//   absl::StatusOr<WordPieceTokenizer> tokenizer =
//       WordPieceTokenizer::Load("vocab.txt");
//   if (!tokenizer.ok()) return tokenizer.status();
//   std::vector<int64_t> ids =
//       tokenizer->Encode("a large feline", /*max_length=*/64);
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORD_PIECE_TOKENIZER_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORD_PIECE_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::examples {

// Copyable; the const members may be called from several threads at once.
class WordPieceTokenizer {
 public:
  // Reads a vocab.txt: one word piece a line, whose id is the line's index.
  // kNotFound without the file; kDataLoss, naming the file and the line or the
  // token, for a piece that is empty or there twice, or if [PAD], [UNK], [CLS],
  // [SEP] or [MASK] is missing.
  static absl::StatusOr<WordPieceTokenizer> Load(const std::string& path);

  // [CLS], the ids of the word pieces of `text`, [SEP]; of the word pieces only
  // as many as leave the result no longer than `max_length`. The two markers
  // are always there, so a `max_length` below 2 counts as 2.
  //
  // A special token that is spelled out in the text, such as "[SEP]", becomes
  // that token. Bytes that are not UTF-8 are left out.
  //
  // The result is that of Hugging Face's tokenizer, whose tables are those of
  // Unicode 8.0. It differs for characters that came later (marks, punctuation,
  // format characters and capitals of rare scripts, which those tables take for
  // letters) and for four that changed since: U+166D, U+1734, U+1885, U+1886.
  std::vector<int64_t> Encode(absl::string_view text, int max_length) const;

  // What shorter sentences of a batch are filled up with.
  int64_t pad_id() const { return pad_id_; }

 private:
  WordPieceTokenizer() = default;

  // Append the ids of `text`, which holds no special tokens, and of one word.
  void AppendText(absl::string_view text, std::vector<int64_t>& ids) const;
  void AppendWord(absl::string_view word, std::vector<int64_t>& ids) const;

  // The special token at the start of `text`, or an empty string.
  static absl::string_view SpecialTokenPrefix(absl::string_view text);

  std::unordered_map<std::string, int64_t> vocabulary_;
  int64_t pad_id_ = 0;
  int64_t unknown_id_ = 0;
  int64_t begin_id_ = 0;
  int64_t end_id_ = 0;
};

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORD_PIECE_TOKENIZER_H_
