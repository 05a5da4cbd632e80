// Maps the keys of a checkpoint to the names that a model has for the same
// tensors, for a model whose layers were renamed or wrapped after the
// checkpoint was saved.
//
//   KeyAliases aliases;
//   absl::Status status = aliases.Add("blocks.0.to_q.weight",
//                                     "blocks.0.to_q.base_layer.weight");
//   aliases.Resolve("blocks.0.to_q.weight");  // ...to_q.base_layer.weight
//   aliases.Resolve("blocks.0.norm.weight");  // itself: it has no alias
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_ALIASES_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_ALIASES_H_

#include <cstddef>
#include <functional>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace trainer_lora::distributed {

// A value. The const members may be called from several threads at once.
class KeyAliases {
 public:
  // Checkpoint key -> model name, ordered by key.
  using Map = std::map<std::string, std::string, std::less<>>;
  // The pair (checkpoint key, model name).
  using value_type = Map::value_type;
  // Over these pairs.
  using const_iterator = Map::const_iterator;

  // Lets `checkpoint_key` stand for `model_name`. Several keys may lead to one
  // name (a layer that the checkpoint holds under two names); adding a pair
  // again changes nothing. kInvalidArgument, with nothing added, if the key
  // leads to another name already or if either is empty.
  absl::Status Add(absl::string_view checkpoint_key,
                   absl::string_view model_name);

  // The model's name for `checkpoint_key`, or the key itself if it has no
  // alias. One step: the result is not resolved again. The view is into this
  // object or is the argument, so it lives as long as both.
  absl::string_view Resolve(absl::string_view checkpoint_key) const;

  // The checkpoint's key for `model_name`: of several the first that was
  // added, or the name itself if no alias leads to it. The view lives as
  // Resolve's does.
  absl::string_view Reverse(absl::string_view model_name) const;

  // The number of pairs.
  size_t size() const { return model_names_.size(); }
  // Whether no key has an alias.
  bool empty() const { return model_names_.empty(); }

  // The pairs (checkpoint key, model name) in the order of the keys.
  const_iterator begin() const { return model_names_.begin(); }
  // Behind the last of them.
  const_iterator end() const { return model_names_.end(); }

 private:
  Map model_names_;
  Map first_keys_;  // Model name -> the first checkpoint key added for it.
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_ALIASES_H_
