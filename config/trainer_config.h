// A trainer's YAML file: the model roles with their LoRA settings, checked; the
// rest of the tree, handed on for the trainer to read.
//
//   absl::StatusOr<TrainerConfig> config = TrainerConfig::Load("train.yaml");
//   if (!config.ok()) return config.status();
//   for (const RoleConfig& role : config->models) {
//     std::cout << role.name << (role.trainable ? " is trained\n" : "\n");
//   }
//   YamlErrors errors = config->errors;
//   double learning_rate = 1e-4;
//   YamlMapping training(config->root["training"], "training", &errors);
//   training.Read("learning_rate", &learning_rate, "a positive number");
//   return errors.ToStatus();
//
// Overrides, as from a command line, change single values:
//
//   TrainerConfig::Load("train.yaml", {"models.student.lora.rank=32",
//                                      "training.learning_rate=1e-5"});
#ifndef TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_
#define TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "config/yaml_reader.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {

// One entry of `models`, such as student, teacher or critic.
struct RoleConfig {
  // Its key in `models`.
  std::string name;
  // Whether the role is trained: what its key `trainable` says, if it is there.
  bool trainable = true;
  // Unset without a `lora` block; check `enable` otherwise.
  std::optional<LoraConfig> lora;
  // The role's whole mapping, these keys included.
  YAML::Node node;
};

// The file as a whole.
struct TrainerConfig {
  // Reads the file at `path`, which messages call it by; a pipe, such as a
  // shell's <(command), to its end. `overrides` (see yaml_overrides.h) count as
  // if the file said so, after its merge keys; a role of `models` must be in
  // the file. kNotFound if there is none, the system's error
  // (kPermissionDenied, mostly) if it can't be opened; kInvalidArgument for a
  // directory, and with all problems of a file, one a line: text that ParseYaml
  // refuses, overrides that can't be applied, no roles, a role that is no
  // mapping, a wrong `trainable` or `lora`, LoRA enabled on a role that is not
  // trainable. The problem of a value that an override set begins with that
  // override.
  static absl::StatusOr<TrainerConfig> Load(
      const std::string& path, const std::vector<std::string>& overrides = {});

  // The same on the text of a file; `file` is its name in messages.
  static absl::StatusOr<TrainerConfig> Parse(
      absl::string_view text, absl::string_view file,
      const std::vector<std::string>& overrides = {});

  // What the run goes by, as YAML: the whole tree with overrides and merged
  // keys in their place and aliases written out, `trainable` and all fields of
  // `lora` (but unset ones) explicit in every role. Parse reads it as an equal
  // config, if it keeps within the limits of ParseYaml.
  std::string ToYaml() const;

  // In the order of the file, at least one.
  std::vector<RoleConfig> models;
  // The whole document. Nodes share one tree, also between copies of this
  // struct: use them in one thread at a time.
  YAML::Node root;
  // The file's name.
  std::string file;
  // Without errors; a copy collects those about `root`, with their place in the
  // file or the override.
  YamlErrors errors{""};
};

// Whether two configs say the same about a run: their ToYaml has the same
// values in the same order.
bool operator==(const TrainerConfig& a, const TrainerConfig& b);
inline bool operator!=(const TrainerConfig& a, const TrainerConfig& b) {
  return !(a == b);
}

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_TRAINER_CONFIG_H_
