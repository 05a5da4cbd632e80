// How much of a model is trained, as people look for it at the start of a run:
//
//   std::cout << SummaryTable({{"student", Summarize(*student)},
//                              {"teacher", Summarize(*teacher)}});
//
//   role     LoRA layers          parameters     trained  share
//   student  36 (36 of rank 8)    22,897,152     331,776  1.45 %
//   teacher  0                    22,565,376           0  0.00 %
#ifndef TRAINER_LORA_LORA_MODEL_SUMMARY_H_
#define TRAINER_LORA_LORA_MODEL_SUMMARY_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "config/language_version.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// Counts of elements, each parameter once however many names it has. On a model
// whose parameters are sharded these are the elements of this rank.
struct ModelSummary {
  // The number of adapters of each LoRA rank: one a layer, unless it has
  // several.
  std::map<int64_t, int64_t> lora_layers;
  // Everything, adapters included.
  int64_t parameters = 0;
  // Those that require grad.
  int64_t trained_parameters = 0;

  // From 0 to 1; 0 for a model without parameters.
  double TrainedShare() const;
};

// Also on a model whose parameters are on the meta device.
ModelSummary Summarize(const torch::nn::Module& model);

// A table with a heading and one line a role, each ending in a newline.
std::string SummaryTable(
    const std::vector<std::pair<std::string, ModelSummary>>& roles);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_MODEL_SUMMARY_H_
