#include "examples/sentence_encoder/trainer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "config/logging.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/collectives.h"
#include "distributed/grad_norm.h"
#include "distributed/meta_device.h"
#include "examples/sentence_encoder/sentence_batch.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/lora_gradient_sync.h"
#include "lora/parameter_groups.h"

namespace trainer_lora::examples {
namespace {

constexpr char kBaseModel[] = "sentence-transformers/all-MiniLM-L6-v2";

// The component's way from a checkpoint to a model that trains: build without
// memory, put the adapters in, load the base weights under their new names,
// initialize the adapters, freeze the rest, make the ranks alike.
absl::StatusOr<BertEncoder> LoadEncoder(
    const TrainingConfig& config, const TrainingFiles& files,
    std::shared_ptr<const distributed::DeviceMesh> mesh) {
  absl::StatusOr<BertConfig> bert_config = BertConfig::Load(files.model_config);
  if (!bert_config.ok()) return bert_config.status();
  if (config.max_length > bert_config->max_position_embeddings) {
    return absl::InvalidArgumentError(absl::StrCat(
        "training.max_length must be at most ",
        bert_config->max_position_embeddings,
        ", the model's max_position_embeddings; got ", config.max_length));
  }
  BertEncoder encoder = nullptr;
  {
    const distributed::MetaDeviceGuard meta_device;
    encoder = BertEncoder(*bert_config);
  }

  lora::LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  absl::StatusOr<lora::LoraTraining> training =
      lora::EnableLoraTraining(*encoder, config.lora, options);
  if (!training.ok()) return training.status();

  distributed::LoadCheckpointOptions load_options;
  load_options.aliases = training->checkpoint_key_aliases;
  load_options.missing_parameter_initializer =
      training->missing_parameter_initializer;
  load_options.ignored_patterns = {"embeddings\\.position_ids", "pooler\\..*"};
  const auto report =
      distributed::LoadCheckpoint(*encoder, files.checkpoint, load_options);
  if (!report.ok()) return report.status();

  const auto layers = lora::FinalizeLoraTraining(*encoder);
  if (!layers.ok()) return layers.status();
  if (mesh != nullptr) {
    const absl::Status replicated =
        lora::ReplicateLoraParameters(*encoder, std::move(mesh));
    if (!replicated.ok()) return replicated;
  }
  return encoder;
}

absl::StatusOr<std::vector<lora::ParameterGroup>> ParameterGroups(
    const BertEncoder& encoder, const TrainingConfig& config) {
  lora::ParameterGroupOptions options;
  options.learning_rate = config.optimizer.learning_rate;
  options.weight_decay = config.optimizer.weight_decay;
  options.loraplus_lr_ratio = config.lora.loraplus_lr_ratio.value_or(1);
  return lora::LoraParameterGroups(*encoder, options);
}

std::vector<at::Tensor> TensorsOf(
    const std::vector<lora::ParameterGroup>& groups) {
  std::vector<at::Tensor> tensors;
  for (const lora::ParameterGroup& group : groups) {
    for (const lora::NamedParameter& item : group.parameters) {
      tensors.push_back(item.parameter);
    }
  }
  return tensors;
}

// A permutation of [0, size) that is the same on every rank and platform, which
// std::shuffle is not.
std::vector<int64_t> Shuffled(int64_t size, uint64_t seed) {
  std::vector<int64_t> order(size);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 generator(seed);
  for (int64_t i = size - 1; i > 0; --i) {
    std::swap(order[i], order[generator() % static_cast<uint64_t>(i + 1)]);
  }
  return order;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainingConfig& config, const TrainingFiles& files,
    std::shared_ptr<const distributed::DeviceMesh> mesh) {
  absl::StatusOr<WordPieceTokenizer> tokenizer =
      WordPieceTokenizer::Load(files.vocabulary);
  if (!tokenizer.ok()) return tokenizer.status();
  absl::StatusOr<std::vector<GlossPair>> pairs =
      LoadNounDefinitions(files.wordnet_nouns);
  if (!pairs.ok()) return pairs.status();
  absl::StatusOr<GlossSplit> split = SplitHeldOut(
      *std::move(pairs), static_cast<int>(config.held_out), config.seed);
  if (!split.ok()) return split.status();
  if (split->train.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "training.held_out must be below the number of different nouns in ",
        files.wordnet_nouns, ", or none is left to train on; got ",
        config.held_out));
  }
  absl::StatusOr<BertEncoder> encoder = LoadEncoder(config, files, mesh);
  if (!encoder.ok()) return encoder.status();
  auto groups = ParameterGroups(*encoder, config);
  if (!groups.ok()) return groups.status();
  std::unique_ptr<Trainer> trainer(
      new Trainer(config, *std::move(tokenizer), *std::move(split),
                  *std::move(encoder), *std::move(groups), mesh));
  if (mesh != nullptr) {
    auto sync = distributed::GradientSync::Create(
        std::move(mesh), lora::LoraParameters(*trainer->encoder_));
    if (!sync.ok()) return sync.status();
    trainer->gradient_sync_ = *std::move(sync);
  }
  return trainer;
}

Trainer::Trainer(const TrainingConfig& config, WordPieceTokenizer tokenizer,
                 GlossSplit pairs, BertEncoder encoder,
                 std::vector<lora::ParameterGroup> groups,
                 std::shared_ptr<const distributed::DeviceMesh> mesh)
    : config_(config),
      tokenizer_(std::move(tokenizer)),
      pairs_(std::move(pairs)),
      encoder_(std::move(encoder)),
      mesh_(std::move(mesh)),
      groups_(std::move(groups)),
      trainable_(TensorsOf(groups_)),
      optimizer_(lora::OptimizerGroups(groups_, torch::optim::AdamWOptions())) {
}

int64_t Trainer::world_size() const {
  return mesh_ == nullptr ? 1 : mesh_->size();
}

int64_t Trainer::rank() const { return mesh_ == nullptr ? 0 : mesh_->rank(); }

absl::StatusOr<StepResult> Trainer::Step() {
  const double warmup = static_cast<double>(config_.optimizer.warmup_steps);
  const double share = std::min(1.0, (steps_done_ + 1) / std::max(1.0, warmup));
  for (size_t i = 0; i < groups_.size(); ++i) {
    optimizer_.param_groups()[i].options().set_lr(share *
                                                  groups_[i].learning_rate);
  }

  const double rank_loss = AccumulateGradients();
  if (gradient_sync_ != nullptr) {
    const auto synchronized = gradient_sync_->Sync();
    if (!synchronized.ok()) return synchronized.status();
  }
  const auto norm =
      distributed::ClipGradNorm(trainable_, config_.max_grad_norm);
  if (!norm.ok()) return norm.status();
  // The gradients are the same on every rank, so all ranks skip or none.
  if (std::isfinite(*norm)) optimizer_.step();
  ZeroGrad();

  const auto loss = MeanOverRanks(rank_loss);
  if (!loss.ok()) return loss.status();
  ++steps_done_;
  return StepResult{
      *loss, *norm,
      world_size() * config_.gradient_accumulation_steps * config_.batch_size};
}

void Trainer::ZeroGrad() {
  if (gradient_sync_ != nullptr) {
    gradient_sync_->ZeroGrad();
  } else {
    optimizer_.zero_grad();
  }
}

double Trainer::AccumulateGradients() {
  const int64_t count = config_.gradient_accumulation_steps;
  double loss_sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    // Neighbouring micro-batches go to different ranks: two ranks then see what
    // one rank with two accumulation steps sees.
    const int64_t micro_batch =
        (steps_done_ * count + i) * world_size() + rank();
    const at::Tensor loss = MicroBatchLoss(micro_batch);
    (loss / static_cast<double>(count)).backward();
    loss_sum += loss.item<double>();
  }
  return loss_sum / static_cast<double>(count);
}

at::Tensor Trainer::MicroBatchLoss(int64_t micro_batch) {
  std::vector<std::string> definitions;
  std::vector<std::string> lemmas;
  for (int64_t i = 0; i < config_.batch_size; ++i) {
    const GlossPair& pair = PairAt(micro_batch * config_.batch_size + i);
    definitions.push_back(pair.definition);
    lemmas.push_back(pair.lemma);
  }
  const auto embed = [this](const std::vector<std::string>& sentences) {
    return EmbedBatch(encoder_,
                      PadSentences(Tokenize(sentences), tokenizer_.pad_id()));
  };
  return ContrastiveLoss(embed(definitions), embed(lemmas));
}

const GlossPair& Trainer::PairAt(int64_t index) {
  const int64_t size = static_cast<int64_t>(pairs_.train.size());
  if (const int64_t epoch = index / size; epoch != epoch_) {
    epoch_ = epoch;
    epoch_order_ = Shuffled(size, static_cast<uint64_t>(config_.seed + epoch));
  }
  return pairs_.train[epoch_order_[index % size]];
}

absl::StatusOr<double> Trainer::MeanOverRanks(double value) const {
  if (mesh_ == nullptr) return value;
  const auto sum =
      distributed::AllReduce(*mesh_, value, distributed::ReduceOp::kSum);
  if (!sum.ok()) return sum.status();
  return *sum / static_cast<double>(world_size());
}

std::vector<std::vector<int64_t>> Trainer::Tokenize(
    const std::vector<std::string>& sentences) const {
  std::vector<std::vector<int64_t>> tokenized;
  tokenized.reserve(sentences.size());
  for (const std::string& sentence : sentences) {
    tokenized.push_back(
        tokenizer_.Encode(sentence, static_cast<int>(config_.max_length)));
  }
  return tokenized;
}

RetrievalMetrics Trainer::Evaluate() {
  std::vector<std::string> definitions;
  std::vector<std::string> lemmas;
  for (const GlossPair& pair : pairs_.held_out) {
    definitions.push_back(pair.definition);
    lemmas.push_back(pair.lemma);
  }
  const auto embed = [this](const std::vector<std::string>& sentences) {
    return EmbedSentences(encoder_, Tokenize(sentences), tokenizer_.pad_id());
  };
  encoder_->eval();  // Without dropout.
  const RetrievalMetrics metrics =
      EvaluateRetrieval(embed(definitions), embed(lemmas));
  encoder_->train();
  return metrics;
}

absl::Status Trainer::Save(const std::string& folder) const {
  return lora::SaveAdapter(*encoder_, folder,
                           {kBaseModel, "FEATURE_EXTRACTION"});
}

}  // namespace trainer_lora::examples
