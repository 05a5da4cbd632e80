// A trainer's YAML file: the model roles with their LoRA settings, checked; the
// rest of the tree, handed on for the trainer to read.
//
//   absl::StatusOr<TrainerConfig> config = TrainerConfig::Load("train.yaml");
//   if (!config.ok()) return config.status();
//   for (const RoleConfig& role : config->models) {
//     std::cout << role.name << (role.trainable ? " is trained\n" : "\n");
//   }
//   YamlErrors errors(config->file);
//   double learning_rate = 1e-4;
//   YamlMapping training(config->root["training"], "training", &errors);
//   training.Read("learning_rate", &learning_rate, "a positive number");
//   return errors.ToStatus();
#ifndef TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_
#define TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {

// One entry of `models`, such as student, teacher or critic.
struct RoleConfig {
  std::string name;
  bool trainable = true;
  // Unset without a `lora` block; check `enable` otherwise.
  std::optional<LoraConfig> lora;
  // The role's whole mapping, these keys included.
  YAML::Node node;
};

struct TrainerConfig {
  // Reads the file at `path`, which messages call it by.
  // kNotFound if there is none, the system's error (kPermissionDenied, mostly)
  // if it can't be opened; kInvalidArgument for a directory, and with all
  // problems of a file, one a line: text that
  // ParseYaml refuses, no roles, a role that is no mapping, a wrong `trainable`
  // or `lora`, LoRA enabled on a role that is not trainable.
  static absl::StatusOr<TrainerConfig> Load(const std::string& path);

  // The same on the text of a file; `file` is its name in messages.
  static absl::StatusOr<TrainerConfig> Parse(absl::string_view text,
                                             absl::string_view file);

  // In the order of the file, at least one.
  std::vector<RoleConfig> models;
  // The whole document. Nodes share one tree, also between copies of this
  // struct: use them in one thread at a time.
  YAML::Node root;
  // The file's name, for messages about `root`.
  std::string file;
};

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_
