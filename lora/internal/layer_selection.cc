#include "lora/internal/layer_selection.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"
#include "config/name_pattern.h"
#include "lora/target_matcher.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"

namespace trainer_lora::lora::internal {
namespace {

// Where a message lists names, so many are enough to see what is meant.
constexpr size_t kMostNames = 10;

std::string SomeOf(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMostNames);
  std::string list = absl::StrJoin(names.begin(), names.begin() + shown, ", ");
  if (shown < names.size()) {
    absl::StrAppend(&list, " and ", names.size() - shown, " more");
  }
  return list;
}

std::vector<std::string> Texts(const std::vector<config::LayerRange>& ranges) {
  std::vector<std::string> texts;
  for (const config::LayerRange& range : ranges) {
    texts.push_back(ToString(range));
  }
  return texts;
}

template <typename Module>
bool Is(const torch::nn::Module& module) {
  return dynamic_cast<const Module*>(&module) != nullptr;
}

// A layer type of libtorch, and the one that takes an adapter in its place.
struct StockType {
  const char* name;
  const char* replacement;
  bool is_linear;
  bool (*matches)(const torch::nn::Module& module);
};

constexpr StockType kStockTypes[] = {
    {"Linear", "ReplicatedLinear", true, Is<torch::nn::LinearImpl>},
    {"Conv1d", "Conv1d", false, Is<torch::nn::Conv1dImpl>},
    {"Conv2d", "Conv2d", false, Is<torch::nn::Conv2dImpl>},
    {"Conv3d", "Conv3d", false, Is<torch::nn::Conv3dImpl>},
    {"Embedding", "Embedding", false, Is<torch::nn::EmbeddingImpl>},
};

// Null for a module of another type.
const StockType* StockTypeOf(const torch::nn::Module& module) {
  for (const StockType& type : kStockTypes) {
    if (type.matches(module)) return &type;
  }
  return nullptr;
}

struct StockLayer {
  std::string name;
  const StockType* type;
};

// The modules below a model.
struct ModuleTree {
  std::vector<LayerInModel> lora_layers;
  // Under every name.
  std::vector<StockLayer> stock_layers;
};

class TreeWalk {
 public:
  explicit TreeWalk(const torch::nn::Module& model) { Descend(model, ""); }

  ModuleTree Finish() && { return std::move(tree_); }

 private:
  void Descend(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& child : module.named_children()) {
      Visit(*child.value(), absl::StrCat(prefix, child.key()));
    }
  }

  void Visit(torch::nn::Module& module, std::string name) {
    if (auto* layer = dynamic_cast<LoraLayer*>(&module)) {
      const auto [index, is_new] =
          index_of_.emplace(layer, tree_.lora_layers.size());
      if (is_new) tree_.lora_layers.push_back({layer, {}});
      tree_.lora_layers[index->second].names.push_back(std::move(name));
    } else if (const StockType* type = StockTypeOf(module)) {
      tree_.stock_layers.push_back({std::move(name), type});
    } else {
      Descend(module, absl::StrCat(name, "."));
    }
  }

  ModuleTree tree_;
  std::unordered_map<const LoraLayer*, size_t> index_of_;
};

ModuleTree Walk(const torch::nn::Module& model) {
  return TreeWalk(model).Finish();
}

// A rank_pattern or an alpha_pattern.
template <typename T>
class PatternTable {
 public:
  static absl::StatusOr<PatternTable> Create(
      absl::string_view key,
      const std::vector<std::pair<std::string, T>>& entries,
      config::TargetMatching matching) {
    PatternTable table(key);
    for (const auto& [text, value] : entries) {
      LORA_ASSIGN_OR_RETURN(config::NamePattern pattern,
                            config::NamePattern::Create(text, matching));
      table.entries_.push_back({std::move(pattern), value});
    }
    return table;
  }

  // The value of the first pattern that matches one of the names.
  std::optional<T> Find(const std::vector<std::string>& names) {
    for (Entry& entry : entries_) {
      for (const std::string& name : names) {
        if (!entry.pattern.Matches(name)) continue;
        entry.has_effect = true;
        return entry.value;
      }
    }
    return std::nullopt;
  }

  absl::Status CheckAllHadAnEffect() const {
    std::vector<std::string> without;
    for (const Entry& entry : entries_) {
      if (!entry.has_effect) without.push_back(entry.pattern.text());
    }
    if (without.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "lora.", key_,
        " has patterns without effect: ", absl::StrJoin(without, ", "),
        "; each must match an adapted layer that no pattern before it does"));
  }

 private:
  struct Entry {
    config::NamePattern pattern;
    T value;
    bool has_effect = false;
  };

  explicit PatternTable(absl::string_view key) : key_(key) {}

  std::string key_;
  std::vector<Entry> entries_;
};

absl::Status CheckCanAdopt(const std::vector<LayerInModel>& layers,
                           const std::string& adapter_name,
                           config::AdapterInitialization initialization) {
  LORA_RETURN_IF_ERROR(LoraLayer::CheckAdapterName(adapter_name));
  std::vector<std::string> adapted;
  std::vector<std::string> merged;
  std::vector<std::string> in_the_way;
  for (const LayerInModel& item : layers) {
    if (item.layer->HasAdapter(adapter_name)) {
      adapted.push_back(item.names.front());
    }
    if (item.layer->is_merged()) merged.push_back(item.names.front());
    for (const std::string& name : item.layer->adapter_names()) {
      if (config::StartsFromBase(initialization) ||
          config::StartsFromBase(
              item.layer->adapter(name).options.initialization)) {
        in_the_way.push_back(item.names.front());
      }
    }
  }
  if (!adapted.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "LoRA training is enabled already, with adapters ",
        adapter_name == kDefaultAdapter
            ? ""
            : absl::StrCat("of the name '", adapter_name, "' "),
        "on ", SomeOf(adapted),
        "; enable all targets in one call, or give another adapter a name of "
        "its own"));
  }
  if (!merged.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(SomeOf(merged), ": merged; call UnmergeAdapters first"));
  }
  if (!in_the_way.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "an adapter that starts from the base weights, by PiSSA or OLoRA, is "
        "the only one of its model, as it changes these weights; there are "
        "adapters on ",
        SomeOf(in_the_way)));
  }
  return absl::OkStatus();
}

std::string AdviceOnStockLayers(const std::vector<std::string>& names,
                                const StockType& type) {
  return absl::StrCat(SomeOf(names), ": torch::nn::", type.name,
                      " cannot take a LoRA adapter; declare the layer as "
                      "trainer_lora::lora::",
                      type.replacement,
                      ", which takes the same options and has the same state "
                      "names");
}

// Chooses by names, and notes which targets chose nothing.
class Chooser {
 public:
  explicit Chooser(const TargetMatcher& matcher)
      : matcher_(matcher), chose_something_(matcher.targets().size(), false) {}

  bool Selects(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      if (matcher_.IsExcluded(name)) return false;
    }
    const auto is_in_layers = [&](const std::string& name) {
      return matcher_.IsInLayers(name);
    };
    if (std::none_of(names.begin(), names.end(), is_in_layers)) return false;
    bool selects = false;
    for (const std::string& name : names) {
      for (const size_t target : matcher_.MatchingTargets(name)) {
        chose_something_[target] = true;
        selects = true;
      }
    }
    return selects;
  }

  std::vector<std::string> TargetsWithoutChoice() const {
    std::vector<std::string> targets;
    for (size_t i = 0; i < chose_something_.size(); ++i) {
      if (!chose_something_[i]) targets.push_back(matcher_.targets()[i]);
    }
    return targets;
  }

 private:
  const TargetMatcher& matcher_;
  std::vector<bool> chose_something_;
};

// Advice on the layers of libtorch that the targets name, one for each type.
// all-linear names the linear ones alone: nobody meant the others by it.
std::vector<std::string> AdviceOnSelectedStockLayers(
    const ModuleTree& tree, const TargetMatcher& matcher) {
  const auto is_selected = [&](const StockLayer& layer) {
    if (matcher.IsExcluded(layer.name) || !matcher.IsInLayers(layer.name)) {
      return false;
    }
    const auto targets = matcher.MatchingTargets(layer.name);
    return std::any_of(targets.begin(), targets.end(), [&](size_t target) {
      return layer.type->is_linear || matcher.targets()[target] != kAllLinear;
    });
  };
  std::vector<std::string> advice;
  for (const StockType& type : kStockTypes) {
    std::vector<std::string> names;
    for (const StockLayer& layer : tree.stock_layers) {
      if (layer.type == &type && is_selected(layer)) {
        names.push_back(layer.name);
      }
    }
    if (!names.empty()) advice.push_back(AdviceOnStockLayers(names, type));
  }
  return advice;
}

// Exclusions of the configuration that match no layer of a type that takes
// adapters: a slip of the pen, after which layers are trained that should not
// be.
std::vector<std::string> ExclusionsWithoutEffect(const ModuleTree& tree,
                                                 const TargetMatcher& matcher) {
  std::vector<std::string> without_effect;
  for (const config::NamePattern& pattern : matcher.exclusions()) {
    const auto matches = [&](const std::string& name) {
      return pattern.Matches(name);
    };
    const auto matches_layer = [&](const LayerInModel& item) {
      return std::any_of(item.names.begin(), item.names.end(), matches);
    };
    const auto matches_stock_layer = [&](const StockLayer& layer) {
      return matches(layer.name);
    };
    if (std::none_of(tree.lora_layers.begin(), tree.lora_layers.end(),
                     matches_layer) &&
        std::none_of(tree.stock_layers.begin(), tree.stock_layers.end(),
                     matches_stock_layer)) {
      without_effect.push_back(pattern.text());
    }
  }
  return without_effect;
}

// " in the layers 0, 8-11", where the configuration limits them.
std::string InLayers(const TargetMatcher& matcher) {
  if (matcher.layer_ranges().empty()) return "";
  return absl::StrCat(" in the layers ", SomeOf(Texts(matcher.layer_ranges())));
}

// Ranges and lists of layers that no selected layer is in.
std::vector<std::string> WarnOfLayersWithoutEffect(
    const std::vector<SelectedLayer>& selected, const TargetMatcher& matcher) {
  if (matcher.layer_ranges().empty()) return {};
  std::vector<std::string> names;
  for (const SelectedLayer& item : selected) {
    names.insert(names.end(), item.names.begin(), item.names.end());
  }
  std::set<int64_t> indices;
  for (const std::string& name : names) {
    if (const auto index = matcher.LayerIndex(name)) indices.insert(*index);
  }

  std::vector<std::string> ranges;
  for (const config::LayerRange& range : matcher.layer_ranges()) {
    const auto inside = indices.lower_bound(range.first);
    if (inside == indices.end() || *inside > range.last) {
      ranges.push_back(ToString(range));
    }
  }
  std::vector<std::string> warnings;
  if (!ranges.empty()) {
    warnings.push_back(
        absl::StrCat("layers_to_transform ", SomeOf(ranges),
                     " selects no layer that can take an adapter"));
  }
  for (const config::NamePattern& list : matcher.layer_lists()) {
    const auto has_index = [&](const std::string& name) {
      return LayerIndexAfter(list, name).has_value();
    };
    if (std::none_of(names.begin(), names.end(), has_index)) {
      warnings.push_back(
          absl::StrCat("layers_pattern '", list.text(),
                       "' selects no layer that can take an adapter"));
    }
  }
  return warnings;
}

// The weights that will be written, and a search for what else lies in them.
class WrittenWeights {
 public:
  // `problem` is the end of messages.
  explicit WrittenWeights(absl::string_view problem) : problem_(problem) {}

  // Takes the weight of a layer. kFailedPrecondition if another has it.
  absl::Status Add(const std::string& name, const LoraLayer& layer) {
    const auto extent = ExtentOf(layer.state("weight"));
    if (!extent) return absl::OkStatus();
    LORA_RETURN_IF_ERROR(Check(*extent, &layer, name));
    weights_[{extent->storage, extent->end}] = {&layer, name, extent->begin};
    return absl::OkStatus();
  }

  // kFailedPrecondition if a state of `module` lies in a weight that is not
  // its own. `owner` is the LoraLayer that the module is a part of, or null.
  absl::Status CheckStatesOf(const torch::nn::Module& module,
                             const std::string& prefix,
                             const LoraLayer* owner) const {
    for (const auto& states : {module.named_parameters(/*recurse=*/false),
                               module.named_buffers(/*recurse=*/false)}) {
      for (const auto& state : states) {
        const auto extent = ExtentOf(state.value());
        if (!extent) continue;
        LORA_RETURN_IF_ERROR(
            Check(*extent, owner, absl::StrCat(prefix, state.key())));
      }
    }
    for (const auto& child : module.named_children()) {
      LORA_RETURN_IF_ERROR(CheckStatesOf(
          *child.value(), absl::StrCat(prefix, child.key(), "."),
          owner != nullptr
              ? owner
              : dynamic_cast<const LoraLayer*>(child.value().get())));
    }
    return absl::OkStatus();
  }

 private:
  // Bytes of a storage.
  struct Extent {
    const c10::StorageImpl* storage;
    int64_t begin;
    int64_t end;
  };

  struct Weight {
    const LoraLayer* layer;
    std::string name;
    int64_t begin;
  };

  // Nothing for a tensor without memory. What lies between the elements of one
  // with gaps is another's.
  static std::optional<Extent> ExtentOf(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
      return std::nullopt;
    }
    const int64_t size = tensor.element_size();
    const int64_t begin = size * tensor.storage_offset();
    const int64_t elements =
        tensor.is_non_overlapping_and_dense() ? tensor.numel() : 1;
    return Extent{tensor.storage().unsafeGetStorageImpl(), begin,
                  begin + size * elements};
  }

  // For a tensor `name`, which belongs to `owner`.
  absl::Status Check(const Extent& extent, const LoraLayer* owner,
                     const std::string& name) const {
    // The first that ends behind its beginning.
    const auto found = weights_.upper_bound({extent.storage, extent.begin});
    if (found == weights_.end() || found->first.first != extent.storage) {
      return absl::OkStatus();
    }
    const Weight& weight = found->second;
    if (weight.begin >= extent.end || weight.layer == owner) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(
        weight.name, " and ", name, " share one weight: ", problem_));
  }

  const absl::string_view problem_;
  // By storage and end; none overlaps another.
  std::map<std::pair<const c10::StorageImpl*, int64_t>, Weight> weights_;
};

}  // namespace

std::vector<LayerInModel> FindLoraLayers(const torch::nn::Module& model) {
  return Walk(model).lora_layers;
}

absl::StatusOr<LayerSelection> SelectLayers(
    const torch::nn::Module& model, const config::LoraConfig& config,
    const std::vector<std::string>& architecture_exclusions,
    const std::string& adapter_name) {
  LORA_ASSIGN_OR_RETURN(const TargetMatcher matcher,
                        TargetMatcher::Create(config, architecture_exclusions));
  LORA_ASSIGN_OR_RETURN(auto ranks, PatternTable<int64_t>::Create(
                                        "rank_pattern", config.rank_pattern,
                                        config.target_matching));
  LORA_ASSIGN_OR_RETURN(auto alphas, PatternTable<double>::Create(
                                         "alpha_pattern", config.alpha_pattern,
                                         config.target_matching));
  const ModuleTree tree = Walk(model);
  LORA_RETURN_IF_ERROR(
      CheckCanAdopt(tree.lora_layers, adapter_name, config.initialization));

  LayerSelection selection;
  Chooser chooser(matcher);
  for (const LayerInModel& item : tree.lora_layers) {
    if (!chooser.Selects(item.names)) continue;
    const int64_t rank = ranks.Find(item.names).value_or(*config.rank);
    const double alpha =
        alphas.Find(item.names)
            .value_or(config.alpha.value_or(static_cast<double>(rank)));
    selection.layers.push_back({item.layer, item.names, rank, alpha});
  }

  if (config::StartsFromBase(config.initialization)) {
    NamedLayers named;
    for (const SelectedLayer& selected : selection.layers) {
      named.emplace_back(selected.names.front(), selected.layer);
    }
    LORA_RETURN_IF_ERROR(CheckStartsAreNotShared(model, named));
  }

  std::vector<std::string> stock = AdviceOnSelectedStockLayers(tree, matcher);
  if (selection.layers.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no layer that can take a LoRA adapter was found for the targets [",
        absl::StrJoin(matcher.targets(), ", "), "]", InLayers(matcher),
        stock.empty() ? "" : "; ", absl::StrJoin(stock, "; ")));
  }
  LORA_RETURN_IF_ERROR(ranks.CheckAllHadAnEffect());
  LORA_RETURN_IF_ERROR(alphas.CheckAllHadAnEffect());

  for (std::string& advice : stock) {
    selection.warnings.push_back(std::move(advice));
  }
  if (config.target_modules && !config.target_modules->empty()) {
    for (const std::string& target : chooser.TargetsWithoutChoice()) {
      selection.warnings.push_back(absl::StrCat(
          "the LoRA target '", target,
          "' selects no layer that can take an adapter", InLayers(matcher)));
    }
  }
  for (std::string& warning :
       WarnOfLayersWithoutEffect(selection.layers, matcher)) {
    selection.warnings.push_back(std::move(warning));
  }
  for (const std::string& exclusion : ExclusionsWithoutEffect(tree, matcher)) {
    selection.warnings.push_back(
        absl::StrCat("the LoRA exclusion '", exclusion,
                     "' matches no layer of a type that takes adapters"));
  }
  return selection;
}

absl::Status CheckWeightsAreNotShared(const torch::nn::Module& model,
                                      const NamedLayers& layers,
                                      absl::string_view problem) {
  WrittenWeights weights(problem);
  for (const auto& [name, layer] : layers) {
    LORA_RETURN_IF_ERROR(weights.Add(name, *layer));
  }
  return weights.CheckStatesOf(model, /*prefix=*/"", /*owner=*/nullptr);
}

absl::Status CheckStartsAreNotShared(const torch::nn::Module& model,
                                     const NamedLayers& layers) {
  return CheckWeightsAreNotShared(
      model, layers,
      "PiSSA and OLoRA would change it under the other too; choose another "
      "initialization, or give each a weight of its own");
}

}  // namespace trainer_lora::lora::internal
