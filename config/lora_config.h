// The LoRA settings of one model role, as its YAML block has them:
//
//   models:
//     student:
//       lora:
//         enable: true                       # false when left out
//         rank: 16
//         alpha: 32                          # rank when left out
//         target_modules: [to_q, to_k, to_v, to_out]
//
//   absl::StatusOr<std::optional<LoraConfig>> lora =
//       LoraConfig::Coerce(root["models"]["student"]["lora"], "train.yaml",
//                          "models.student.lora");
//   if (!lora.ok()) return lora.status();
//   const bool enabled = lora->has_value() && (*lora)->enable;
//
// `enable` alone turns LoRA on; a rank by itself never does.
#ifndef TRAINER_LORA_CONFIG_LORA_CONFIG_H_
#define TRAINER_LORA_CONFIG_LORA_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace YAML {
class Node;
}  // namespace YAML

namespace trainer_lora::config {

class YamlErrors;

struct LoraConfig {
  bool enable = false;
  // The inner dimension of the adapters, from 1 to 2^31 - 1. Needed when
  // enabled.
  std::optional<int64_t> rank;
  // The adapter's output is scaled by alpha / rank. Positive, finite; fractions
  // count.
  std::optional<double> alpha;
  // Substrings of the names of the modules to adapt, none of them empty. Unset
  // or without elements: the default targets of EnableLoraTraining.
  std::optional<std::vector<std::string>> target_modules;

  // alpha, or the rank if alpha is unset; 0 if neither is set.
  double EffectiveAlpha() const;

  // kInvalidArgument with all that is wrong with an enabled config; a disabled
  // one is valid whatever else it says. For configs built in code: Coerce
  // checks what it reads.
  absl::Status Validate() const;

  // Reads a `lora` block. Nothing for an undefined or null node, which has the
  // effect of `enable: false`.
  // kInvalidArgument, one line a problem, each with `file`, line, column and
  // the key below `path`, for values of another type (in a disabled block too)
  // or, if enabled, out of range, for a missing rank, and for a node that is no
  // mapping. Duplicate targets are merged. Unknown keys are ignored with a
  // warning; a rank in a disabled block with an INFO line.
  static absl::StatusOr<std::optional<LoraConfig>> Coerce(
      const YAML::Node& node, absl::string_view file, absl::string_view path);

  // The same as part of a larger file, whose problems `errors` collects;
  // nothing if there were any.
  static std::optional<LoraConfig> Coerce(const YAML::Node& node,
                                          absl::string_view path,
                                          YamlErrors* errors);

  // Checks a config built in code and gives it back as it is.
  static absl::StatusOr<std::optional<LoraConfig>> Coerce(
      std::optional<LoraConfig> config);
};

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_LORA_CONFIG_H_
