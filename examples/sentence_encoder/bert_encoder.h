// A BERT encoder with Hugging Face's parameter names, and the sentence
// embeddings that sentence-transformers makes of its output.
//
//   absl::StatusOr<BertConfig> config = BertConfig::Load("config.json");
//   if (!config.ok()) return config.status();
//   BertEncoder encoder(*config);
//   at::Tensor hidden = encoder->forward(input_ids, attention_mask);
//   at::Tensor embeddings = MeanPoolAndNormalize(hidden, attention_mask);
//
// The linear layers can take LoRA adapters. There is no dropout and no pooler:
// a checkpoint's `pooler.*` and `embeddings.position_ids` have no place here.
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_BERT_ENCODER_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_BERT_ENCODER_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "lora/linear.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::examples {

// The members are called as the keys of Hugging Face's config.json.
struct BertConfig {
  // Reads a config.json. kNotFound without the file; kInvalidArgument, naming
  // the file and the key, for a key that is missing or has a value that
  // BertEncoder can't do; kDataLoss if the file is not JSON.
  static absl::StatusOr<BertConfig> Load(const std::string& path);

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;  // Divides hidden_size.
  int64_t intermediate_size = 0;
  int64_t max_position_embeddings = 0;
  int64_t type_vocab_size = 0;
  double layer_norm_eps = 0;
};

// Word, position and segment embeddings, summed and normalized. Every token is
// in the first segment.
class BertEmbeddingsImpl : public torch::nn::Module {
 public:
  explicit BertEmbeddingsImpl(const BertConfig& config);
  // [batch, sequence] -> [batch, sequence, hidden]
  at::Tensor forward(const at::Tensor& input_ids);

 private:
  torch::nn::Embedding word_embeddings_;
  torch::nn::Embedding position_embeddings_;
  torch::nn::Embedding token_type_embeddings_;
  torch::nn::LayerNorm layer_norm_;
};
TORCH_MODULE(BertEmbeddings);

class BertSelfAttentionImpl : public torch::nn::Module {
 public:
  explicit BertSelfAttentionImpl(const BertConfig& config);
  // hidden: [batch, sequence, hidden]; attention_bias, which is added to the
  // scores: [batch, 1, 1, sequence]. Returns [batch, sequence, hidden].
  at::Tensor forward(const at::Tensor& hidden,
                     const at::Tensor& attention_bias);

 private:
  // [batch, sequence, hidden] -> [batch, heads, sequence, hidden / heads]
  at::Tensor SplitHeads(const at::Tensor& hidden) const;

  int64_t num_heads_;
  lora::ReplicatedLinear query_;
  lora::ReplicatedLinear key_;
  lora::ReplicatedLinear value_;
};
TORCH_MODULE(BertSelfAttention);

// What ends both halves of a layer: a linear layer back to the hidden size, the
// residual connection, normalization.
class BertResidualOutputImpl : public torch::nn::Module {
 public:
  BertResidualOutputImpl(int64_t in_features, const BertConfig& config);
  // [batch, sequence, in_features], [batch, sequence, hidden] -> the latter
  at::Tensor forward(const at::Tensor& input, const at::Tensor& residual);

 private:
  lora::ReplicatedLinear dense_;
  torch::nn::LayerNorm layer_norm_;
};
TORCH_MODULE(BertResidualOutput);

class BertAttentionImpl : public torch::nn::Module {
 public:
  explicit BertAttentionImpl(const BertConfig& config);
  // As BertSelfAttention.
  at::Tensor forward(const at::Tensor& hidden,
                     const at::Tensor& attention_bias);

 private:
  BertSelfAttention self_;
  BertResidualOutput output_;
};
TORCH_MODULE(BertAttention);

class BertIntermediateImpl : public torch::nn::Module {
 public:
  explicit BertIntermediateImpl(const BertConfig& config);
  // [batch, sequence, hidden] -> [batch, sequence, intermediate]
  at::Tensor forward(const at::Tensor& hidden);

 private:
  lora::ReplicatedLinear dense_;
};
TORCH_MODULE(BertIntermediate);

class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const BertConfig& config);
  // As BertSelfAttention.
  at::Tensor forward(const at::Tensor& hidden,
                     const at::Tensor& attention_bias);

 private:
  BertAttention attention_;
  BertIntermediate intermediate_;
  BertResidualOutput output_;
};
TORCH_MODULE(BertLayer);

class BertLayerStackImpl : public torch::nn::Module {
 public:
  explicit BertLayerStackImpl(const BertConfig& config);
  // As BertSelfAttention.
  at::Tensor forward(at::Tensor hidden, const at::Tensor& attention_bias);

 private:
  torch::nn::ModuleList layers_;
};
TORCH_MODULE(BertLayerStack);

class BertEncoderImpl : public torch::nn::Module {
 public:
  explicit BertEncoderImpl(const BertConfig& config);

  // input_ids, int64 [batch, sequence]: word pieces, at most
  // max_position_embeddings of them. attention_mask, int64 or bool [batch,
  // sequence]: 1 for a token, 0 for padding, which no token attends to.
  // Returns the last layer's output, [batch, sequence, hidden]; what it holds
  // for padding means nothing. Throws c10::Error for other shapes.
  at::Tensor forward(const at::Tensor& input_ids,
                     const at::Tensor& attention_mask);

 private:
  BertEmbeddings embeddings_;
  BertLayerStack layers_;
};
TORCH_MODULE(BertEncoder);

// The mean over each sentence's tokens, without padding, scaled to length 1.
// hidden: [batch, sequence, hidden], attention_mask: as above; returns [batch,
// hidden].
at::Tensor MeanPoolAndNormalize(const at::Tensor& hidden,
                                const at::Tensor& attention_mask);

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_BERT_ENCODER_H_
