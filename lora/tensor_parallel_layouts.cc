#include "lora/tensor_parallel_layouts.h"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "distributed/state_layout.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"

namespace trainer_lora::lora {

distributed::StateLayouts TensorParallelLayouts(
    const torch::nn::Module& model) {
  distributed::StateLayouts layouts;
  for (const auto& [layer_name, layer] : LoraLayers(model)) {
    // `name` is the state's own, `path` that below the layer.
    const auto add = [&, &layer_name = layer_name, &layer = layer](
                         const std::string& name, const std::string& path,
                         int64_t rank) {
      std::optional<distributed::StateLayout> layout =
          layer->LayoutOf(name, rank);
      if (!layout.has_value()) return;
      layouts[absl::StrCat(layer_name, ".", path)] = *std::move(layout);
    };
    for (const std::string& state : layer->base_state_names()) {
      add(state, absl::StrCat(layer->is_adapted() ? "base_layer." : "", state),
          /*rank=*/0);
    }
    for (const std::string& adapter : layer->adapter_names()) {
      for (const AdapterParameter& item : layer->AdapterParameters(adapter)) {
        add(item.state_name, item.name, layer->adapter(adapter).options.rank);
      }
    }
  }
  return layouts;
}

}  // namespace trainer_lora::lora
