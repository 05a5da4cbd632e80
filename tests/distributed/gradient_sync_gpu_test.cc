// Needs a GPU, and takes all that there are.
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/cuda/CUDACachingAllocator.h"
#include "c10/cuda/CUDAFunctions.h"
#include "config/launch_environment.h"
#include "distributed/collectives.h"
#include "distributed/device.h"
#include "distributed/device_mesh.h"
#include "distributed/grad_norm.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/gpu.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/sync_error_scope.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::NumGpus;
using ::trainer_lora::testutil::ProcessRanks;
using ::trainer_lora::testutil::RankScenario;
using ::trainer_lora::testutil::StatusIs;
using ::trainer_lora::testutil::SyncErrorScope;
using MeshPtr = std::shared_ptr<const DeviceMesh>;

constexpr char kValues[] = "values";
constexpr char kAnotherRanksError[] = "another rank's error";
constexpr char kGloo[] = "over Gloo on one device";

// --- A model whose gradients are known ---------------------------------------

constexpr int64_t kNumParameters = 6;
constexpr int64_t kNumel = 1000;

// What `rank` has as the gradient of parameter `index`. Multiples of 1/8 below
// 16, so that sums and averages of a few are exact in bfloat16's products too.
at::Tensor LocalGradient(int64_t index, int64_t rank, at::ScalarType dtype) {
  return (at::arange(kNumel) + 7 * index + 13 * rank)
      .remainder(16)
      .div(8)
      .to(dtype);
}

// The average over the ranks, or the sum, computed on the CPU in double.
at::Tensor ReducedGradient(int64_t index, int64_t ranks, bool is_sum,
                           at::ScalarType dtype) {
  at::Tensor sum = at::zeros({kNumel}, at::kDouble);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    sum += LocalGradient(index, rank, dtype).to(at::kDouble);
  }
  return (is_sum ? sum : sum / ranks).to(dtype);
}

absl::StatusOr<MeshPtr> JoinMesh() {
  auto environment = config::ReadLaunchEnvironment();
  if (!environment.ok()) return environment.status();
  ProcessGroupOptions options;
  auto device = GetLocalTorchDevice();
  if (!device.ok()) return device.status();
  options.device = *device;
  auto group = InitProcessGroup(*environment, options);
  if (!group.ok()) return group.status();
  c10::cuda::set_device(device->index());
  return DeviceMesh::Create(*std::move(group));
}

// For ranks that share a device, which NCCL refuses.
absl::StatusOr<MeshPtr> JoinMeshOverGloo() {
  auto environment = config::ReadLaunchEnvironment();
  if (!environment.ok()) return environment.status();
  auto group = InitProcessGroup(*environment);
  if (!group.ok()) return group.status();
  (*group)->setBackend(at::kCUDA, c10d::ProcessGroup::BackendType::GLOO,
                       (*group)->getBackend(at::kCPU));
  c10::cuda::set_device(0);
  return DeviceMesh::Create(*std::move(group));
}

std::vector<DistributedParameter> MakeParameters(const MeshPtr& mesh,
                                                 bool is_sum,
                                                 at::ScalarType dtype) {
  ParameterLayout layout = ParameterLayout::Replicated(mesh);
  if (is_sum) {
    layout.placements = {Placement::Replicate(GradientReduction::kSum)};
  }
  std::vector<DistributedParameter> parameters;
  for (int64_t i = 0; i < kNumParameters; ++i) {
    parameters.push_back(
        {"p" + std::to_string(i),
         at::zeros({kNumel}, at::TensorOptions(at::kCUDA).dtype(dtype))
             .set_requires_grad(true),
         layout});
  }
  return parameters;
}

// Makes each parameter's gradient the local one.
class Backward {
 public:
  Backward(const std::vector<DistributedParameter>& parameters, int64_t rank,
           at::ScalarType dtype)
      : parameters_(parameters) {
    for (int64_t i = 0; i < kNumParameters; ++i) {
      gradients_.push_back(LocalGradient(i, rank, dtype).to(at::kCUDA));
    }
  }

  void operator()() const {
    at::Tensor loss = at::zeros({}, gradients_[0].options());
    for (int64_t i = 0; i < kNumParameters; ++i) {
      loss = loss + (parameters_[i].parameter * gradients_[i]).sum();
    }
    loss.backward();
  }

 private:
  std::vector<DistributedParameter> parameters_;
  std::vector<at::Tensor> gradients_;
};

GradientSyncOptions Options(bool overlap, bool reduce_in_float32) {
  GradientSyncOptions options;
  options.bucket_bytes = 2 * kNumel * 4;  // Several buffers.
  options.overlap_backward = overlap;
  options.reduce_in_float32 = reduce_in_float32;
  return options;
}

void CheckValues(const MeshPtr& mesh) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const bool is_sum : {false, true}) {
      for (const bool overlap : {false, true}) {
        for (const bool reduce_in_float32 : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << dtype << (is_sum ? " sum" : " average")
                       << (overlap ? " overlap" : "")
                       << (reduce_in_float32 ? " in float32" : ""));
          const auto parameters = MakeParameters(mesh, is_sum, dtype);
          LORA_ASSERT_OK_AND_ASSIGN(
              auto sync,
              GradientSync::Create(mesh, parameters,
                                   Options(overlap, reduce_in_float32)));
          const Backward backward(parameters, mesh->rank(), dtype);
          for (int step = 0; step < 2; ++step) {
            sync->ZeroGrad();
            backward();
            ASSERT_THAT(sync->Sync(), IsOk());
          }
          for (int64_t i = 0; i < kNumParameters; ++i) {
            const at::Tensor expected =
                ReducedGradient(i, mesh->size(), is_sum, dtype);
            EXPECT_TRUE(at::allclose(parameters[i].parameter.grad().cpu(),
                                     expected, /*rtol=*/1e-2, /*atol=*/1e-2))
                << parameters[i].name;
          }
        }
      }
    }
  }
}

// That the host never waits for the device. A rank alone has no collectives:
// those of TrainsOnAllDevices have.
void CheckHotPath(const MeshPtr& mesh) {
  const auto parameters = MakeParameters(mesh, /*is_sum=*/false, at::kFloat);
  LORA_ASSERT_OK_AND_ASSIGN(
      auto sync, GradientSync::Create(mesh, parameters, Options(true, false)));
  const Backward backward(parameters, mesh->rank(), at::kFloat);
  const SyncErrorScope scope;
  EXPECT_ANY_THROW(parameters[0].parameter.sum().item());  // It would show.
  for (int step = 0; step < 3; ++step) {
    sync->ZeroGrad();
    backward();
    EXPECT_THAT(sync->Sync(), IsOk());
  }
}

void CheckMemory(const MeshPtr& mesh) {
  const auto parameters = MakeParameters(mesh, /*is_sum=*/false, at::kFloat);
  LORA_ASSERT_OK_AND_ASSIGN(
      auto sync, GradientSync::Create(mesh, parameters, Options(true, false)));
  const Backward backward(parameters, mesh->rank(), at::kFloat);
  const auto step = [&] {
    sync->ZeroGrad();
    backward();
    EXPECT_THAT(sync->Sync(), IsOk());
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

// Rank 0 has a gradient that it can't answer for, as it is a sum already.
void CheckAnotherRanksError(const MeshPtr& mesh, bool overlap) {
  const auto parameters = MakeParameters(mesh, /*is_sum=*/true, at::kFloat);
  LORA_ASSERT_OK_AND_ASSIGN(
      auto sync,
      GradientSync::Create(mesh, parameters, Options(overlap, false)));
  const Backward backward(parameters, mesh->rank(), at::kFloat);
  backward();
  ASSERT_THAT(sync->Sync(), IsOk());
  if (mesh->rank() == 0) {  // Without ZeroGrad().
    EXPECT_THAT(sync->Sync(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("would be summed twice")));
  } else {
    sync->ZeroGrad();
    backward();
    EXPECT_THAT(sync->Sync(), IsOk());
    EXPECT_TRUE(at::isnan(parameters[0].parameter.grad()).all().item<bool>());
    sync->ZeroGrad();
    backward();  // Starts nothing, with overlap: rank 0 would not join.
    EXPECT_THAT(sync->Sync(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("another rank")));
  }
  ASSERT_THAT(sync->Replace(parameters), IsOk());
  sync->ZeroGrad();
  backward();
  ASSERT_THAT(sync->Sync(), IsOk());
  for (int64_t i = 0; i < kNumParameters; ++i) {
    EXPECT_TRUE(at::equal(
        parameters[i].parameter.grad().cpu(),
        ReducedGradient(i, mesh->size(), /*is_sum=*/true, at::kFloat)));
  }
  EXPECT_THAT(Barrier(*mesh), IsOk());
}

class GradientSyncGpuTest : public testutil::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsRankProcess()) GTEST_SKIP() << "is a rank of another test";
  }
};

TEST_F(GradientSyncGpuTest, GivesTheValuesOfTheCpuOnOneDevice) {
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, JoinMesh());
  CheckValues(mesh);
}

TEST_F(GradientSyncGpuTest, TrainsOnAllDevices) {
  ProcessRanks ranks(kValues, NumGpus());
  for (int rank = 0; rank < NumGpus(); ++rank) {
    EXPECT_TRUE(ranks.EndedWell(rank));
  }
}

TEST_F(GradientSyncGpuTest, TellsOfAnotherRanksErrorAStepLater) {
  if (NumGpus() < 2) GTEST_SKIP() << "needs two GPUs, here is one";
  ProcessRanks ranks(kAnotherRanksError, 2);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST_F(GradientSyncGpuTest, ReducesOverGlooWhereRanksShareADevice) {
  ProcessRanks ranks(kGloo, 2);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST_F(GradientSyncGpuTest, TheHostDoesNotWaitForTheDevice) {
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, JoinMesh());
  CheckHotPath(mesh);
}

TEST_F(GradientSyncGpuTest, AStepTakesNoFurtherMemory) {
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, JoinMesh());
  CheckMemory(mesh);
}

TEST_F(GradientSyncGpuTest, MeasuresTheNormOfTheCpu) {
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, JoinMesh());
  const auto parameters = MakeParameters(mesh, /*is_sum=*/false, at::kFloat);
  double squared_norm = 0;
  for (int64_t i = 0; i < kNumParameters; ++i) {
    const at::Tensor gradient = LocalGradient(i, /*rank=*/0, at::kFloat);
    parameters[i].parameter.mutable_grad() = gradient.to(at::kCUDA);
    squared_norm += gradient.to(at::kDouble).pow(2).sum().item<double>();
  }
  LORA_ASSERT_OK_AND_ASSIGN(const double norm,
                            ClipGradNorm(*mesh, parameters, /*max_norm=*/1.0));
  EXPECT_NEAR(norm, std::sqrt(squared_norm), 1e-6 * norm);
}

TEST(GradientSyncGpuRanks, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs in the other tests' processes";
  alarm(120);  // A rank that hangs ends with a signal, which is a failure.
  const bool is_over_gloo = RankScenario() == kGloo;
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                            is_over_gloo ? JoinMeshOverGloo() : JoinMesh());
  if (is_over_gloo || RankScenario() == kAnotherRanksError) {
    CheckAnotherRanksError(mesh, /*overlap=*/false);
    CheckAnotherRanksError(mesh, /*overlap=*/true);
    return;
  }
  CheckValues(mesh);
  CheckHotPath(mesh);
  CheckMemory(mesh);
  EXPECT_THAT(Barrier(*mesh), IsOk());
}

}  // namespace
}  // namespace trainer_lora::distributed
