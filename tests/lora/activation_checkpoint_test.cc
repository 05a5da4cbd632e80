#include "lora/activation_checkpoint.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/autocast_mode.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/autocast_scope.h"
#include "tests/testutil/tensor_memory.h"
#include "torch/csrc/autograd/autograd.h"

namespace trainer_lora::lora {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using ::trainer_lora::testutil::AutocastScope;
using ::trainer_lora::testutil::TensorMemory;

using Tensors = std::vector<at::Tensor>;

// Two layers with frozen weights, adapters and dropout.
struct Block {
  explicit Block(int64_t size = 8) {
    for (int i = 0; i < 2; ++i) {
      weights.push_back(at::randn({size, size}));
      lora_A.push_back(at::randn({2, size}).requires_grad_());
      lora_B.push_back(at::randn({size, 2}).requires_grad_());
    }
  }

  at::Tensor Forward(at::Tensor x) const {
    for (size_t i = 0; i < weights.size(); ++i) {
      const at::Tensor dropped = at::dropout(x, dropout, /*train=*/true);
      x = at::linear(x, weights[i]) +
          at::linear(at::linear(dropped, lora_A[i]), lora_B[i]);
      x = at::tanh(x);
    }
    return x;
  }

  at::Tensor Checkpointed(const at::Tensor& x) const {
    return Checkpoint(
        [this](const Tensors& inputs) { return Forward(inputs[0]); }, {x});
  }

  Tensors Parameters() const {
    Tensors parameters = lora_A;
    parameters.insert(parameters.end(), lora_B.begin(), lora_B.end());
    return parameters;
  }

  Tensors weights, lora_A, lora_B;
  double dropout = 0.3;
};

// The gradients that `parameters` got, which are taken from them.
Tensors TakeGradients(const Tensors& parameters) {
  Tensors gradients;
  for (at::Tensor parameter : parameters) {
    gradients.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return gradients;
}

void ExpectBitwiseEqual(const Tensors& actual, const Tensors& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << i;
    if (!actual[i].defined()) continue;
    EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
  }
}

at::Tensor RngState() {
  return at::globalContext().defaultGenerator(at::kCPU).get_state();
}

TEST(CheckpointTest, GradientsAreBitwiseThoseOfTheFunction) {
  const Block block;
  for (const bool input_requires_grad : {true, false}) {
    const at::Tensor input =
        at::randn({5, 8}).requires_grad_(input_requires_grad);
    Tensors leaves = block.Parameters();
    leaves.push_back(input);

    at::manual_seed(1);
    const at::Tensor expected = block.Forward(input);
    expected.square().sum().backward();
    const Tensors expected_gradients = TakeGradients(leaves);

    at::manual_seed(1);
    const at::Tensor output = block.Checkpointed(input);
    EXPECT_TRUE(output.requires_grad());
    EXPECT_TRUE(at::equal(output, expected));
    // Backward must not depend on the generator's state, nor change it.
    at::manual_seed(2);
    const at::Tensor before = RngState();
    output.square().sum().backward();
    EXPECT_TRUE(at::equal(RngState(), before));
    ExpectBitwiseEqual(TakeGradients(leaves), expected_gradients);
  }
}

TEST(CheckpointTest, BackwardUsesTheAutocastStateOfForward) {
  const Block block;
  const at::Tensor input = at::randn({5, 8}).requires_grad_();
  Tensors leaves = block.Parameters();
  leaves.push_back(input);
  const auto run = [&](bool checkpointed, bool backward_under_autocast) {
    at::manual_seed(1);
    at::Tensor output;
    {
      const AutocastScope autocast;
      output = checkpointed ? block.Checkpointed(input) : block.Forward(input);
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      if (backward_under_autocast) output.sum().backward();
    }
    if (!backward_under_autocast) output.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    return TakeGradients(leaves);
  };
  for (const bool backward_under_autocast : {false, true}) {
    ExpectBitwiseEqual(run(/*checkpointed=*/true, backward_under_autocast),
                       run(/*checkpointed=*/false, backward_under_autocast));
  }
}

TEST(CheckpointTest, LeavesAutocastsCacheWithoutCastsThatAutogradMissed) {
  const Block block;
  const at::Tensor input = at::randn({5, 8});
  const AutocastScope autocast;
  block.Checkpointed(input);
  block.Forward(input).sum().backward();
  for (const at::Tensor& parameter : block.Parameters()) {
    EXPECT_TRUE(parameter.grad().defined());
  }
}

TEST(CheckpointTest, GradientsAccumulateOverPasses) {
  const Block block;
  const at::Tensor first = at::randn({5, 8}), second = at::randn({5, 8});
  const auto run = [&](bool checkpointed) {
    at::manual_seed(1);
    for (const at::Tensor& input : {first, second}) {
      (checkpointed ? block.Checkpointed(input) : block.Forward(input))
          .sum()
          .backward();
    }
    return TakeGradients(block.Parameters());
  };
  ExpectBitwiseEqual(run(true), run(false));
}

TEST(CheckpointTest, ARetainedGraphCanBeUsedTwice) {
  const Block block;
  const at::Tensor output = block.Checkpointed(at::randn({5, 8}));
  output.sum().backward({}, /*retain_graph=*/true);
  const Tensors once = TakeGradients(block.Parameters());
  output.sum().backward();
  ExpectBitwiseEqual(TakeGradients(block.Parameters()), once);
}

TEST(CheckpointTest, Nests) {
  const Block outer, inner;
  const at::Tensor input = at::randn({5, 8}).requires_grad_();
  Tensors leaves = outer.Parameters();
  for (const at::Tensor& parameter : inner.Parameters()) {
    leaves.push_back(parameter);
  }
  leaves.push_back(input);
  at::manual_seed(1);
  inner.Forward(outer.Forward(inner.Forward(input))).sum().backward();
  const Tensors expected = TakeGradients(leaves);
  at::manual_seed(1);
  Checkpoint(
      [&](const Tensors& inputs) {
        return inner.Checkpointed(
            outer.Checkpointed(inner.Checkpointed(inputs[0])));
      },
      {input})
      .sum()
      .backward();
  ExpectBitwiseEqual(TakeGradients(leaves), expected);
}

TEST(CheckpointTest, TakesAnyInputsAndGivesSeveralOutputs) {
  const at::Tensor table = at::randn({4, 3}).requires_grad_();
  const at::Tensor input = at::randn({2, 3}).requires_grad_();
  const at::Tensor indices = at::arange(2);
  const Tensors outputs = Checkpoint(
      [&](const Tensors& inputs) -> Tensors {
        EXPECT_FALSE(inputs[1].defined());
        const at::Tensor rows = at::embedding(table, inputs[2]);
        return {rows * inputs[0], inputs[2] + 1, inputs[0].sin()};
      },
      {input, at::Tensor(), indices});
  ASSERT_EQ(outputs.size(), 3);
  EXPECT_TRUE(at::equal(outputs[1], indices + 1));
  EXPECT_FALSE(outputs[1].requires_grad());
  // The third is not used.
  outputs[0].sum().backward();
  EXPECT_TRUE(at::equal(input.grad(), table.detach().slice(0, 0, 2)));
  EXPECT_TRUE(at::equal(table.grad().slice(0, 0, 2), input.detach()));
}

TEST(CheckpointTest, WithoutAutogradItCallsTheFunction) {
  const Block block;
  const at::Tensor input = at::randn({5, 8});
  const c10::NoGradGuard no_grad;
  at::manual_seed(1);
  const at::Tensor output = block.Checkpointed(input);
  EXPECT_FALSE(output.requires_grad());
  at::manual_seed(1);
  EXPECT_TRUE(at::equal(output, block.Forward(input)));
}

TEST(CheckpointTest, KeepsNoActivations) {
  const Block block(64);
  const at::Tensor input = at::randn({32, 64});
  const TensorMemory memory;
  const at::Tensor plain = block.Forward(input);
  const int64_t plain_bytes = memory.bytes();
  const TensorMemory checkpointed_memory;
  const at::Tensor checkpointed = block.Checkpointed(input);
  EXPECT_GT(plain_bytes, 4 * input.nbytes());
  // The output, and 5,056 bytes of the generator's state.
  EXPECT_LE(checkpointed_memory.bytes(), checkpointed.nbytes() + 6000);
}

TEST(CheckpointTest, FreesActivationsBeforeBackward) {
  c10::weak_intrusive_ptr<at::TensorImpl> activation(
      c10::intrusive_ptr<at::TensorImpl>::reclaim(nullptr));
  const at::Tensor weight = at::randn({3, 3}).requires_grad_();
  const at::Tensor output = Checkpoint(
      [&](const Tensors& inputs) {
        const at::Tensor hidden = at::mm(inputs[0], weight);
        activation = hidden.getIntrusivePtr();
        return hidden.square();
      },
      {at::randn({3, 3})});
  EXPECT_TRUE(activation.expired());
  output.sum().backward();
  EXPECT_TRUE(activation.expired());
}

TEST(CheckpointTest, WithoutPreservingTheRngStateItIsLeftAlone) {
  CheckpointOptions options;
  options.preserve_rng_state = false;
  Tensors drawn;
  const at::Tensor input = at::ones({8}).requires_grad_();
  Checkpoint(
      [&](const Tensors& inputs) {
        drawn.push_back(at::rand({8}));
        return inputs[0] * 2;
      },
      {input}, options)
      .sum()
      .backward();
  ASSERT_EQ(drawn.size(), 2);
  EXPECT_FALSE(at::equal(drawn[0], drawn[1]));
}

// --- Errors ------------------------------------------------------------------

TEST(CheckpointTest, RefusesSecondDerivatives) {
  const at::Tensor output = Block().Checkpointed(at::randn({5, 8}));
  EXPECT_THAT([&] { output.sum().backward({}, true, /*create_graph=*/true); },
              ThrowsMessage<c10::Error>(HasSubstr("no second derivatives")));
}

TEST(CheckpointTest, RefusesGradientsOfGivenInputs) {
  const Block block;
  const at::Tensor input = at::randn({5, 8}).requires_grad_();
  EXPECT_THAT(
      [&] {
        torch::autograd::grad({block.Checkpointed(input).sum()}, {input});
      },
      ThrowsMessage<c10::Error>(HasSubstr("call backward() without inputs")));
  for (const at::Tensor& parameter : block.Parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(CheckpointTest, RefusesAnotherNumberOfOutputs) {
  size_t outputs = 2;
  const Tensors result = Checkpoint(
      [&](const Tensors& inputs) {
        return Tensors(outputs--, inputs[0].square());
      },
      {at::ones({3}).requires_grad_()});
  EXPECT_THAT([&] { (result[0] + result[1]).sum().backward(); },
              ThrowsMessage<c10::Error>(
                  HasSubstr("has 1 outputs in backward, but had 2")));
}

TEST(CheckpointTest, RefusesAnInputThatWasChanged) {
  const at::Tensor input = at::ones({3});
  const at::Tensor output = Checkpoint(
      [](const Tensors& inputs) { return inputs[0].square(); }, {input});
  input.add_(1);
  EXPECT_THAT(
      [&] { output.sum().backward(); },
      ThrowsMessage<c10::Error>(HasSubstr("modified by an inplace operation")));
}

TEST(CheckpointTest, WhatTheFunctionThrowsComesOutAndRestoresAllState) {
  int calls = 0;
  const auto checkpointed = [&](int throwing_call) {
    calls = 0;
    return Checkpoint(
        [&calls, throwing_call](const Tensors& inputs) {
          at::rand({1});
          if (++calls == throwing_call) throw std::runtime_error("no memory");
          return inputs[0] * 2;
        },
        {at::ones({3}).requires_grad_()});
  };
  const auto expect_untouched = [](const auto& call) {
    EXPECT_THAT(call,
                ThrowsMessage<std::runtime_error>(HasSubstr("no memory")));
    EXPECT_TRUE(c10::GradMode::is_enabled());
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  };
  expect_untouched([&] { checkpointed(1); });
  at::Tensor output;
  {
    const AutocastScope autocast;
    output = checkpointed(2);
  }
  const at::Tensor before = RngState();
  expect_untouched([&] { output.sum().backward(); });
  EXPECT_TRUE(at::equal(RngState(), before));
}

}  // namespace
}  // namespace trainer_lora::lora
