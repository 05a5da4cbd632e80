#include "examples/sentence_encoder/training_config.h"

#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/trainer_config.h"
#include "config/yaml_reader.h"

namespace trainer_lora::examples {
namespace {

constexpr char kRole[] = "student";

const config::RoleConfig* FindRole(const config::TrainerConfig& trainer) {
  for (const config::RoleConfig& role : trainer.models) {
    if (role.name == kRole) return &role;
  }
  return nullptr;
}

void ReadAtLeast(int64_t least, const char* key, int64_t* value,
                 config::YamlMapping& mapping) {
  const std::string expected = absl::StrCat("an integer from ", least, " on");
  mapping.Read(key, value, expected);
  if (*value < least) mapping.Refuse(key, expected);
}

// A value that has to fit an int.
void ReadInt(int64_t least, const char* key, int64_t* value,
             config::YamlMapping& mapping) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  ReadAtLeast(least, key, value, mapping);
  if (*value > kMost) mapping.Refuse(key, absl::StrCat("at most ", kMost));
}

void ReadPositive(const char* key, double* value,
                  config::YamlMapping& mapping) {
  mapping.Read(key, value, "a positive number");
  if (!(*value > 0)) mapping.Refuse(key, "a positive number");
}

void ReadTraining(config::YamlMapping training, TrainingConfig& config) {
  ReadAtLeast(0, "seed", &config.seed, training);
  ReadInt(1, "held_out", &config.held_out, training);
  ReadInt(3, "max_length", &config.max_length, training);
  ReadAtLeast(1, "steps", &config.steps, training);
  ReadAtLeast(2, "batch_size", &config.batch_size, training);
  ReadAtLeast(1, "gradient_accumulation_steps",
              &config.gradient_accumulation_steps, training);
  ReadPositive("max_grad_norm", &config.max_grad_norm, training);

  config::YamlMapping optimizer = training.ReadMapping("optimizer");
  ReadPositive("learning_rate", &config.optimizer.learning_rate, optimizer);
  optimizer.Read("weight_decay", &config.optimizer.weight_decay);
  if (config.optimizer.weight_decay < 0) {
    optimizer.Refuse("weight_decay", "a number from 0 on");
  }
  ReadAtLeast(0, "warmup_steps", &config.optimizer.warmup_steps, optimizer);

  // A misspelt key would otherwise train with a default for an hour.
  training.RefuseUnknownKeys();
  optimizer.RefuseUnknownKeys();
}

}  // namespace

absl::StatusOr<TrainingConfig> TrainingConfig::Load(const std::string& path) {
  absl::StatusOr<config::TrainerConfig> trainer =
      config::TrainerConfig::Load(path);
  if (!trainer.ok()) return trainer.status();
  const config::RoleConfig* role = FindRole(*trainer);
  if (role == nullptr || !role->lora.has_value() || !role->lora->enable) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": models.", kRole,
                     ".lora.enable must be true: this example trains LoRA"));
  }
  TrainingConfig config;
  config.lora = *role->lora;
  config::YamlErrors errors(path);
  ReadTraining({trainer->root["training"], "training", &errors}, config);
  const absl::Status status = errors.ToStatus();
  if (!status.ok()) return status;
  return config;
}

}  // namespace trainer_lora::examples
