// Which modules the targets, exclusions and layers of a configuration select,
// by name.
//
//   config::LoraConfig config;
//   config.target_modules = {"to_q", "to_v"};
//   config.exclude_modules = {"embedder"};
//   config.layers_to_transform = {{{0, 3}}};
//   LORA_ASSIGN_OR_RETURN(TargetMatcher matcher,
//                         TargetMatcher::Create(config));
//   matcher.MatchingTargets("blocks.0.attn.to_v");  // {1}
//   matcher.IsExcluded("embedder.to_q");            // true
//   matcher.IsInLayers("blocks.4.attn.to_v");       // false
#ifndef TRAINER_LORA_LORA_TARGET_MATCHER_H_
#define TRAINER_LORA_LORA_TARGET_MATCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "config/name_pattern.h"

namespace trainer_lora::lora {

// The targets of a configuration that names none: the attention projections
// under the names that language models (q_proj, ...) and diffusion
// transformers (to_q, ...) give them.
const std::vector<std::string>& DefaultLoraTargetModules();

// The target that stands for every layer that can take an adapter.
inline constexpr char kAllLinear[] = "all-linear";

// The first number among the components of a module's name that stands after
// what `list` matches; nothing if there is none.
std::optional<int64_t> LayerIndexAfter(const config::NamePattern& list,
                                       absl::string_view module_name);

// Immutable; safe to share between threads.
class TargetMatcher {
 public:
  // Patterns of `config`, as its target_matching says; without targets, the
  // default ones, which are substrings. `architecture_exclusions` are
  // substrings too. Repeated targets are merged. kInvalidArgument for a pattern
  // that NamePattern refuses, and for an empty name in layers_pattern.
  static absl::StatusOr<TargetMatcher> Create(
      const config::LoraConfig& config,
      const std::vector<std::string>& architecture_exclusions = {});

  // The targets that match, as indices into targets(), ascending. Whether the
  // name is excluded makes no difference.
  std::vector<size_t> MatchingTargets(absl::string_view module_name) const;

  // Whether an exclusion matches, of the configuration or the architecture.
  bool IsExcluded(absl::string_view module_name) const;

  // The index of the layer (block) that the module is in: the number after the
  // first of layer_lists() that has one. Nothing for a name without.
  std::optional<int64_t> LayerIndex(absl::string_view module_name) const;

  // Whether that index is in one of layer_ranges(); true if there are none.
  bool IsInLayers(absl::string_view module_name) const;

  // In the order given, without repetitions.
  const std::vector<std::string>& targets() const { return targets_; }
  // Those of the configuration, in the order given.
  const std::vector<config::NamePattern>& exclusions() const {
    return exclusions_;
  }
  // layers_to_transform, in the order given; none stands for all layers.
  const std::vector<config::LayerRange>& layer_ranges() const {
    return layer_ranges_;
  }
  // layers_pattern, in the order given; without it, one that matches any name.
  const std::vector<config::NamePattern>& layer_lists() const {
    return layer_lists_;
  }

 private:
  TargetMatcher() = default;

  std::vector<std::string> targets_;
  std::vector<config::NamePattern> target_patterns_;  // of targets_, in order
  std::vector<config::NamePattern> exclusions_;
  std::vector<config::NamePattern> architecture_exclusions_;
  std::vector<config::LayerRange> layer_ranges_;
  std::vector<config::NamePattern> layer_lists_;
};

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_TARGET_MATCHER_H_
