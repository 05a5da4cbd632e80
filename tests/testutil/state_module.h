// A module that is nothing but its parameters:
//
//   const MetaDeviceGuard meta_device;
//   auto model = ModuleWith({{"blocks.0.to_q.weight", {8, 4}, at::kFloat}});
//   model->named_parameters()["blocks.0.to_q.weight"];
#ifndef TRAINER_LORA_TESTS_TESTUTIL_STATE_MODULE_H_
#define TRAINER_LORA_TESTS_TESTUTIL_STATE_MODULE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "c10/core/ScalarType.h"
#include "torch/nn/module.h"

namespace trainer_lora::testutil {

struct ParameterSpec {
  std::string name;  // With dots, where it is a child's.
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
};

// Parameters of floating point types require grad. They are zero, or on meta
// under a MetaDeviceGuard.
std::shared_ptr<torch::nn::Module> ModuleWith(
    const std::vector<ParameterSpec>& parameters);

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_STATE_MODULE_H_
