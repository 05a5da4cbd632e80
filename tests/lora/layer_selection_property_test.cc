// Random models and configurations: EnableLoraTraining adapts exactly the
// layers that a plain reference matcher picks, and nothing else changes.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/lora_config.h"
#include "config/name_pattern.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/log_capture.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAreArray;
using ::trainer_lora::config::LogLevel;
using ::trainer_lora::config::TargetMatching;
using ::trainer_lora::testutil::LogCapture;

using Random = std::mt19937;

int Below(int limit, Random& random) {
  return static_cast<int>(random() % static_cast<unsigned>(limit));
}

// Few names, so that targets hit often and names contain each other.
std::string RandomName(Random& random) {
  static const char* const kNames[] = {"to_q",   "to_qkv", "q",    "attn",
                                       "ff",     "0",      "1",    "10",
                                       "a_to_q", "proj",   "norm", "to_k"};
  return kNames[Below(std::size(kNames), random)];
}

// A tree of modules, and what a reader of its constructor knows of it.
struct Tree {
  std::shared_ptr<torch::nn::Module> root =
      std::make_shared<torch::nn::Module>("Root");
  std::vector<std::string> adaptable;
  std::vector<std::string> stock;
};

void Grow(torch::nn::Module& parent, const std::string& prefix, int depth,
          Tree& tree, Random& random) {
  std::set<std::string> taken;
  for (int i = Below(5, random); i >= 0; --i) {
    const std::string key = RandomName(random);
    if (!taken.insert(key).second) continue;
    const std::string name = prefix + key;
    switch (Below(depth > 0 ? 5 : 3, random)) {
      case 0:
        parent.register_module(key, ReplicatedLinear(2, 3));
        tree.adaptable.push_back(name);
        break;
      case 1:
        parent.register_module(key, torch::nn::Linear(2, 3));
        tree.stock.push_back(name);
        break;
      case 2:
        parent.register_module(
            key, torch::nn::LayerNorm(torch::nn::LayerNormOptions({2})));
        break;
      default: {
        auto child = std::make_shared<torch::nn::Module>("Block");
        parent.register_module(key, child);
        Grow(*child, name + ".", depth - 1, tree, random);
      }
    }
  }
}

// One step a character, with every choice tried.
bool GlobMatches(const char* glob, const char* name) {
  if (*glob == '\0') return *name == '\0';
  if (*glob == '*') {
    return GlobMatches(glob + 1, name) ||
           (*name != '\0' && GlobMatches(glob, name + 1));
  }
  return *name != '\0' && (*glob == '?' || *glob == *name) &&
         GlobMatches(glob + 1, name + 1);
}

bool Matches(const std::string& pattern, TargetMatching matching,
             const std::string& name) {
  if (pattern == "all-linear") return true;
  switch (matching) {
    case TargetMatching::kSubstring:
      return name.find(pattern) != std::string::npos;
    case TargetMatching::kExact:
      return name == pattern;
    case TargetMatching::kSuffix: {
      std::vector<std::string> parts = absl::StrSplit(name, '.');
      while (!parts.empty()) {
        if (absl::StrJoin(parts, ".") == pattern) return true;
        parts.erase(parts.begin());
      }
      return false;
    }
    case TargetMatching::kGlob:
      return GlobMatches(pattern.c_str(), name.c_str());
    case TargetMatching::kRegex:
      return std::regex_match(name, std::regex(pattern));
  }
  return false;
}

std::string RandomPattern(TargetMatching matching, Random& random) {
  const std::string name = RandomName(random);
  switch (matching) {
    case TargetMatching::kSubstring:
      return Below(2, random) == 0 ? name : absl::StrCat(".", name);
    case TargetMatching::kExact:
    case TargetMatching::kSuffix:
      return Below(2, random) == 0
                 ? name
                 : absl::StrCat(RandomName(random), ".", name);
    case TargetMatching::kGlob:
      switch (Below(3, random)) {
        case 0:
          return absl::StrCat("*", name);
        case 1:
          return absl::StrCat("*.", name, "*");
        default:
          return absl::StrCat("*", name.substr(0, name.size() - 1), "?");
      }
    case TargetMatching::kRegex:
      return Below(2, random) == 0 ? absl::StrCat("(.*\\.)?", name)
                                   : absl::StrCat(".*[", name, "]");
  }
  return name;
}

config::LoraConfig RandomConfig(Random& random) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 1;
  config.target_matching = static_cast<TargetMatching>(Below(5, random));
  config.target_modules.emplace();
  for (int i = Below(3, random); i >= 0; --i) {
    config.target_modules->push_back(
        Below(10, random) == 0 ? "all-linear"
                               : RandomPattern(config.target_matching, random));
  }
  for (int i = Below(3, random); i > 0; --i) {
    config.exclude_modules.push_back(
        RandomPattern(config.target_matching, random));
  }
  if (Below(2, random) == 0) return config;
  // Disjoint, in any order.
  std::vector<config::LayerRange> ranges;
  for (int64_t first = Below(2, random); first <= 10;) {
    const int64_t last = first + Below(4, random);
    ranges.push_back({first, last});
    first = last + 1 + Below(9, random);
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  config.layers_to_transform = ranges;
  if (Below(3, random) > 0) return config;
  for (int i = Below(3, random); i >= 0; --i) {
    const std::string list = RandomName(random);
    config.layers_pattern.push_back(
        Below(4, random) == 0 ? absl::StrCat(RandomName(random), ".", list)
                              : list);
  }
  return config;
}

// The only numbers among the names that the tree is made of.
std::optional<int64_t> IndexOf(const std::string& component) {
  if (component == "0") return 0;
  if (component == "1") return 1;
  if (component == "10") return 10;
  return std::nullopt;
}

// From the first component on, with every end of a list tried.
std::optional<int64_t> LayerIndex(const config::LoraConfig& config,
                                  const std::string& name) {
  const std::vector<std::string> parts = absl::StrSplit(name, '.');
  std::vector<std::string> lists = config.layers_pattern;
  if (lists.empty()) lists = {""};
  for (const std::string& list : lists) {
    const std::vector<std::string> wanted =
        absl::StrSplit(list, '.', absl::SkipEmpty());
    for (size_t i = wanted.size(); i < parts.size(); ++i) {
      const auto before = parts.begin() + static_cast<int64_t>(i);
      if (std::equal(wanted.rbegin(), wanted.rend(),
                     std::make_reverse_iterator(before)) &&
          IndexOf(parts[i])) {
        return IndexOf(parts[i]);
      }
    }
  }
  return std::nullopt;
}

bool IsIn(const config::LayerRange& range, std::optional<int64_t> index) {
  return index && *index >= range.first && *index <= range.last;
}

bool IsInLayers(const config::LoraConfig& config, const std::string& name) {
  if (!config.layers_to_transform) return true;
  for (const config::LayerRange& range : *config.layers_to_transform) {
    if (IsIn(range, LayerIndex(config, name))) return true;
  }
  return false;
}

// Whether there is a range that none of `names` is in.
bool HasIdleRange(const config::LoraConfig& config,
                  const std::vector<std::string>& names) {
  if (!config.layers_to_transform) return false;
  for (const config::LayerRange& range : *config.layers_to_transform) {
    if (std::none_of(names.begin(), names.end(), [&](const std::string& name) {
          return IsIn(range, LayerIndex(config, name));
        })) {
      return true;
    }
  }
  return false;
}

bool Selected(const config::LoraConfig& config, const std::string& name) {
  const auto matches = [&](const std::string& pattern) {
    return Matches(pattern, config.target_matching, name);
  };
  return std::any_of(config.target_modules->begin(),
                     config.target_modules->end(), matches) &&
         IsInLayers(config, name) &&
         std::none_of(config.exclude_modules.begin(),
                      config.exclude_modules.end(), matches);
}

std::vector<std::string> SelectedOf(const std::vector<std::string>& names,
                                    const config::LoraConfig& config) {
  std::vector<std::string> selected;
  for (const std::string& name : names) {
    if (Selected(config, name)) selected.push_back(name);
  }
  return selected;
}

TEST(LayerSelectionPropertyTest, AdaptsWhatAPlainReferencePicks) {
  constexpr int kModels = 1000;
  int models_with_layers = 0;
  int models_with_ranges = 0;
  for (uint32_t seed = 0; seed < kModels; ++seed) {
    Random random(seed);
    Tree tree;
    Grow(*tree.root, "", 3, tree, random);
    const config::LoraConfig config = RandomConfig(random);
    const std::vector<std::string> expected =
        SelectedOf(tree.adaptable, config);
    SCOPED_TRACE(absl::StrCat(
        "seed ", seed, ", mode ", static_cast<int>(config.target_matching),
        ", targets ", absl::StrJoin(*config.target_modules, " "),
        ", exclusions ", absl::StrJoin(config.exclude_modules, " "),
        ", layers ",
        absl::StrJoin(config.layers_to_transform.value_or(
                          std::vector<config::LayerRange>()),
                      " ",
                      [](std::string* out, const config::LayerRange& range) {
                        absl::StrAppend(out, ToString(range));
                      }),
        " of ", absl::StrJoin(config.layers_pattern, " ")));

    LogCapture logs;
    const auto training = EnableLoraTraining(*tree.root, config);
    if (expected.empty()) {
      EXPECT_EQ(training.status().code(), absl::StatusCode::kInvalidArgument);
      for (const NamedLoraLayer& item : LoraLayers(*tree.root)) {
        EXPECT_FALSE(item.layer->is_adapted());
      }
      continue;
    }
    ++models_with_layers;
    if (config.layers_to_transform) ++models_with_ranges;
    ASSERT_TRUE(training.ok()) << training.status();
    EXPECT_THAT(training->layer_names, ElementsAreArray(expected));
    std::vector<std::string> trainable;
    for (const std::string& name : expected) {
      trainable.push_back(name + ".lora_A");
      trainable.push_back(name + ".lora_B");
    }
    std::vector<std::string> found;
    for (const NamedParameter& item : TrainableParameters(*tree.root)) {
      found.push_back(item.name);
    }
    EXPECT_THAT(found, ElementsAreArray(trainable));

    // A warning for each stock layer that was meant; none is skipped silently.
    const std::string warnings =
        absl::StrJoin(logs.Messages(LogLevel::kWarning), "\n");
    EXPECT_EQ(warnings.find("torch::nn::Linear") != std::string::npos,
              !SelectedOf(tree.stock, config).empty());
    EXPECT_EQ(warnings.find("layers_to_transform") != std::string::npos,
              HasIdleRange(config, expected));
  }
  // The generator is of use: neither all nor nothing is selected.
  EXPECT_GT(models_with_layers, kModels / 6);
  EXPECT_LT(models_with_layers, kModels);
  EXPECT_GT(models_with_ranges, kModels / 25);
}

}  // namespace
}  // namespace trainer_lora::lora
