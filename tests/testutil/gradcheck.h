// Whether the derivatives that autograd computes are those of the function, by
// central differences:
//
//   const at::Tensor x = at::randn({2, 3}, at::kDouble).requires_grad_();
//   EXPECT_TRUE(GradCheck(
//       [](const std::vector<at::Tensor>& inputs) {
//         return std::vector<at::Tensor>{inputs[0].sin()};
//       },
//       {x}));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_GRADCHECK_H_
#define TRAINER_LORA_TESTS_TESTUTIL_GRADCHECK_H_

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {

// A function of float64 tensors, some of which may be undefined. It must give
// the same for the same inputs: one that draws random numbers seeds the
// generator first.
using TensorFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// The derivatives of a random weighting of the outputs, by each element of the
// inputs that require grad. The inputs are not changed.
::testing::AssertionResult GradCheck(const TensorFunction& function,
                                     const std::vector<at::Tensor>& inputs);

// The same of the function's gradients, as a function of the inputs and of the
// gradients of the outputs.
::testing::AssertionResult GradGradCheck(const TensorFunction& function,
                                         const std::vector<at::Tensor>& inputs);

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_GRADCHECK_H_
