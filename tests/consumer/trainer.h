// This team's training loop.
#ifndef TRAINER_TEAM_TRAINER_H_
#define TRAINER_TEAM_TRAINER_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "model.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_team {

struct TrainingResult {
  Denoiser model = nullptr;
  std::vector<float> losses;  // Of this rank, before each step.
};

// Trains the adapters of the role `student` of a YAML file, whose base weights
// are in `checkpoint`, for two steps on the rank's share of the data.
// Collective over `group`.
absl::StatusOr<TrainingResult> Train(
    const std::string& yaml, const std::string& checkpoint,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const at::Tensor& input, const at::Tensor& target);

}  // namespace trainer_team

#endif  // TRAINER_TEAM_TRAINER_H_
