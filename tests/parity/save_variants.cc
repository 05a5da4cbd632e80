// Saves a model with DoRA adapters on layers of every kind, for
// variants_adapter_test.py. Into an existing folder:
//
//   base.safetensors     the weights of the model without adapters
//   adapter/             its adapters
//   outputs.safetensors  `indices`, and what the model makes of them without
//                        and with its adapters, `base` and `adapted`
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"
#include "config/internal/status_macros.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "lora/adapter_file.h"
#include "lora/conv.h"
#include "lora/embedding.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "torch/nn/module.h"
#include "torch/nn/options/conv.h"

ABSL_FLAG(std::string, folder, "", "existing folder to write to");

namespace trainer_lora::lora {
namespace {

// As in variants_adapter_test.py.
struct Model : torch::nn::Module {
  Model() {
    register_module("embed", embed);
    register_module("conv", conv);
    register_module("to_q", to_q);
  }
  at::Tensor forward(const at::Tensor& indices) {
    return to_q(conv(embed(indices).unsqueeze(1)));
  }
  Embedding embed{11, 12};
  Conv2d conv{
      torch::nn::Conv2dOptions(1, 5, {3, 2}).stride({2, 1}).padding({1, 0})};
  ReplicatedLinear to_q{11, 7};
};

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 4;
  config.alpha = 6;
  config.target_modules = {"all-linear"};
  config.rank_pattern = {{"conv", 2}};
  config.alpha_pattern = {{"to_q", 5}};
  config.use_dora = true;
  config.use_rslora = true;
  return config;
}

// The adapters as training may leave them.
void FillAdapters(const torch::nn::Module& model) {
  for (const NamedParameter& item : TrainableParameters(model)) {
    if (absl::EndsWith(item.name, ".lora_magnitude")) {
      item.parameter.mul_(at::empty_like(item.parameter).uniform_(0.5, 1.5));
    } else {
      item.parameter.uniform_(-0.5, 0.5);
    }
  }
}

absl::Status Write(const std::string& path,
                   const std::map<std::string, at::Tensor>& tensors) {
  std::vector<distributed::TensorView> views;
  for (const auto& [name, tensor] : tensors) {
    views.push_back({name,
                     distributed::ToTensorDtype(tensor.scalar_type()).value(),
                     tensor.sizes().vec(), tensor.const_data_ptr()});
  }
  return distributed::WriteSafetensors(path, views, {});
}

absl::Status Save(const std::string& folder) {
  const c10::NoGradGuard no_grad;
  at::manual_seed(0);
  Model model;
  model.eval();
  std::map<std::string, at::Tensor> weights;
  for (const auto& item : model.named_parameters()) {
    weights[item.key()] = item.value();
  }
  LORA_RETURN_IF_ERROR(
      Write(absl::StrCat(folder, "/base.safetensors"), weights));
  const at::Tensor indices = at::randint(11, {2, 6}, at::kLong);
  const at::Tensor base = model.forward(indices).contiguous();

  LORA_RETURN_IF_ERROR(EnableLoraTraining(model, Config()).status());
  FillAdapters(model);
  model.eval();
  const at::Tensor adapted = model.forward(indices).contiguous();
  LORA_RETURN_IF_ERROR(SaveAdapter(model, absl::StrCat(folder, "/adapter")));
  return Write(absl::StrCat(folder, "/outputs.safetensors"),
               {{"indices", indices}, {"base", base}, {"adapted", adapted}});
}

}  // namespace
}  // namespace trainer_lora::lora

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const absl::Status status =
      trainer_lora::lora::Save(absl::GetFlag(FLAGS_folder));
  if (status.ok()) return 0;
  std::cerr << "save_variants: " << status << "\n";
  return 1;
}
