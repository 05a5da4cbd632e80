// Which modules of a model a list of targets and exclusions selects.
//
//   LORA_ASSIGN_OR_RETURN(TargetMatcher matcher,
//                         TargetMatcher::Create({"to_q", "to_v"},
//                         {"embedder"}));
//   matcher.Selects("blocks.0.attn1.to_q");  // true
//   matcher.Selects("embedder.to_q");        // false
#ifndef TRAINER_LORA_LORA_TARGET_MATCHER_H_
#define TRAINER_LORA_LORA_TARGET_MATCHER_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace trainer_lora::lora {

// The targets of a configuration that names none: the attention projections
// under the names that language models (q_proj, ...) and diffusion
// transformers (to_q, ...) give them.
const std::vector<std::string>& DefaultLoraTargetModules();

// An immutable pair of target and exclusion lists; safe to share between
// threads. A pattern matches a module whose full, dotted name contains it.
class TargetMatcher {
 public:
  // An empty `targets` stands for DefaultLoraTargetModules(). Repeated entries
  // are merged. kInvalidArgument for an empty string, which would match
  // everything.
  static absl::StatusOr<TargetMatcher> Create(
      std::vector<std::string> targets, std::vector<std::string> exclusions);

  // Whether at least one target and no exclusion matches. The empty name, that
  // of the root module, is never selected.
  bool Selects(absl::string_view module_name) const;

  // The targets that match the name, whatever the exclusions say, in the order
  // of targets().
  std::vector<std::string> MatchingTargets(absl::string_view module_name) const;

  // In the order given, without repetitions.
  const std::vector<std::string>& targets() const { return targets_; }

 private:
  TargetMatcher(std::vector<std::string> targets,
                std::vector<std::string> exclusions);

  std::vector<std::string> targets_;
  std::vector<std::string> exclusions_;
};

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_TARGET_MATCHER_H_
