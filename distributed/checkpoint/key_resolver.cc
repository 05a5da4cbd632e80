#include "distributed/checkpoint/key_resolver.h"

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/state_dict_mapping.h"

namespace trainer_lora::distributed {
namespace {

// More come from no known tool, and a key may be as long as a file.
constexpr int kMaxPrefixes = 8;

bool IsWrapper(absl::string_view segment) {
  return segment == "_orig_mod" || segment == "_fsdp_wrapped_module" ||
         segment == "_checkpoint_wrapped_module";
}

void RemoveWrappers(std::string& name) {
  // Nearly all names: no segment begins as those of wrappers do.
  if (!absl::StartsWith(name, "_") && !absl::StrContains(name, "._")) return;
  name = absl::StrJoin(
      absl::StrSplit(name, '.',
                     [](absl::string_view part) { return !IsWrapper(part); }),
      ".");
}

std::string WithoutWrappers(absl::string_view name) {
  std::string result(name);
  RemoveWrappers(result);
  return result;
}

// Removes what a wrapper may have put before `key`; false if there is nothing.
bool ConsumePrefix(absl::string_view& key) {
  for (const absl::string_view prefix :
       {"module.", "base_model.model.", "transformer.", "diffusion_model.",
        "model."}) {
    if (absl::ConsumePrefix(&key, prefix)) return true;
  }
  return false;
}

// Where a name leads.
struct Target {
  absl::string_view name;  // As the model spells it, if it has it.
  bool is_in_model = false;
  bool is_by_alias = false;
};

using Targets = absl::flat_hash_map<absl::string_view, Target>;

// Names, and where they lead, to be looked up without their wrappers.
class UnwrappedNames {
 public:
  explicit UnwrappedNames(size_t size) { plain_.reserve(size); }

  // `unwrapped` is `name` without wrappers. Views are kept.
  void Add(absl::string_view name, absl::string_view unwrapped, Target target) {
    if (unwrapped.size() == name.size()) {
      plain_.try_emplace(unwrapped, target);
      return;
    }
    const auto [found, is_new] = wrapped_.try_emplace(unwrapped, target);
    if (!is_new && found->second.name != target.name) {
      ambiguous_.push_back(unwrapped);
    }
  }

  // A name that had no wrapper comes before those that lost some; of several
  // that lost some none is better than another.
  Targets Build() && {
    for (const absl::string_view name : ambiguous_) wrapped_.erase(name);
    plain_.insert(wrapped_.begin(), wrapped_.end());
    return std::move(plain_);
  }

 private:
  Targets plain_;
  Targets wrapped_;
  std::vector<absl::string_view> ambiguous_;
};

}  // namespace

struct KeyResolver::Tables {
  Tables(const KeyAliases& aliases, absl::Span<const std::string> model_names);
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  absl::string_view Keep(std::string text) {
    return texts.emplace_back(std::move(text));
  }

  // What the views are of: a deque does not move its elements.
  std::deque<std::string> texts;

  // For the names of the aliases and, where there is no alias, of the model,
  // without wrappers: one look-up finds alias and tensor.
  Targets targets;

  // For keys that need their wrappers: the model's name.
  absl::flat_hash_map<absl::string_view, absl::string_view> spelled_out;
};

struct KeyResolver::MappedTarget {
  MappedKey key;
  bool is_in_model;
};

KeyResolver::Tables::Tables(const KeyAliases& aliases,
                            absl::Span<const std::string> model_names) {
  UnwrappedNames names(model_names.size() + aliases.size());
  std::vector<std::pair<absl::string_view, absl::string_view>> wrapped;
  for (const std::string& model_name : model_names) {
    const absl::string_view unwrapped = Keep(WithoutWrappers(model_name));
    if (unwrapped == model_name) {
      names.Add(unwrapped, unwrapped, {unwrapped, true});
      continue;
    }
    const absl::string_view name = Keep(model_name);
    names.Add(name, unwrapped, {name, true});
    wrapped.emplace_back(name, unwrapped);
  }
  targets = std::move(names).Build();

  for (const auto& [name, unwrapped] : wrapped) {
    const auto found = targets.find(unwrapped);
    if (found == targets.end() || found->second.name != name) {
      spelled_out.emplace(name, name);
    }
  }

  struct WrappedAlias {
    absl::string_view key;
    absl::string_view unwrapped;
    Target target;
  };
  std::vector<WrappedAlias> wrapped_aliases;
  UnwrappedNames keys(aliases.size());
  for (const auto& [key, model_name] : aliases) {
    // Not an entry that another alias has made: aliases apply once.
    if (const auto found = spelled_out.find(model_name);
        found != spelled_out.end() && found->second == model_name) {
      const absl::string_view name = found->second;
      spelled_out.emplace(Keep(key), name);
    }
    std::string name = WithoutWrappers(model_name);
    const auto found = targets.find(name);
    Target target =
        found == targets.end() ? Target{Keep(std::move(name))} : found->second;
    target.is_by_alias = true;
    const absl::string_view unwrapped = Keep(WithoutWrappers(key));
    keys.Add(key, unwrapped, target);
    if (unwrapped != key) wrapped_aliases.push_back({key, unwrapped, target});
  }
  const Targets key_targets = std::move(keys).Build();
  for (const auto& [key, unwrapped, target] : wrapped_aliases) {
    const auto found = key_targets.find(unwrapped);
    const bool is_found_without =
        found != key_targets.end() && found->second.name == target.name;
    if (target.is_in_model && !is_found_without) {
      spelled_out.emplace(Keep(std::string(key)), target.name);
    }
  }
  for (const auto& [key, target] : key_targets) {
    targets.insert_or_assign(key, target);
  }
}

KeyResolver::KeyResolver(StateDictMapping mapping, const KeyAliases& aliases,
                         absl::Span<const std::string> model_names)
    : mapping_(std::move(mapping)),
      tables_(std::make_shared<const Tables>(aliases, model_names)) {}

std::optional<MappedKey> KeyResolver::Resolve(absl::string_view key) const {
  if (const auto found = tables_->spelled_out.find(key);
      found != tables_->spelled_out.end()) {
    MappedKey mapped = {std::string(found->second)};
    if (mapped.name != key) mapped.alias = std::string(key);
    return mapped;
  }
  const std::string unwrapped = WithoutWrappers(key);
  absl::string_view rest = unwrapped;
  for (int prefixes = 0; prefixes <= kMaxPrefixes; ++prefixes) {
    MappedTarget mapped = Lead(rest);
    if (mapped.is_in_model) return std::move(mapped.key);
    if (!ConsumePrefix(rest)) break;
  }
  return std::nullopt;
}

std::string KeyResolver::NameFor(absl::string_view key) const {
  return Lead(WithoutWrappers(key)).key.name;
}

KeyResolver::MappedTarget KeyResolver::Lead(absl::string_view key) const {
  MappedKey mapped = mapping_.Map(key);
  // A replacement may spell the wrappers of the model that it was written for.
  RemoveWrappers(mapped.name);
  const auto found = tables_->targets.find(mapped.name);
  if (found == tables_->targets.end()) return {std::move(mapped), false};
  if (found->second.is_by_alias && mapped.name != found->second.name) {
    mapped.alias = std::move(mapped.name);
  }
  mapped.name = std::string(found->second.name);
  return {std::move(mapped), found->second.is_in_model};
}

}  // namespace trainer_lora::distributed
