#include "examples/sentence_encoder/sentence_batch.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "ATen/Functions.h"
#include "c10/core/GradMode.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"

namespace trainer_lora::examples {

SentenceBatch PadSentences(absl::Span<const std::vector<int64_t>> sentences,
                           int64_t pad_id) {
  TORCH_CHECK(!sentences.empty(), "a batch needs at least one sentence");
  size_t longest = 0;
  for (const auto& sentence : sentences) {
    longest = std::max(longest, sentence.size());
  }
  const std::vector<int64_t> shape = {static_cast<int64_t>(sentences.size()),
                                      static_cast<int64_t>(longest)};
  SentenceBatch batch = {at::full(shape, pad_id, at::kLong),
                         at::zeros(shape, at::kLong)};
  int64_t* ids = batch.input_ids.mutable_data_ptr<int64_t>();
  int64_t* mask = batch.attention_mask.mutable_data_ptr<int64_t>();
  for (const auto& sentence : sentences) {
    std::copy(sentence.begin(), sentence.end(), ids);
    std::fill_n(mask, sentence.size(), 1);
    ids += longest;
    mask += longest;
  }
  return batch;
}

at::Tensor EmbedBatch(BertEncoder& encoder, const SentenceBatch& batch) {
  return MeanPoolAndNormalize(
      encoder->forward(batch.input_ids, batch.attention_mask),
      batch.attention_mask);
}

at::Tensor EmbedSentences(BertEncoder& encoder,
                          absl::Span<const std::vector<int64_t>> sentences,
                          int64_t pad_id, int batch_size) {
  TORCH_CHECK(batch_size > 0, "batch_size must be positive, got ", batch_size);
  const c10::NoGradGuard no_grad;
  std::vector<int64_t> by_length(sentences.size());
  std::iota(by_length.begin(), by_length.end(), 0);
  std::stable_sort(by_length.begin(), by_length.end(),
                   [&](int64_t a, int64_t b) {
                     return sentences[a].size() < sentences[b].size();
                   });

  std::vector<at::Tensor> embeddings;
  for (size_t begin = 0; begin < by_length.size(); begin += batch_size) {
    const size_t end = std::min(begin + batch_size, by_length.size());
    std::vector<std::vector<int64_t>> batch;
    for (size_t i = begin; i < end; ++i) {
      batch.push_back(sentences[by_length[i]]);
    }
    embeddings.push_back(EmbedBatch(encoder, PadSentences(batch, pad_id)));
  }
  TORCH_CHECK(!embeddings.empty(), "there is no sentence to embed");
  const at::Tensor sorted = at::cat(embeddings);
  at::Tensor restored = at::empty_like(sorted);
  restored.index_copy_(0, at::tensor(by_length, at::kLong), sorted);
  return restored;
}

}  // namespace trainer_lora::examples
