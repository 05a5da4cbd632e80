// One rank of a LoRA training run of the sentence encoder, from a config and a
// base checkpoint to an adapter.
//
//   LORA_ASSIGN_OR_RETURN(auto trainer, Trainer::Create(config, files, mesh));
//   const RetrievalMetrics before = trainer->Evaluate();
//   for (int64_t step = 0; step < config.steps; ++step) {
//     LORA_ASSIGN_OR_RETURN(StepResult result, trainer->Step());
//   }
//   LORA_RETURN_IF_ERROR(trainer->Save("adapter"));  // on one rank
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINER_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "examples/sentence_encoder/bert_encoder.h"
#include "examples/sentence_encoder/retrieval.h"
#include "examples/sentence_encoder/training_config.h"
#include "examples/sentence_encoder/word_piece_tokenizer.h"
#include "examples/sentence_encoder/wordnet.h"
#include "lora/parameter_groups.h"
#include "torch/optim/adamw.h"

namespace trainer_lora::examples {

// Where the base model and the text are.
struct TrainingFiles {
  std::string model_config;   // Hugging Face's config.json
  std::string checkpoint;     // model.safetensors
  std::string vocabulary;     // vocab.txt
  std::string wordnet_nouns;  // data.noun
};

// What one optimizer step did, the same on every rank.
struct StepResult {
  double loss = 0;       // Mean over all pairs of the step.
  double grad_norm = 0;  // Before clipping. Not finite: the step was skipped.
  int64_t pairs = 0;
};

// Not thread-safe; Step() is collective over the mesh.
class Trainer {
 public:
  // Loads the text and the model, and gives it seeded adapters. Collective over
  // `mesh`, a null mesh standing for a single process. kInvalidArgument if
  // held_out leaves nothing to train on, or max_length is more than the model
  // takes.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const TrainingConfig& config, const TrainingFiles& files,
      std::shared_ptr<const distributed::DeviceMesh> mesh);

  // One optimizer step on the next pairs: every rank computes its
  // micro-batches, then the gradients are averaged, clipped and applied.
  absl::StatusOr<StepResult> Step();

  // How well held-out definitions find their lemmas, with this rank's weights.
  RetrievalMetrics Evaluate();

  // Writes the adapter to a new folder; one rank calls it.
  absl::Status Save(const std::string& folder) const;

  // The model that is trained.
  BertEncoder& encoder() { return encoder_; }

 private:
  Trainer(const TrainingConfig& config, WordPieceTokenizer tokenizer,
          GlossSplit pairs, BertEncoder encoder,
          std::vector<lora::ParameterGroup> groups,
          std::shared_ptr<const distributed::DeviceMesh> mesh);

  int64_t world_size() const;
  int64_t rank() const;

  // Adds the gradients of the rank's micro-batches of this step, each divided
  // by their number; returns the mean loss.
  double AccumulateGradients();
  void ZeroGrad();
  at::Tensor MicroBatchLoss(int64_t micro_batch);
  // The pair at place `index` in the endless, shuffled order of the run.
  const GlossPair& PairAt(int64_t index);
  absl::StatusOr<double> MeanOverRanks(double value) const;
  std::vector<std::vector<int64_t>> Tokenize(
      const std::vector<std::string>& sentences) const;

  TrainingConfig config_;
  WordPieceTokenizer tokenizer_;
  GlossSplit pairs_;
  BertEncoder encoder_;
  std::shared_ptr<const distributed::DeviceMesh> mesh_;  // May be null.
  std::vector<lora::ParameterGroup> groups_;
  std::vector<at::Tensor> trainable_;
  torch::optim::AdamW optimizer_;
  // Null for a single process.
  std::unique_ptr<distributed::GradientSync> gradient_sync_;
  int64_t steps_done_ = 0;
  int64_t epoch_ = -1;
  std::vector<int64_t> epoch_order_;
};

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINER_H_
