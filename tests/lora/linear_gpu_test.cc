// An adapted layer on a GPU.
#include <cstdint>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/cuda/CUDAGraph.h"
#include "absl/status/status.h"
#include "c10/cuda/CUDACachingAllocator.h"
#include "c10/cuda/CUDAFunctions.h"
#include "c10/cuda/CUDAGuard.h"
#include "c10/cuda/CUDAStream.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/gpu.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/sync_error_scope.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::SyncErrorScope;

constexpr int64_t kWidth = 64;
constexpr double kLearningRate = 0.1;

// On the CPU, frozen, with an adapter of random factors that is trained.
ReplicatedLinear MakeLayer() {
  at::manual_seed(3);
  ReplicatedLinear layer(kWidth, kWidth);
  for (const at::Tensor& parameter : layer->parameters()) {
    parameter.set_requires_grad(false);
  }
  LoraAdapterOptions options;
  options.rank = 4;
  options.alpha = 8;
  auto adapter = layer->EmptyAdapter(options);
  EXPECT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.uniform_(-1, 1);
  EXPECT_THAT(layer->AdoptAdapter(*adapter), IsOk());
  return layer;
}

std::vector<at::Tensor> Trained(const ReplicatedLinear& layer) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : layer->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  return trained;
}

// Forward, backward, and a step of gradient descent. Needs gradients.
void Step(ReplicatedLinear& layer, const at::Tensor& input) {
  const std::vector<at::Tensor> trained = Trained(layer);
  for (const at::Tensor& parameter : trained) parameter.grad().zero_();
  layer->forward(input).pow(2).mean().backward();
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : trained) {
    parameter.sub_(parameter.grad(), kLearningRate);
  }
}

void MakeGradients(const ReplicatedLinear& layer) {
  for (const at::Tensor& parameter : Trained(layer)) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
}

class LinearGpuTest : public testutil::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    expected_ = MakeLayer();
    layer_ = MakeLayer();
    layer_->to(at::kCUDA);
    ASSERT_EQ(Trained(layer_).size(), 2);
    MakeGradients(expected_);
    MakeGradients(layer_);
    input_ = at::randn({32, kWidth});
    cuda_input_ = input_.to(at::kCUDA);
  }

  void ExpectEqualParameters() {
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(Trained(layer_)[i].cpu(), Trained(expected_)[i],
                               /*rtol=*/1e-3, /*atol=*/1e-4));
    }
  }

  ReplicatedLinear expected_{nullptr};  // On the CPU.
  ReplicatedLinear layer_{nullptr};
  at::Tensor input_;
  at::Tensor cuda_input_;
};

TEST_F(LinearGpuTest, TrainsAsOnTheCpu) {
  for (int step = 0; step < 3; ++step) {
    Step(expected_, input_);
    Step(layer_, cuda_input_);
  }
  ExpectEqualParameters();
}

TEST_F(LinearGpuTest, TheHostDoesNotWaitForTheDevice) {
  const SyncErrorScope scope;
  EXPECT_ANY_THROW(cuda_input_.sum().item());  // It would show.
  for (int step = 0; step < 3; ++step) Step(layer_, cuda_input_);
}

TEST_F(LinearGpuTest, AStepTakesNoFurtherMemory) {
  const auto step = [&] {
    Step(layer_, cuda_input_);
    c10::cuda::device_synchronize();
    const auto statistics = c10::cuda::CUDACachingAllocator::getDeviceStats(
        c10::cuda::current_device());
    return std::make_pair(statistics.allocated_bytes[0].current,
                          statistics.reserved_bytes[0].current);
  };
  step();
  const auto second = step();
  EXPECT_EQ(step(), second);
}

TEST_F(LinearGpuTest, AStepCanBeCapturedAndReplayed) {
  std::vector<at::Tensor> initial;
  for (const at::Tensor& parameter : Trained(layer_)) {
    initial.push_back(parameter.detach().clone());
  }
  at::cuda::CUDAGraph graph;
  {
    // Not the default stream, which can't be captured.
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    Step(layer_, cuda_input_);  // What libraries set up once.
    c10::cuda::device_synchronize();
    graph.capture_begin();
    Step(layer_, cuda_input_);
    graph.capture_end();
  }
  c10::cuda::device_synchronize();
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < 2; ++i) Trained(layer_)[i].copy_(initial[i]);
  }
  for (int step = 0; step < 3; ++step) {
    Step(expected_, input_);
    graph.replay();
  }
  c10::cuda::device_synchronize();
  ExpectEqualParameters();
}

}  // namespace
}  // namespace trainer_lora::lora
