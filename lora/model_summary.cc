#include "lora/model_summary.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <set>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

constexpr size_t kColumns = 5;
using Row = std::array<std::string, kColumns>;

std::string WithThousandsSeparators(int64_t number) {
  std::string text = absl::StrCat(number);
  for (auto position = static_cast<int64_t>(text.size()) - 3; position > 0;
       position -= 3) {
    text.insert(static_cast<size_t>(position), ",");
  }
  return text;
}

// Such as "0", or "36 (30 of rank 8, 6 of rank 16)".
std::string DescribeLayers(const std::map<int64_t, int64_t>& lora_layers) {
  int64_t count = 0;
  std::vector<std::string> parts;
  for (const auto& [rank, layers] : lora_layers) {
    count += layers;
    parts.push_back(absl::StrCat(layers, " of rank ", rank));
  }
  if (count == 0) return "0";
  return absl::StrCat(count, " (", absl::StrJoin(parts, ", "), ")");
}

Row RowOf(const std::string& role, const ModelSummary& summary) {
  return {role, DescribeLayers(summary.lora_layers),
          WithThousandsSeparators(summary.parameters),
          WithThousandsSeparators(summary.trained_parameters),
          absl::StrFormat("%.2f %%", 100 * summary.TrainedShare())};
}

}  // namespace

double ModelSummary::TrainedShare() const {
  if (parameters == 0) return 0;
  return static_cast<double>(trained_parameters) /
         static_cast<double>(parameters);
}

ModelSummary Summarize(const torch::nn::Module& model) {
  ModelSummary summary;
  for (const NamedLoraLayer& item : LoraLayers(model)) {
    for (const std::string& name : item.layer->adapter_names()) {
      ++summary.lora_layers[item.layer->adapter(name).options.rank];
    }
  }
  std::set<const c10::TensorImpl*> seen;
  for (const at::Tensor& parameter : model.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    summary.parameters += parameter.numel();
    if (parameter.requires_grad()) {
      summary.trained_parameters += parameter.numel();
    }
  }
  return summary;
}

std::string SummaryTable(
    const std::vector<std::pair<std::string, ModelSummary>>& roles) {
  std::vector<Row> rows = {
      {"role", "LoRA layers", "parameters", "trained", "share"}};
  for (const auto& [role, summary] : roles) {
    rows.push_back(RowOf(role, summary));
  }
  std::array<size_t, kColumns> widths = {};
  for (const Row& row : rows) {
    for (size_t column = 0; column < kColumns; ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::string table;
  for (const Row& row : rows) {
    // Text to the left, numbers to the right.
    absl::StrAppendFormat(&table, "%-*s  %-*s  %*s  %*s  %*s\n", widths[0],
                          row[0], widths[1], row[1], widths[2], row[2],
                          widths[3], row[3], widths[4], row[4]);
  }
  return table;
}

}  // namespace trainer_lora::lora
