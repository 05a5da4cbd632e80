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
//         # The blocks to adapt, by index, ends included. Default: all. The
//         # index of a layer is the first number in its name, or, with
//         # layers_pattern, the number after one of these.
//         layers_to_transform: [0, 3, 8-11]
//         layers_pattern: [blocks]
//         rank_pattern: {to_out: 32}   # Another rank for some layers, ...
//         alpha_pattern: {to_out: 64}  # ... or alpha; the first match counts.
//         use_rslora: false         # The scale is alpha / sqrt(rank).
//         use_dora: false           # A magnitude for each output feature.
//         dropout: 0.0              # From 0 to below 1. Default: 0.
//         bias: none                # Or lora_only, all: biases to train.
//         adapter_dtype: base       # Or float32, bfloat16, float16.
//         initialization: default   # Or gaussian, pissa, olora.
//         seed: 0                   # Of the initial values. Default: 0.
//         # The learning rate of lora_B over that of lora_A. Default: 1.
//         loraplus_lr_ratio: 16
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

// The initial values of the adapters. With the first two lora_B is zero, and
// the formulas are in lora/parameter_initializer.h; the others start both
// factors from the base layer's weight.
enum class AdapterInitialization {
  // Uniform, with the bound of kaiming_uniform(a = sqrt(5)).
  kDefault,
  // Normal, with the standard deviation 1 / rank.
  kGaussian,
  // The principal singular vectors and values of the weight (PiSSA: Meng et
  // al., 2024, arXiv 2404.02948).
  kPissa,
  // Its QR decomposition (OLoRA: Büyükakyüz, 2024, arXiv 2406.01775).
  kOlora,
};

// Whether it takes the start of an adapter out of the base weight. What stays
// behind is the layer's weight only together with this adapter, which is
// therefore the only one, and always active.
constexpr bool StartsFromBase(AdapterInitialization initialization) {
  return initialization == AdapterInitialization::kPissa ||
         initialization == AdapterInitialization::kOlora;
}

// The biases that are trained beside the adapters. Those other than kNone
// change what the model computes without its adapters too.
enum class BiasTraining {
  kNone,
  kLoraOnly,  // Those of the adapted layers.
  kAll,       // Those of the whole model.
};

// The layers (blocks) of a model with these indices, both ends included.
struct LayerRange {
  // The smallest index, not negative.
  int64_t first = 0;
  // The largest index, not below `first`.
  int64_t last = 0;
};

// Field by field.
inline bool operator==(const LayerRange& a, const LayerRange& b) {
  return a.first == b.first && a.last == b.last;
}
inline bool operator!=(const LayerRange& a, const LayerRange& b) {
  return !(a == b);
}

// As YAML has it: "8-11", or "3" for a range of one.
std::string ToString(const LayerRange& range);

// The values of a `lora` block.
struct LoraConfig {
  // Whether the role is trained with LoRA; if not, the rest has no effect.
  bool enable = false;
  // The inner dimension of the adapters, from 1 to 2^31 - 1. Needed when
  // enabled.
  std::optional<int64_t> rank;
  // The adapter's output is scaled by alpha / rank, or as use_rslora says.
  // Positive, finite; fractions count.
  std::optional<double> alpha;
  // The modules to adapt, as target_matching says; none is empty. The target
  // all-linear stands for every layer that can take an adapter. Unset or
  // without elements: the default targets of EnableLoraTraining, as substrings.
  std::optional<std::vector<std::string>> target_modules;
  // The modules that are left alone all the same; none is empty.
  std::vector<std::string> exclude_modules = {};
  // How targets, exclusions and the patterns of rank_pattern and alpha_pattern
  // match the name of a module.
  TargetMatching target_matching = TargetMatching::kSubstring;
  // Of the modules to adapt, those in these layers alone: at least one range,
  // from 0 on, none of which overlap. Unset: all layers. A layer's index is the
  // first number among the dot-separated components of its name: 7 in
  // blocks.7.attn.to_q.
  std::optional<std::vector<LayerRange>> layers_to_transform = {};
  // The index is instead the number after one of these components, the names of
  // lists of modules, such as blocks or transformer.h; the first of them that a
  // name has counts. None is empty. Only with layers_to_transform.
  std::vector<std::string> layers_pattern = {};
  // Another rank for some of the layers, as (pattern, rank). The first pattern
  // that matches counts. A rank is as `rank` is.
  std::vector<std::pair<std::string, int64_t>> rank_pattern = {};
  // Another alpha for some of the layers, as (pattern, alpha), likewise.
  std::vector<std::pair<std::string, double>> alpha_pattern = {};
  // Scales by alpha / sqrt(rank), which keeps adapters of a high rank learning
  // (rsLoRA: Kalajdzievski, 2023, arXiv 2312.03732).
  bool use_rslora = false;
  // Trains the magnitude of each row of the weight apart from its direction,
  // which the adapter changes (DoRA: Liu et al., 2024, arXiv 2402.09353).
  bool use_dora = false;
  // The probability with which an element of the adapter's input is dropped in
  // training, from 0 to below 1.
  double dropout = 0;
  // The biases to train beside the adapters.
  BiasTraining bias = BiasTraining::kNone;
  // The type of the adapters' parameters.
  AdapterDtype adapter_dtype = AdapterDtype::kBase;
  // How the adapters start.
  AdapterInitialization initialization = AdapterInitialization::kDefault;
  // Of the initial values; not negative.
  int64_t seed = 0;
  // The learning rate of lora_B over that of lora_A (LoRA+: Hayou et al., 2024,
  // arXiv 2402.12354), for lora/parameter_groups.h. Positive, finite; below 1
  // has a warning. Unset: one rate for both.
  std::optional<double> loraplus_lr_ratio = {};

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
  // mapping. Duplicate names of modules are merged. Unknown keys are ignored
  // with a warning; a rank in a disabled block with an INFO line.
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
