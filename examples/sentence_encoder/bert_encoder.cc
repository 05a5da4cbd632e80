#include "examples/sentence_encoder/bert_encoder.h"

#include <cmath>
#include <fstream>
#include <limits>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "c10/util/Exception.h"
#include "nlohmann/json.hpp"
#include "torch/nn/options/embedding.h"
#include "torch/nn/options/normalization.h"

namespace trainer_lora::examples {
namespace {

torch::nn::LayerNormOptions LayerNormOptions(const BertConfig& config) {
  return torch::nn::LayerNormOptions({config.hidden_size})
      .eps(config.layer_norm_eps);
}

// Reads the members of a config one by one and remembers the first error.
class ConfigReader {
 public:
  ConfigReader(std::string path, nlohmann::json json)
      : path_(std::move(path)), json_(std::move(json)) {}

  void ReadPositive(const char* key, int64_t& value) {
    const nlohmann::json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_number_integer() || json->get<int64_t>() <= 0) {
      return Complain(
          key, absl::StrCat("must be a positive integer, got ", json->dump()));
    }
    value = json->get<int64_t>();
  }

  void ReadPositive(const char* key, double& value) {
    const nlohmann::json* json = Find(key);
    if (json == nullptr) return;
    if (!json->is_number() || json->get<double>() <= 0) {
      return Complain(
          key, absl::StrCat("must be a positive number, got ", json->dump()));
    }
    value = json->get<double>();
  }

  // For what this encoder can do in one way only.
  void Require(const char* key, absl::string_view only_value) {
    const nlohmann::json* json = Find(key);
    if (json == nullptr) return;
    if (*json != nlohmann::json(std::string(only_value))) {
      Complain(key, absl::StrCat("must be \"", only_value, "\" here, got ",
                                 json->dump()));
    }
  }

  void Complain(const char* key, absl::string_view complaint) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat(path_, ": ", key, " ", complaint));
  }

  const absl::Status& status() const { return status_; }

 private:
  const nlohmann::json* Find(const char* key) {
    const auto member = json_.find(key);
    if (member != json_.end()) return &*member;
    Complain(key, "is missing");
    return nullptr;
  }

  std::string path_;
  nlohmann::json json_;
  absl::Status status_;
};

}  // namespace

absl::StatusOr<BertConfig> BertConfig::Load(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat(path, ": the model's config can't be read"));
  }
  nlohmann::json json = nlohmann::json::parse(file, /*cb=*/nullptr,
                                              /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::DataLossError(absl::StrCat(path, ": not a JSON object"));
  }
  BertConfig config;
  ConfigReader reader(path, std::move(json));
  reader.ReadPositive("vocab_size", config.vocab_size);
  reader.ReadPositive("hidden_size", config.hidden_size);
  reader.ReadPositive("num_hidden_layers", config.num_hidden_layers);
  reader.ReadPositive("num_attention_heads", config.num_attention_heads);
  reader.ReadPositive("intermediate_size", config.intermediate_size);
  reader.ReadPositive("max_position_embeddings",
                      config.max_position_embeddings);
  reader.ReadPositive("type_vocab_size", config.type_vocab_size);
  reader.ReadPositive("layer_norm_eps", config.layer_norm_eps);
  reader.Require("model_type", "bert");
  reader.Require("hidden_act", "gelu");
  reader.Require("position_embedding_type", "absolute");
  if (reader.status().ok() &&
      config.hidden_size % config.num_attention_heads != 0) {
    reader.Complain(
        "num_attention_heads",
        absl::StrCat("must divide hidden_size, ", config.hidden_size, ", got ",
                     config.num_attention_heads));
  }
  if (!reader.status().ok()) return reader.status();
  return config;
}

BertEmbeddingsImpl::BertEmbeddingsImpl(const BertConfig& config)
    : word_embeddings_(config.vocab_size, config.hidden_size),
      position_embeddings_(config.max_position_embeddings, config.hidden_size),
      token_type_embeddings_(config.type_vocab_size, config.hidden_size),
      layer_norm_(LayerNormOptions(config)) {
  register_module("word_embeddings", word_embeddings_);
  register_module("position_embeddings", position_embeddings_);
  register_module("token_type_embeddings", token_type_embeddings_);
  register_module("LayerNorm", layer_norm_);
}

at::Tensor BertEmbeddingsImpl::forward(const at::Tensor& input_ids) {
  const int64_t length = input_ids.size(1);
  const at::Tensor& positions = position_embeddings_->weight;
  TORCH_CHECK(length <= positions.size(0), "a sentence of ", length,
              " tokens is longer than the ", positions.size(0),
              " that the model has positions for");
  const at::Tensor tokens = word_embeddings_->forward(input_ids) +
                            token_type_embeddings_->weight.select(0, 0);
  return layer_norm_->forward(tokens + positions.narrow(0, 0, length));
}

BertSelfAttentionImpl::BertSelfAttentionImpl(const BertConfig& config)
    : num_heads_(config.num_attention_heads),
      query_(config.hidden_size, config.hidden_size),
      key_(config.hidden_size, config.hidden_size),
      value_(config.hidden_size, config.hidden_size) {
  register_module("query", query_);
  register_module("key", key_);
  register_module("value", value_);
}

at::Tensor BertSelfAttentionImpl::forward(const at::Tensor& hidden,
                                          const at::Tensor& attention_bias) {
  const at::Tensor query = SplitHeads(query_->forward(hidden));
  const at::Tensor key = SplitHeads(key_->forward(hidden));
  const at::Tensor value = SplitHeads(value_->forward(hidden));
  const double scale = 1 / std::sqrt(static_cast<double>(query.size(-1)));
  const at::Tensor scores =
      at::matmul(query, key.transpose(-1, -2)) * scale + attention_bias;
  // [batch, heads, sequence, head size]
  const at::Tensor context = at::matmul(at::softmax(scores, -1), value);
  return context.transpose(1, 2).flatten(2);
}

at::Tensor BertSelfAttentionImpl::SplitHeads(const at::Tensor& hidden) const {
  return hidden.unflatten(-1, {num_heads_, -1}).transpose(1, 2);
}

BertResidualOutputImpl::BertResidualOutputImpl(int64_t in_features,
                                               const BertConfig& config)
    : dense_(in_features, config.hidden_size),
      layer_norm_(LayerNormOptions(config)) {
  register_module("dense", dense_);
  register_module("LayerNorm", layer_norm_);
}

at::Tensor BertResidualOutputImpl::forward(const at::Tensor& input,
                                           const at::Tensor& residual) {
  return layer_norm_->forward(dense_->forward(input) + residual);
}

BertAttentionImpl::BertAttentionImpl(const BertConfig& config)
    : self_(config), output_(config.hidden_size, config) {
  register_module("self", self_);
  register_module("output", output_);
}

at::Tensor BertAttentionImpl::forward(const at::Tensor& hidden,
                                      const at::Tensor& attention_bias) {
  return output_->forward(self_->forward(hidden, attention_bias), hidden);
}

BertIntermediateImpl::BertIntermediateImpl(const BertConfig& config)
    : dense_(config.hidden_size, config.intermediate_size) {
  register_module("dense", dense_);
}

at::Tensor BertIntermediateImpl::forward(const at::Tensor& hidden) {
  return at::gelu(dense_->forward(hidden));
}

BertLayerImpl::BertLayerImpl(const BertConfig& config)
    : attention_(config),
      intermediate_(config),
      output_(config.intermediate_size, config) {
  register_module("attention", attention_);
  register_module("intermediate", intermediate_);
  register_module("output", output_);
}

at::Tensor BertLayerImpl::forward(const at::Tensor& hidden,
                                  const at::Tensor& attention_bias) {
  const at::Tensor attended = attention_->forward(hidden, attention_bias);
  return output_->forward(intermediate_->forward(attended), attended);
}

BertLayerStackImpl::BertLayerStackImpl(const BertConfig& config) {
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    layers_->push_back(BertLayer(config));
  }
  register_module("layer", layers_);
}

at::Tensor BertLayerStackImpl::forward(at::Tensor hidden,
                                       const at::Tensor& attention_bias) {
  for (const auto& layer : *layers_) {
    hidden = layer->as<BertLayer>()->forward(hidden, attention_bias);
  }
  return hidden;
}

BertEncoderImpl::BertEncoderImpl(const BertConfig& config)
    : embeddings_(config), layers_(config) {
  register_module("embeddings", embeddings_);
  register_module("encoder", layers_);
}

at::Tensor BertEncoderImpl::forward(const at::Tensor& input_ids,
                                    const at::Tensor& attention_mask) {
  TORCH_CHECK(
      input_ids.dim() == 2 && attention_mask.sizes() == input_ids.sizes(),
      "input_ids and attention_mask must both be [batch, sequence], "
      "got ",
      input_ids.sizes(), " and ", attention_mask.sizes());
  const at::Tensor hidden = embeddings_->forward(input_ids);
  // The lowest finite number, not minus infinity, whose softmax over a row that
  // is padding alone is not a number.
  const at::Tensor attention_bias =
      at::zeros(attention_mask.sizes(), hidden.options())
          .masked_fill(attention_mask == 0,
                       std::numeric_limits<float>::lowest())
          .unsqueeze(1)
          .unsqueeze(1);
  return layers_->forward(hidden, attention_bias);
}

at::Tensor MeanPoolAndNormalize(const at::Tensor& hidden,
                                const at::Tensor& attention_mask) {
  const at::Tensor weights = attention_mask.unsqueeze(-1).to(hidden.dtype());
  const at::Tensor mean =
      (hidden * weights).sum(1) / weights.sum(1).clamp_min(1e-9);
  return mean / mean.norm(2, /*dim=*/-1, /*keepdim=*/true).clamp_min(1e-12);
}

}  // namespace trainer_lora::examples
