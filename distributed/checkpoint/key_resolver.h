// Finds the tensor of a model that a checkpoint's key stands for, whatever
// wrappers either of them was saved or built with:
//
//   const KeyResolver resolver(mapping, aliases, {"blocks.0.to_q.weight"});
//   // The name below for each of these keys:
//   //   blocks.0.to_q.weight
//   //   module._orig_mod.blocks.0.to_q.weight
//   //   base_model.model.blocks.0._fsdp_wrapped_module.to_q.weight
//   resolver.Resolve(key)->name;     // blocks.0.to_q.weight
//   resolver.Resolve("head.weight");  // nullopt
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_RESOLVER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_RESOLVER_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/state_dict_mapping.h"

namespace trainer_lora::distributed {

// Leads from a key to a name, in this order:
//
// 1. The segments _orig_mod, _fsdp_wrapped_module and
//    _checkpoint_wrapped_module are left out wherever they are. They are never
//    part of a genuine name.
// 2. The mapping applies, then the aliases, once.
// 3. If the model has no tensor of that name, the key loses what it begins
//    with, module., base_model.model., transformer., diffusion_model. or
//    model., and step 2 is tried again; up to eight times. These may be
//    genuine, so the key that lost the fewest wins.
//
// The names of the model and of the aliases are compared without the segments
// of step 1 too. If several are equal then, such as x._orig_mod.w and x.w, a
// key that spells one of them means that one; any other key means the one that
// has no such segment, or, if all have some, none.
//
// An immutable value; cheap to copy, safe to share between threads.
class KeyResolver {
 public:
  // Copies what it needs of its arguments.
  KeyResolver(StateDictMapping mapping, const KeyAliases& aliases,
              absl::Span<const std::string> model_names);

  // The tensor that `key` stands for, `name` being one of the model's names as
  // the model spells it, which part of it, and the alias that led there, as
  // step 2 met it; nothing if the model has no such tensor.
  std::optional<MappedKey> Resolve(absl::string_view key) const;

  // The name that `key` leads to by the steps 1 and 2, whether the model has
  // it or not: what to say of a key that Resolve() finds no tensor for.
  std::string NameFor(absl::string_view key) const;

 private:
  struct Tables;
  struct MappedTarget;

  // Step 2, for a key without wrappers.
  MappedTarget Lead(absl::string_view key) const;

  StateDictMapping mapping_;
  std::shared_ptr<const Tables> tables_;
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_KEY_RESOLVER_H_
