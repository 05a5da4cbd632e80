#include "tests/testutil/state_module.h"

#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/zeros.h"
#include "absl/strings/str_split.h"
#include "torch/nn/module.h"

namespace trainer_lora::testutil {
namespace {

// The child of this name, made if there is none.
torch::nn::Module& ChildOf(torch::nn::Module& parent, const std::string& name) {
  for (const auto& child : parent.named_children()) {
    if (child.key() == name) return *child.value();
  }
  return *parent.register_module(name, std::make_shared<torch::nn::Module>());
}

}  // namespace

std::shared_ptr<torch::nn::Module> ModuleWith(
    const std::vector<ParameterSpec>& parameters) {
  auto root = std::make_shared<torch::nn::Module>();
  for (const ParameterSpec& spec : parameters) {
    std::vector<std::string> path = absl::StrSplit(spec.name, '.');
    const std::string last = path.back();
    path.pop_back();
    torch::nn::Module* module = root.get();
    for (const std::string& name : path) module = &ChildOf(*module, name);
    module->register_parameter(last, at::zeros(spec.shape, spec.dtype),
                               at::isFloatingType(spec.dtype));
  }
  return root;
}

}  // namespace trainer_lora::testutil
