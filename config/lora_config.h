// The LoRA settings of one model role, as its YAML block has them:
//
//   models:
//     student:
//       lora:
//         enable: true              # On or off. Default: false.
//         rank: 16                  # Needed when enabled.
//         alpha: 32                 # The scale is alpha / rank. Default: rank.
//         # The layers to adapt, by the parts of their names; all-linear for
//         # all. Default: the projections of attention layers.
//         target_modules: [to_q, to_k, to_v, to_out]
//         exclude_modules: [embedder]  # Layers left alone. Default: none.
//         # How both, and the patterns below, match a name: substring (the
//         # default), exact, suffix, glob or regex.
//         target_matching: substring
//         rank_pattern: {to_out: 32}   # Another rank for some layers, ...
//         alpha_pattern: {to_out: 64}  # ... or alpha; the first match counts.
//         dropout: 0.0              # From 0 to below 1. Default: 0.
//         adapter_dtype: base       # Or float32, bfloat16, float16.
//         initialization: default   # Of lora_A; or gaussian.
//         seed: 0                   # Of the initial values. Default: 0.
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
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/name_pattern.h"

namespace YAML {
class Node;
}  // namespace YAML

namespace trainer_lora::config {

class YamlErrors;

// The type of the adapters' parameters.
enum class AdapterDtype {
  kBase,  // That of the base layer's weight.
  kFloat32,
  kBFloat16,
  kFloat16,
};

// The initial values of lora_A; lora_B is zero. The formulas are in
// lora/parameter_initializer.h.
enum class AdapterInitialization {
  kDefault,   // Uniform, with the bound of kaiming_uniform(a = sqrt(5)).
  kGaussian,  // Normal, with the standard deviation 1 / rank.
};

struct LoraConfig {
  bool enable = false;
  // The inner dimension of the adapters, from 1 to 2^31 - 1. Needed when
  // enabled.
  std::optional<int64_t> rank;
  // The adapter's output is scaled by alpha / rank. Positive, finite; fractions
  // count.
  std::optional<double> alpha;
  // The modules to adapt, as target_matching says; none is empty. The target
  // all-linear stands for every layer that can take an adapter. Unset or
  // without elements: the default targets of EnableLoraTraining, as substrings.
  std::optional<std::vector<std::string>> target_modules;
  // The modules that are left alone all the same; none is empty.
  std::vector<std::string> exclude_modules = {};
  TargetMatching target_matching = TargetMatching::kSubstring;
  // Another rank or alpha for some of the layers, as (pattern, value). The
  // first pattern that matches counts. The values are as rank and alpha are.
  std::vector<std::pair<std::string, int64_t>> rank_pattern = {};
  std::vector<std::pair<std::string, double>> alpha_pattern = {};
  // The probability with which an element of the adapter's input is dropped in
  // training, from 0 to below 1.
  double dropout = 0;
  AdapterDtype adapter_dtype = AdapterDtype::kBase;
  AdapterInitialization initialization = AdapterInitialization::kDefault;
  // Of the initial values; not negative.
  int64_t seed = 0;

  // alpha, or the rank if alpha is unset; 0 if neither is set.
  double EffectiveAlpha() const;

  // kInvalidArgument with all that is wrong with an enabled config; a disabled
  // one is valid whatever else it says. For configs built in code: Coerce
  // checks what it reads.
  absl::Status Validate() const;

  // A `lora` block of all fields but unset ones, which Coerce reads as a config
  // equal to this valid one (without duplicate targets).
  YAML::Node ToYaml() const;

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

// Field by field.
bool operator==(const LoraConfig& a, const LoraConfig& b);
inline bool operator!=(const LoraConfig& a, const LoraConfig& b) {
  return !(a == b);
}

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_LORA_CONFIG_H_
