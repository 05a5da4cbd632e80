// Turns tokenized sentences into padded batches, and batches into embeddings.
//
//   std::vector<std::vector<int64_t>> sentences = {
//       tokenizer.Encode("a large feline", 64), tokenizer.Encode("cat", 64)};
//   SentenceBatch batch = PadSentences(sentences, tokenizer.pad_id());
//   at::Tensor embeddings = EmbedBatch(encoder, batch);  // [2, hidden]
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_SENTENCE_BATCH_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_SENTENCE_BATCH_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "examples/sentence_encoder/bert_encoder.h"

namespace trainer_lora::examples {

// Sentences as the rows of a matrix. Both are int64 [batch, longest sentence].
struct SentenceBatch {
  at::Tensor input_ids;
  at::Tensor attention_mask;  // 1 for a token, 0 for padding.
};

// Fills up all sentences with `pad_id` to the length of the longest. At least
// one sentence.
SentenceBatch PadSentences(absl::Span<const std::vector<int64_t>> sentences,
                           int64_t pad_id);

// The embeddings of a batch, [batch, hidden], each of length 1. Gradients flow.
at::Tensor EmbedBatch(BertEncoder& encoder, const SentenceBatch& batch);

// The embeddings of many sentences, [sentences, hidden], in their order,
// without gradients. Sentences of like length share a batch, so little is
// padding. At least one sentence.
at::Tensor EmbedSentences(BertEncoder& encoder,
                          absl::Span<const std::vector<int64_t>> sentences,
                          int64_t pad_id, int batch_size = 64);

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_SENTENCE_BATCH_H_
