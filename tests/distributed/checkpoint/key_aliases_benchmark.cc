// What it costs to find the names of a large checkpoint's tensors: the aliases
// of an adapted model, and the way from a key through a mapping and the aliases
// to the model's name.
//
//   bazel run -c opt //tests/distributed/checkpoint:key_aliases_benchmark
//
// vs_hash_map: the median time over that of as many lookups of the same names
// (for the building: insertions) in a std::unordered_map<std::string,
// std::string>, which takes turns with it. Less is better.
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/key_resolver.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "tests/testutil/take_turns.h"

namespace trainer_lora::distributed {
namespace {

using HashMap = std::unordered_map<std::string, std::string>;

// Of a transformer whose attention is adapted; no rule of Mapping() changes
// `checkpoint_keys`.
struct Names {
  std::vector<std::string> checkpoint_keys;
  std::vector<std::string> model_names;
};

Names MakeNames(int64_t count) {
  Names names;
  for (int64_t i = 0; i < count; ++i) {
    const char* const layers[] = {"to_q", "to_k", "to_v", "to_out"};
    const std::string layer =
        absl::StrCat("transformer_blocks.", i / 4, ".attn1.", layers[i % 4]);
    names.checkpoint_keys.push_back(absl::StrCat(layer, ".weight"));
    names.model_names.push_back(absl::StrCat(layer, ".base_layer.weight"));
  }
  return names;
}

KeyAliases MakeAliases(const Names& names) {
  KeyAliases aliases;
  for (size_t i = 0; i < names.model_names.size(); ++i) {
    benchmark::DoNotOptimize(
        aliases.Add(names.checkpoint_keys[i], names.model_names[i]));
  }
  return aliases;
}

HashMap MakeHashMap(const Names& names) {
  HashMap map;
  for (size_t i = 0; i < names.model_names.size(); ++i) {
    map.emplace(names.checkpoint_keys[i], names.model_names[i]);
  }
  return map;
}

void LookUpAll(const HashMap& map, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    benchmark::DoNotOptimize(map.find(key)->second.data());
  }
}

// 30 rules as a mapping between two families has them. The last renames the
// blocks, so each key of the other family meets it.
absl::StatusOr<StateDictMapping> MakeMapping() {
  std::vector<MappingRule> rules;
  for (int i = 0; i < 29; ++i) {
    rules.push_back(
        {absl::StrCat(R"(blocks\.(\d+)\.other)", i, R"(\.(.*))"),
         absl::StrCat(R"(transformer_blocks.\1.renamed)", i, R"(.\2)")});
  }
  rules.push_back({R"(blocks\.(\d+)\.self_attn\.(\w+)\.(weight|bias))",
                   R"(transformer_blocks.\1.attn1.\2.\3)"});
  return StateDictMapping::Create(std::move(rules));
}

// The names as the other family has them, and as a wrapped model saves them.
std::vector<std::string> KeysOfOtherFamily(int64_t count) {
  std::vector<std::string> keys;
  for (int64_t i = 0; i < count; ++i) {
    const char* const layers[] = {"to_q", "to_k", "to_v", "to_out"};
    keys.push_back(absl::StrCat("model.blocks.", i / 4, ".self_attn.",
                                layers[i % 4], ".weight"));
  }
  return keys;
}

template <typename Measured, typename Baseline>
void Compare(benchmark::State& state, const Measured& measured,
             const Baseline& baseline) {
  const auto [own, hash_map] = testutil::TakeTurns(
      state, [&] { return testutil::SecondsOnHost(measured); },
      [&] { return testutil::SecondsOnHost(baseline); });
  state.counters["vs_hash_map"] = own / hash_map;
}

void BM_BuildAliases(benchmark::State& state) {
  const Names names = MakeNames(state.range(0));
  Compare(
      state, [&] { benchmark::DoNotOptimize(MakeAliases(names)); },
      [&] { benchmark::DoNotOptimize(MakeHashMap(names)); });
}

void BM_Resolve(benchmark::State& state) {
  const Names names = MakeNames(state.range(0));
  const KeyAliases aliases = MakeAliases(names);
  const HashMap map = MakeHashMap(names);
  Compare(
      state,
      [&] {
        for (const std::string& key : names.checkpoint_keys) {
          benchmark::DoNotOptimize(aliases.Resolve(key));
        }
      },
      [&] { LookUpAll(map, names.checkpoint_keys); });
}

void BM_Reverse(benchmark::State& state) {
  const Names names = MakeNames(state.range(0));
  const KeyAliases aliases = MakeAliases(names);
  const HashMap map = MakeHashMap({names.model_names, names.checkpoint_keys});
  Compare(
      state,
      [&] {
        for (const std::string& name : names.model_names) {
          benchmark::DoNotOptimize(aliases.Reverse(name));
        }
      },
      [&] { LookUpAll(map, names.model_names); });
}

void BM_Map(benchmark::State& state) {
  const absl::StatusOr<StateDictMapping> mapping = MakeMapping();
  if (!mapping.ok()) {
    state.SkipWithError(mapping.status().ToString().c_str());
    return;
  }
  const std::vector<std::string> keys = KeysOfOtherFamily(state.range(0));
  const HashMap map = MakeHashMap({keys, keys});
  Compare(
      state,
      [&] {
        // Without "model.", which no rule has.
        for (const std::string& key : keys) {
          benchmark::DoNotOptimize(
              mapping->Map(absl::string_view(key).substr(6)));
        }
      },
      [&] { LookUpAll(map, keys); });
}

// From building the resolver to the last key.
void BM_ResolveKeys(benchmark::State& state) {
  const absl::StatusOr<StateDictMapping> mapping = MakeMapping();
  if (!mapping.ok()) {
    state.SkipWithError(mapping.status().ToString().c_str());
    return;
  }
  const Names names = MakeNames(state.range(0));
  const KeyAliases aliases = MakeAliases(names);
  const std::vector<std::string> keys = KeysOfOtherFamily(state.range(0));
  const HashMap map = MakeHashMap({keys, names.model_names});
  Compare(
      state,
      [&] {
        const KeyResolver resolver(*mapping, aliases, names.model_names);
        for (const std::string& key : keys) {
          if (!resolver.Resolve(key).has_value()) {
            state.SkipWithError("a key was not resolved");
          }
        }
      },
      [&] { LookUpAll(map, keys); });
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgName("names")->Arg(1000)->Arg(100'000)->UseManualTime()->Unit(
      benchmark::kMillisecond);
}

BENCHMARK(BM_BuildAliases)->Apply(Sizes);
BENCHMARK(BM_Resolve)->Apply(Sizes);
BENCHMARK(BM_Reverse)->Apply(Sizes);
BENCHMARK(BM_Map)->Apply(Sizes);
BENCHMARK(BM_ResolveKeys)->Apply(Sizes);

}  // namespace
}  // namespace trainer_lora::distributed
