#include "tests/testutil/gradcheck.h"

#include <cmath>
#include <cstdint>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "torch/csrc/autograd/autograd.h"

namespace trainer_lora::testutil {
namespace {

constexpr double kStep = 1e-5;
constexpr double kTolerance = 1e-6;

// Leaves of the same values.
std::vector<at::Tensor> Leaves(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& tensor : tensors) {
    leaves.push_back(
        tensor.defined()
            ? tensor.detach().clone().set_requires_grad(tensor.requires_grad())
            : tensor);
  }
  return leaves;
}

std::vector<at::Tensor> RandomLike(const std::vector<at::Tensor>& tensors,
                                   uint64_t seed) {
  // The default generator is the function's.
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  std::vector<at::Tensor> random;
  for (const at::Tensor& tensor : tensors) {
    random.push_back(at::randn(tensor.sizes(), generator, tensor.options()));
  }
  return random;
}

double WeightedSum(const std::vector<at::Tensor>& tensors,
                   const std::vector<at::Tensor>& weights) {
  double sum = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    sum += (tensors[i].detach() * weights[i]).sum().item<double>();
  }
  return sum;
}

// The gradients of the tensors of `inputs` that require grad, zero where the
// outputs don't depend on them.
std::vector<at::Tensor> Gradients(const std::vector<at::Tensor>& outputs,
                                  const std::vector<at::Tensor>& output_grads,
                                  const std::vector<at::Tensor>& inputs,
                                  bool create_graph) {
  std::vector<at::Tensor> roots, root_grads, leaves;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    root_grads.push_back(output_grads[i]);
  }
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) leaves.push_back(input);
  }
  std::vector<at::Tensor> gradients;
  if (roots.empty()) {
    gradients.resize(leaves.size());
  } else {
    gradients = torch::autograd::grad(roots, leaves, root_grads,
                                      /*retain_graph=*/create_graph,
                                      create_graph, /*allow_unused=*/true);
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(leaves[i]);
  }
  return gradients;
}

}  // namespace

::testing::AssertionResult GradCheck(const TensorFunction& function,
                                     const std::vector<at::Tensor>& inputs) {
  const std::vector<at::Tensor> leaves = Leaves(inputs);
  const std::vector<at::Tensor> outputs = function(leaves);
  const std::vector<at::Tensor> weights = RandomLike(outputs, /*seed=*/1);
  const std::vector<at::Tensor> gradients =
      Gradients(outputs, weights, leaves, /*create_graph=*/false);
  auto gradient = gradients.begin();
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    for (int64_t j = 0; j < inputs[i].numel(); ++j) {
      const auto value_at = [&](double step) {
        const std::vector<at::Tensor> moved = Leaves(inputs);
        moved[i].detach().view(-1)[j].add_(step);
        return WeightedSum(function(moved), weights);
      };
      const double expected =
          (value_at(kStep) - value_at(-kStep)) / (2 * kStep);
      const double actual = gradient->reshape(-1)[j].item<double>();
      if (!(std::abs(actual - expected) <=
            kTolerance * (1 + std::abs(expected)))) {
        return ::testing::AssertionFailure()
               << "by element " << j << " of input " << i
               << " the derivative is " << expected << ", autograd says "
               << actual;
      }
    }
    ++gradient;
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult GradGradCheck(
    const TensorFunction& function, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> all = inputs;
  for (const at::Tensor& grad :
       RandomLike(function(Leaves(inputs)), /*seed=*/2)) {
    all.push_back(grad.requires_grad_());
  }
  const TensorFunction gradients = [&](const std::vector<at::Tensor>& all) {
    const auto end_of_inputs = all.begin() + inputs.size();
    const std::vector<at::Tensor> inputs(all.begin(), end_of_inputs);
    const std::vector<at::Tensor> output_grads(end_of_inputs, all.end());
    return Gradients(function(inputs), output_grads, inputs,
                     /*create_graph=*/true);
  };
  return GradCheck(gradients, all);
}

}  // namespace trainer_lora::testutil
