// adapter_config.json, in which the Python library PEFT says what an adapter
// is: the part of it that is read, and all that is written.
//
//   LORA_ASSIGN_OR_RETURN(const AdapterConfig config,
//                         AdapterConfig::Parse(json, {"blocks.0.to_q"}));
//   config.ranks()[0];  // By r and rank_pattern
//   LORA_ASSIGN_OR_RETURN(
//       const std::string text,
//       AdapterConfigJson({{{"blocks.0.to_q", /*rank=*/16, /*alpha=*/32}}}));
#ifndef TRAINER_LORA_LORA_INTERNAL_ADAPTER_CONFIG_H_
#define TRAINER_LORA_LORA_INTERNAL_ADAPTER_CONFIG_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/lora_config.h"

namespace trainer_lora::lora::internal {

// Far more than patterns for thousands of layers take.
inline constexpr size_t kMaxAdapterConfigBytes = 16 << 20;

// What a file says that a model must agree with. An immutable value.
class AdapterConfig {
 public:
  // For a model that has adapters in these layers. Of two equal keys the last
  // counts, as in Python; keys that are not read may have any value, nested at
  // most 64 levels deep.
  // kDataLoss if `json` is too long, no JSON object in UTF-8, or has a value of
  // another type than PEFT's; kFailedPrecondition for an adapter that is not
  // LoRA or of a kind that this library lacks, and for a pattern that it can't
  // match, or that is too complex together with those before it. Messages
  // don't name the file.
  static absl::StatusOr<AdapterConfig> Parse(
      absl::string_view json, absl::Span<const std::string> layer_names);

  // PEFT's numbers, one a layer: that of the first pattern, in the file's
  // order, that matches at the end of the layer's name, else that of all
  // layers.
  const std::vector<double>& ranks() const { return ranks_; }
  const std::vector<double>& alphas() const { return alphas_; }

  bool use_dora() const { return use_dora_; }
  bool use_rslora() const { return use_rslora_; }

 private:
  AdapterConfig() = default;

  std::vector<double> ranks_;
  std::vector<double> alphas_;
  bool use_dora_ = false;
  bool use_rslora_ = false;
};

// A layer that has an adapter.
struct AdapterLayer {
  std::string name;  // Its full name in the model.
  int64_t rank;      // That of LoRA.
  double alpha;
};

struct AdapterDescription {
  // At least one. The rank and alpha of the first are those that the others
  // have unless a pattern says so.
  std::vector<AdapterLayer> layers;
  double dropout = 0;
  config::BiasTraining bias = config::BiasTraining::kNone;
  bool use_dora = false;
  bool use_rslora = false;
  // Null in the file if empty.
  std::string base_model_name_or_path = {};
  std::string task_type = {};
};

// The bytes that a layer's name may have in a file: as a pattern, with each
// byte escaped, Parse() still takes it.
inline constexpr size_t kMaxLayerNameSize = 2'000;

// The text of a file for which Parse() and PEFT find the rank and alpha of each
// layer. kInvalidArgument if one of the texts is not UTF-8, or a name is longer
// than kMaxLayerNameSize.
absl::StatusOr<std::string> AdapterConfigJson(
    const AdapterDescription& description);

}  // namespace trainer_lora::lora::internal

#endif  // TRAINER_LORA_LORA_INTERNAL_ADAPTER_CONFIG_H_
