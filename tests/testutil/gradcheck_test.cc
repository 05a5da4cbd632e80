#include "tests/testutil/gradcheck.h"

#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "gtest/gtest.h"
#include "torch/csrc/autograd/custom_function.h"

namespace trainer_lora::testutil {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor Random(at::IntArrayRef shape) {
  return at::randn(shape, at::kDouble).requires_grad_();
}

TEST(GradCheckTest, AcceptsOperators) {
  const TensorFunction function = [](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{inputs[0].sin() * inputs[1],
                                   inputs[1].pow(3)};
  };
  EXPECT_TRUE(GradCheck(function, {Random({2, 3}), Random({3})}));
  EXPECT_TRUE(GradGradCheck(function, {Random({2, 3}), Random({3})}));
}

TEST(GradCheckTest, LeavesInputsWithoutGradientAlone) {
  const TensorFunction function = [](const std::vector<at::Tensor>& inputs) {
    EXPECT_FALSE(inputs[1].requires_grad());
    EXPECT_FALSE(inputs[2].defined());
    return std::vector<at::Tensor>{inputs[0].square() * inputs[1]};
  };
  const std::vector<at::Tensor> inputs = {
      Random({2}), at::ones({2}, at::kDouble), at::Tensor()};
  EXPECT_TRUE(GradCheck(function, inputs));
  EXPECT_TRUE(GradGradCheck(function, inputs));
}

// x^2, whose gradient misses the 2.
struct WrongGradient : torch::autograd::Function<WrongGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {grads[0] * context->get_saved_variables()[0]};
  }
};

TEST(GradCheckTest, RefusesAWrongGradient) {
  EXPECT_FALSE(GradCheck(
      [](const std::vector<at::Tensor>& inputs) {
        return std::vector<at::Tensor>{WrongGradient::apply(inputs[0])};
      },
      {Random({2})}));
}

// x^2, whose gradient autograd takes for a constant times grad.
struct ConstantGradient : torch::autograd::Function<ConstantGradient> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x;
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    return {2 * grads[0] * context->get_saved_variables()[0].detach()};
  }
};

TEST(GradCheckTest, RefusesAWrongSecondDerivative) {
  const TensorFunction function = [](const std::vector<at::Tensor>& inputs) {
    return std::vector<at::Tensor>{ConstantGradient::apply(inputs[0])};
  };
  EXPECT_TRUE(GradCheck(function, {Random({2})}));
  EXPECT_FALSE(GradGradCheck(function, {Random({2})}));
}

}  // namespace
}  // namespace trainer_lora::testutil
