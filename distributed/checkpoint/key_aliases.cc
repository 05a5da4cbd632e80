#include "distributed/checkpoint/key_aliases.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/internal/message_text.h"

namespace trainer_lora::distributed {
namespace {

absl::string_view Lookup(const KeyAliases::Map& map, absl::string_view key) {
  const auto found = map.find(key);
  return found == map.end() ? key : absl::string_view(found->second);
}

}  // namespace

absl::Status KeyAliases::Add(absl::string_view checkpoint_key,
                             absl::string_view model_name) {
  if (checkpoint_key.empty() || model_name.empty()) {
    return absl::InvalidArgumentError(config::Printable(
        absl::StrCat("the alias \"", checkpoint_key, "\" -> \"", model_name,
                     "\" has an empty side")));
  }
  const auto [alias, added] = model_names_.try_emplace(
      std::string(checkpoint_key), std::string(model_name));
  if (!added && alias->second != model_name) {
    return absl::InvalidArgumentError(config::Printable(absl::StrCat(
        "the checkpoint key \"", checkpoint_key, "\" can't lead to \"",
        model_name, "\": it leads to \"", alias->second, "\" already")));
  }
  first_keys_.try_emplace(std::string(model_name), std::string(checkpoint_key));
  return absl::OkStatus();
}

absl::string_view KeyAliases::Resolve(absl::string_view checkpoint_key) const {
  return Lookup(model_names_, checkpoint_key);
}

absl::string_view KeyAliases::Reverse(absl::string_view model_name) const {
  return Lookup(first_keys_, model_name);
}

}  // namespace trainer_lora::distributed
