// The keys of a checkpoint, for a model and its aliases. The input has lines in
// four parts with an empty line between them: rules of a mapping, `pattern`,
// tab, `replacement`; aliases, `key`, tab, `name`; the model's names; the keys.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/key_resolver.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_input.h"

namespace trainer_lora::distributed {
namespace {

using ::trainer_lora::fuzz::IsLine;

// --- The contract of KeyResolver, one name after the other -------------------

std::string Unwrapped(absl::string_view name) {
  std::string result;
  const char* separator = "";
  for (const absl::string_view segment : absl::StrSplit(name, '.')) {
    if (segment == "_orig_mod" || segment == "_fsdp_wrapped_module" ||
        segment == "_checkpoint_wrapped_module") {
      continue;
    }
    result += separator;
    result += std::string(segment);
    separator = ".";
  }
  return result;
}

std::optional<std::string> WithoutPrefix(const std::string& key) {
  for (const char* prefix : {"module.", "base_model.model.", "transformer.",
                             "diffusion_model.", "model."}) {
    if (absl::StartsWith(key, prefix)) {
      return key.substr(std::string(prefix).size());
    }
  }
  return std::nullopt;
}

class SlowResolver {
 public:
  SlowResolver(StateDictMapping mapping, KeyAliases aliases,
               std::set<std::string> names)
      : mapping_(std::move(mapping)),
        aliases_(std::move(aliases)),
        names_(std::move(names)) {}

  std::optional<MappedKey> Resolve(const std::string& key) const {
    if (const auto name = Spelled(key)) return MappedKey{*name};
    std::optional<std::string> rest = Unwrapped(key);
    for (int prefixes = 0; rest && prefixes <= 8; ++prefixes) {
      MappedKey mapped = mapping_.Map(*rest);
      mapped.name = Unwrapped(mapped.name);
      if (const auto target = AliasTarget(mapped.name)) mapped.name = *target;
      if (const auto name = ModelName(mapped.name)) {
        mapped.name = *name;
        return mapped;
      }
      rest = WithoutPrefix(*rest);
    }
    return std::nullopt;
  }

 private:
  // The name of the model that `unwrapped` stands for. Of equal ones that
  // without wrappers, or none.
  std::optional<std::string> ModelName(const std::string& unwrapped) const {
    if (names_.count(unwrapped) != 0) return unwrapped;
    std::optional<std::string> only;
    for (const std::string& name : names_) {
      if (Unwrapped(name) != unwrapped) continue;
      if (only) return std::nullopt;
      only = name;
    }
    return only;
  }

  // The model's name that the alias leads to, or else its text.
  std::string TargetOf(const std::string& name) const {
    const std::string unwrapped = Unwrapped(name);
    return ModelName(unwrapped).value_or(unwrapped);
  }

  // Where the alias of a key without wrappers leads.
  std::optional<std::string> AliasTarget(const std::string& unwrapped) const {
    std::set<std::string> targets;
    for (const auto& [key, name] : aliases_) {
      if (key == unwrapped) return TargetOf(name);
      if (Unwrapped(key) == unwrapped) targets.insert(TargetOf(name));
    }
    if (targets.size() != 1) return std::nullopt;
    return *targets.begin();
  }

  // A name of the model that only its own spelling means.
  bool NeedsWrappers(const std::string& name) const {
    return names_.count(name) != 0 && ModelName(Unwrapped(name)) != name;
  }

  // The name for a key that spells one of several equal ones.
  std::optional<std::string> Spelled(const std::string& key) const {
    if (NeedsWrappers(key)) return key;
    for (const auto& [alias, name] : aliases_) {
      if (alias != key) continue;
      if (NeedsWrappers(name)) return name;
      const std::string target = TargetOf(name);
      // Another alias is equal to this one, and goes before it or is as good.
      const bool needs_wrappers = AliasTarget(Unwrapped(key)) != target;
      if (needs_wrappers && names_.count(target) != 0) return target;
    }
    return std::nullopt;
  }

  const StateDictMapping mapping_;
  const KeyAliases aliases_;
  const std::set<std::string> names_;
};

// -----------------------------------------------------------------------------

std::pair<std::string, std::string> SplitAtTab(const std::string& line) {
  return absl::StrSplit(line, absl::MaxSplits('\t', 1));
}

// The aliases that can be added, each as it says.
KeyAliases MakeAliases(const std::vector<std::string>& lines) {
  KeyAliases aliases;
  for (const std::string& line : lines) {
    const auto [key, name] = SplitAtTab(line);
    const std::string before(aliases.Resolve(key));
    const absl::Status status = aliases.Add(key, name);
    if (status.ok()) {
      FUZZ_CHECK(aliases.Resolve(key) == name) << key;
      FUZZ_CHECK(aliases.Resolve(aliases.Reverse(name)) == name) << name;
    } else {
      FUZZ_CHECK(status.code() == absl::StatusCode::kInvalidArgument);
      FUZZ_CHECK(IsLine(status.message())) << status;
      FUZZ_CHECK(aliases.Resolve(key) == before) << key;
    }
  }
  return aliases;
}

StateDictMapping MakeMapping(const std::vector<std::string>& lines) {
  std::vector<MappingRule> rules;
  for (const std::string& line : lines) {
    const auto [pattern, replacement] = SplitAtTab(line);
    rules.push_back({pattern, replacement});
  }
  return StateDictMapping::Create(std::move(rules))
      .value_or(StateDictMapping());
}

std::string Describe(const std::optional<MappedKey>& mapped) {
  return mapped ? "\"" + mapped->name + "\"" : "nothing";
}

void TestResolver(const StateDictMapping& mapping, const KeyAliases& aliases,
                  const std::vector<std::string>& names,
                  const std::vector<std::string>& keys) {
  const KeyResolver resolver(mapping, aliases, names);
  const std::set<std::string> name_set(names.begin(), names.end());
  const SlowResolver slow(mapping, aliases, name_set);
  for (const std::string& key : keys) {
    const std::optional<MappedKey> found = resolver.Resolve(key);
    const std::optional<MappedKey> expected = slow.Resolve(key);
    FUZZ_CHECK(Describe(found) == Describe(expected))
        << "\"" << key << "\" leads to " << Describe(found) << " instead of "
        << Describe(expected);
    FUZZ_CHECK(!found || name_set.count(found->name) != 0) << key;
    resolver.NameFor(key);
  }
}

}  // namespace
}  // namespace trainer_lora::distributed

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  namespace distributed = ::trainer_lora::distributed;
  absl::string_view input(reinterpret_cast<const char*>(data), size);
  const auto mapping =
      distributed::MakeMapping(trainer_lora::fuzz::ConsumeLines(input));
  const auto aliases =
      distributed::MakeAliases(trainer_lora::fuzz::ConsumeLines(input));
  const auto names = trainer_lora::fuzz::ConsumeLines(input);
  distributed::TestResolver(mapping, aliases, names,
                            absl::StrSplit(input, '\n'));
  return 0;
}
