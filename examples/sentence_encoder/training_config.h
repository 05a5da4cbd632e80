// The YAML file of the sentence encoder's training run.
//
//   absl::StatusOr<TrainingConfig> config = TrainingConfig::Load("train.yaml");
//   if (!config.ok()) return config.status();
//   config->optimizer.learning_rate;  // 1e-3
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINING_CONFIG_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINING_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "config/lora_config.h"

namespace trainer_lora::examples {

struct OptimizerConfig {
  double learning_rate = 1e-3;  // After the warm-up.
  double weight_decay = 0.01;
  int64_t warmup_steps = 0;  // The rate rises linearly over so many steps.
};

// The fields are called as their keys below `training`.
struct TrainingConfig {
  // Reads `models.student.lora` and `training`. kNotFound without the file;
  // kInvalidArgument with every problem of it, one a line with its place.
  static absl::StatusOr<TrainingConfig> Load(const std::string& path);

  // Of the role `student`; enabled.
  config::LoraConfig lora;

  int64_t seed = 0;
  int64_t held_out = 1000;
  int64_t max_length = 64;
  int64_t steps = 60;
  int64_t batch_size = 32;
  int64_t gradient_accumulation_steps = 1;
  double max_grad_norm = 1.0;
  OptimizerConfig optimizer;
};

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_TRAINING_CONFIG_H_
