#include "trainer.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "config/trainer_config.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/meta_device.h"
#include "lora/layer_replacement.h"
#include "lora/lora_gradient_sync.h"
#include "torch/optim/sgd.h"

namespace trainer_team {

namespace config = ::trainer_lora::config;
namespace distributed = ::trainer_lora::distributed;
namespace lora = ::trainer_lora::lora;

absl::StatusOr<TrainingResult> Train(
    const std::string& yaml, const std::string& checkpoint,
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const at::Tensor& input, const at::Tensor& target) {
  auto trainer_config = config::TrainerConfig::Load(yaml);
  if (!trainer_config.ok()) return trainer_config.status();
  auto mesh = distributed::DeviceMesh::Create(group);
  if (!mesh.ok()) return mesh.status();

  TrainingResult result;
  {
    distributed::MetaDeviceGuard meta_device;
    result.model = Denoiser();
  }
  Denoiser& model = result.model;
  auto training = lora::EnableLoraTraining(
      *model, *trainer_config->models[0].lora, {.prepare_for_fsdp = true});
  if (!training.ok()) return training.status();
  auto report = distributed::LoadCheckpoint(
      *model, checkpoint,
      {.aliases = training->checkpoint_key_aliases,
       .missing_parameter_initializer = training->missing_parameter_initializer,
       .mesh = *mesh});
  if (!report.ok()) return report.status();
  if (auto layers = lora::FinalizeLoraTraining(*model); !layers.ok()) {
    return layers.status();
  }
  if (auto status = lora::ReplicateLoraParameters(*model, *mesh);
      !status.ok()) {
    return status;
  }

  const auto parameters = lora::LoraParameters(*model);
  auto sync = distributed::GradientSync::Create(*mesh, parameters);
  if (!sync.ok()) return sync.status();
  std::vector<at::Tensor> tensors;
  for (const auto& item : parameters) tensors.push_back(item.parameter);
  torch::optim::SGD optimizer(tensors, /*lr=*/0.1);
  for (int step = 0; step < 2; ++step) {
    (*sync)->ZeroGrad();
    const at::Tensor loss = at::mse_loss(model(input), target);
    result.losses.push_back(loss.item<float>());
    loss.backward();
    if (auto synchronized = (*sync)->Sync(); !synchronized.ok()) {
      return synchronized.status();
    }
    optimizer.step();
  }
  return result;
}

}  // namespace trainer_team
