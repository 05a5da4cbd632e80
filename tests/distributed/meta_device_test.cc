#include "distributed/meta_device.h"

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/ones_like.h"
#include "ATen/ops/rand.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "c10/core/InferenceMode.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/modules/rnn.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::HasSubstr;
using ::testing::StrEq;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

TEST(MetaDeviceGuardTest, BuildsStockModulesWithoutMemory) {
  const MetaDeviceGuard meta_device;
  // Each would take terabytes: that this test ends shows that none is taken.
  const int64_t huge = int64_t{1} << 20;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules = {
      torch::nn::Linear(huge, huge).ptr(),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({huge, huge})).ptr(),
      torch::nn::Embedding(
          torch::nn::EmbeddingOptions(huge, huge).padding_idx(3))
          .ptr(),
      torch::nn::Conv2d(torch::nn::Conv2dOptions(huge, huge, 3)).ptr(),
      torch::nn::BatchNorm1d(huge).ptr(),
      torch::nn::LSTM(torch::nn::LSTMOptions(huge, huge)).ptr(),
  };
  for (const auto& module : modules) {
    SCOPED_TRACE(module->name());
    EXPECT_FALSE(module->parameters().empty());
    for (const auto& item : module->named_parameters()) {
      EXPECT_TRUE(item.value().is_meta()) << item.key();
      EXPECT_TRUE(item.value().requires_grad()) << item.key();
      EXPECT_TRUE(item.value().is_leaf()) << item.key();
    }
    for (const auto& item : module->named_buffers()) {
      EXPECT_TRUE(item.value().is_meta()) << item.key();
    }
  }
}

TEST(MetaDeviceGuardTest, KeepsShapesAndTypes) {
  const MetaDeviceGuard meta_device;
  const torch::nn::Linear linear(3, 5);
  EXPECT_EQ(linear->weight.sizes(), (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(linear->bias.sizes(), (std::vector<int64_t>{5}));
  EXPECT_EQ(linear->weight.scalar_type(), at::kFloat);
  EXPECT_EQ(at::arange(4).scalar_type(), at::kLong);
  EXPECT_EQ(at::zeros({2}, at::kBFloat16).scalar_type(), at::kBFloat16);
}

TEST(MetaDeviceGuardTest, OverridesTheDeviceThatACallAsksFor) {
  const at::Tensor real = at::ones({2});
  const MetaDeviceGuard meta_device;
  EXPECT_TRUE(at::empty({2}, at::kCPU).is_meta());
  EXPECT_TRUE(at::rand({2}).is_meta());
  EXPECT_TRUE(at::full({2}, 3.0).is_meta());
  EXPECT_TRUE(at::ones_like(real).is_meta());
  EXPECT_TRUE(at::empty({2}).to(at::kCPU).is_meta());
}

TEST(MetaDeviceGuardTest, RunsInitializersOnMetaWithoutDrawing) {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const at::Tensor state = generator.get_state();
  const MetaDeviceGuard meta_device;
  const at::Tensor weight = at::empty({8, 4});
  torch::nn::init::kaiming_uniform_(weight, 2.0);
  torch::nn::init::xavier_normal_(weight);
  torch::nn::init::orthogonal_(weight);
  torch::nn::init::constant_(weight, 1.0);
  torch::nn::init::normal_(weight);
  torch::nn::init::uniform_(weight);
  EXPECT_TRUE(weight.is_meta());
  EXPECT_TRUE(at::equal(generator.get_state(), state));
}

TEST(MetaDeviceGuardTest, LeavesExistingTensorsInUse) {
  const at::Tensor real = at::full({3}, 2.0);
  const MetaDeviceGuard meta_device;
  EXPECT_TRUE((real * 3).is_cpu());
  EXPECT_EQ(real.sum().item<float>(), 6.0f);
  real.fill_(1.0);
  EXPECT_EQ(real.sum().item<float>(), 3.0f);
}

TEST(MetaDeviceGuardTest, ThrowsWhereElementsAreWrittenByPointer) {
  const MetaDeviceGuard meta_device;
  const std::vector<float> values = {1.0f, 2.0f};
  EXPECT_THROW(at::tensor(values), c10::Error);
  EXPECT_THROW(at::empty({2}).mutable_data_ptr<float>(), c10::Error);
  EXPECT_THROW(at::empty({}).item(), c10::Error);
}

TEST(MetaDeviceGuardTest, EndsWithItsScopeAndNests) {
  {
    const MetaDeviceGuard outer;
    {
      const MetaDeviceGuard inner;
      EXPECT_TRUE(at::empty({1}).is_meta());
    }
    EXPECT_TRUE(at::empty({1}).is_meta());
  }
  EXPECT_TRUE(at::empty({1}).is_cpu());
}

TEST(MetaDeviceGuardTest, HoldsForItsThreadOnly) {
  const MetaDeviceGuard meta_device;
  bool is_cpu = false;
  std::thread([&] { is_cpu = at::empty({1}).is_cpu(); }).join();
  EXPECT_TRUE(is_cpu);
}

TEST(MaterializeInPlaceTest, KeepsEveryHandleAndRequiresGrad) {
  std::shared_ptr<torch::nn::LinearImpl> linear;
  {
    const MetaDeviceGuard meta_device;
    linear = std::make_shared<torch::nn::LinearImpl>(2, 1);
  }
  linear->bias.set_requires_grad(false);
  const at::Tensor handle = linear->named_parameters()["weight"];
  const at::Tensor value = at::full({1, 2}, 3.0);
  ASSERT_THAT(MaterializeInPlace(linear->weight, value), IsOk());
  ASSERT_THAT(MaterializeInPlace(linear->bias, at::zeros({1})), IsOk());

  EXPECT_TRUE(handle.is_cpu());
  EXPECT_TRUE(handle.is_same(linear->weight));
  EXPECT_TRUE(at::equal(handle, value));
  EXPECT_EQ(handle.data_ptr(), value.data_ptr());
  EXPECT_TRUE(linear->weight.requires_grad());
  EXPECT_FALSE(linear->bias.requires_grad());

  // It trains: d(3a + 3b)/dweight = (a, b).
  linear->forward(at::arange(1.0, 3.0).reshape({1, 2})).sum().backward();
  EXPECT_EQ(linear->weight.grad()[0][0].item<float>(), 1.0f);
  EXPECT_EQ(linear->weight.grad()[0][1].item<float>(), 2.0f);
  EXPECT_FALSE(linear->bias.grad().defined());
}

TEST(MaterializeInPlaceTest, RefusesWhatWouldNotFit) {
  at::Tensor meta;
  {
    const MetaDeviceGuard meta_device;
    meta = at::empty({2, 3});
  }
  at::Tensor inference_value;
  {
    const c10::InferenceMode inference_mode;
    inference_value = at::ones({2, 3});
  }
  at::Tensor with_gradient = at::empty({2}, at::kMeta);
  with_gradient.mutable_grad() = at::empty({2}, at::kMeta);
  const struct {
    at::Tensor tensor;
    at::Tensor value;
    const char* message;
  } cases[] = {
      {at::ones({2}), at::ones({2}), "not on the meta device"},
      {meta, meta, "is on the meta device itself"},
      {meta, at::ones({3, 2}), "shape [2, 3]"},
      {meta, at::ones({2, 3}, at::kHalf), "type Half"},
      {meta, inference_value, "inference mode"},
      {with_gradient, at::ones({2}), "has a gradient"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(
        MaterializeInPlace(c.tensor, c.value),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(c.message)));
  }
  EXPECT_TRUE(meta.is_meta());
  EXPECT_TRUE(with_gradient.is_meta());
}

TEST(CheckMaterializedTest, NamesTheParametersAndBuffersWithoutMemory) {
  torch::nn::Module model;
  EXPECT_THAT(CheckMaterialized(model), IsOk());
  model.register_parameter("weight", at::zeros({2}));
  model.register_parameter("bias", at::empty({2}, at::kMeta));
  EXPECT_THAT(CheckMaterialized(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       StrEq("bias is on the meta device")));
  model.register_buffer("scale", at::empty({2}, at::kMeta));
  EXPECT_THAT(CheckMaterialized(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       StrEq("bias, scale are on the meta device")));
  for (int i = 0; i < 20; ++i) {
    model.register_buffer("b" + std::to_string(i), at::empty({2}, at::kMeta));
  }
  EXPECT_THAT(CheckMaterialized(model),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("b7 and 12 more are on the meta device")));
}

}  // namespace
}  // namespace trainer_lora::distributed
