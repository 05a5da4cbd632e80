// Needs a GPU, and takes all that there are.
#include "distributed/nccl_process_group.h"

#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/collectives.h"
#include "distributed/device.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/run_collective.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/gpu.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/status_matchers.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::NumGpus;
using ::trainer_lora::testutil::ProcessRanks;
using ::trainer_lora::testutil::RankScenario;
using ::trainer_lora::testutil::StatusIs;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr char kAllReduce[] = "all-reduce";
constexpr char kOneDevice[] = "two ranks on one device";
constexpr char kLostPeer[] = "a peer that never comes to a collective";

absl::StatusOr<GroupPtr> Join(const config::LaunchEnvironment& environment,
                              at::Device device) {
  ProcessGroupOptions options;
  options.timeout = std::chrono::seconds(20);
  options.device = device;
  return InitProcessGroup(environment, options);
}

absl::Status AllReduceOn(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  return internal::RunCollective(group, "all-reduce",
                                 [&] { return group.allreduce(tensors); });
}

// A sum of 1 to the number of ranks, for tensors on either device.
void CheckSums(const GroupPtr& group, const at::Device& device) {
  for (const at::Device& place : {device, at::Device(at::kCPU)}) {
    const at::Tensor tensor = at::full(
        {5}, group->getRank() + 1, at::TensorOptions(place).dtype(at::kFloat));
    ASSERT_THAT(AllReduceOn(*group, tensor), IsOk());
    const int size = group->getSize();
    EXPECT_TRUE(
        at::equal(tensor.cpu(), at::full({5}, size * (size + 1) / 2.0f)))
        << place;
  }
}

class NcclProcessGroupTest : public testutil::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsRankProcess()) GTEST_SKIP() << "is a rank of another test";
  }
};

TEST_F(NcclProcessGroupTest, ReducesOnOneDevice) {
  LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group, Join(config::LaunchEnvironment(),
                                                 at::Device(at::kCUDA, 0)));
  EXPECT_EQ(group->getBoundDeviceId(), at::Device(at::kCUDA, 0));
  CheckSums(group, at::Device(at::kCUDA, 0));
}

TEST_F(NcclProcessGroupTest, ReducesOnAllDevicesAndInSubgroups) {
  ProcessRanks ranks(kAllReduce, NumGpus());
  for (int rank = 0; rank < NumGpus(); ++rank) {
    EXPECT_TRUE(ranks.EndedWell(rank));
  }
}

TEST_F(NcclProcessGroupTest, SaysWithNcclThatTwoRanksAreOnOneDevice) {
  ProcessRanks ranks(kOneDevice, 2);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST_F(NcclProcessGroupTest, AbortsACollectiveThatAPeerDoesNotJoin) {
  if (NumGpus() < 2) GTEST_SKIP() << "needs two GPUs, here is one";
  ProcessRanks ranks(kLostPeer, 2);
  for (int rank = 0; rank < 2; ++rank) EXPECT_TRUE(ranks.EndedWell(rank));
}

TEST_F(NcclProcessGroupTest, FailsAfterAbort) {
  LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group, Join(config::LaunchEnvironment(),
                                                 at::Device(at::kCUDA, 0)));
  group->abort();
  const at::Tensor tensor = at::ones({1}, at::kCUDA);
  EXPECT_THAT(AllReduceOn(*group, tensor),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("aborted")));
}

TEST_F(NcclProcessGroupTest, RefusesADeviceWithoutIndex) {
  LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group,
                            InitProcessGroup(config::LaunchEnvironment()));
  EXPECT_THAT(AddNcclBackend(*group, at::kCUDA, std::chrono::seconds(1)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("such as cuda:0, got cuda")));
}

TEST_F(NcclProcessGroupTest, RefusesAGroupThatHasABackendForCuda) {
  const at::Device device(at::kCUDA, 0);
  LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group,
                            Join(config::LaunchEnvironment(), device));
  EXPECT_THAT(AddNcclBackend(*group, device, std::chrono::seconds(1)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has a backend for CUDA already")));
  CheckSums(group, device);
}

// Two dimensions where the number of ranks allows it.
void CheckSubgroups(const GroupPtr& world, const at::Device& device) {
  const int64_t rows = world->getSize() % 2 == 0 ? 2 : 1;
  const int64_t columns = world->getSize() / rows;
  LORA_ASSERT_OK_AND_ASSIGN(
      std::shared_ptr<const DeviceMesh> mesh,
      DeviceMesh::Create(world, {{"a", rows}, {"b", columns}}));
  for (int64_t dim = 0; dim < 2; ++dim) {
    EXPECT_EQ(mesh->group(dim)->getBoundDeviceId(), device);
    CheckSums(mesh->group(dim), device);
  }
  EXPECT_THAT(Barrier(*mesh), IsOk());
}

// Rank 1 stays away. Rank 0 learns of it from a later collective, once the
// watchdog has aborted the first.
void CheckLostPeer(const GroupPtr& group, const at::Device& device) {
  constexpr char kDone[] = "rank 0 is done";
  if (group->getRank() == 0) {
    const at::Tensor tensor = at::ones({1}, device);
    EXPECT_THAT(AllReduceOn(*group, tensor), IsOk());  // Queued.
    tensor.cpu();  // Waits for the device, so until the abort.
    EXPECT_THAT(internal::CheckCudaBackend(*group, "all-reduce"),
                StatusIs(absl::StatusCode::kDeadlineExceeded,
                         HasSubstr("timed out on the device")));
    EXPECT_THAT(AllReduceOn(*group, tensor), Not(IsOk()));
    group->getStore()->set(kDone, std::vector<uint8_t>{1});
  } else {
    group->getStore()->wait({kDone}, std::chrono::seconds(90));
  }
  EXPECT_THAT(AllReduceOn(*group, at::ones({1})), IsOk());  // Gloo's.
}

TEST(NcclProcessGroupRanks, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs in the other tests' processes";
  alarm(120);  // A rank that hangs ends with a signal, which is a failure.
  const std::string scenario = RankScenario();
  LORA_ASSERT_OK_AND_ASSIGN(config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  if (scenario == kOneDevice) {
    LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group, Join(environment, at::kCPU));
    EXPECT_THAT(
        AddNcclBackend(*group, at::Device(at::kCUDA, 0),
                       std::chrono::seconds(20)),
        StatusIs(absl::StatusCode::kUnavailable, HasSubstr("Duplicate GPU")));
    // The group is as it was.
    EXPECT_EQ(group->getBoundDeviceId(), std::nullopt);
    EXPECT_THAT(AllReduceOn(*group, at::ones({1}, at::kCUDA)),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("all-reduce failed")));
    EXPECT_THAT(AllReduceOn(*group, at::ones({1})), IsOk());
    return;
  }
  LORA_ASSERT_OK_AND_ASSIGN(const at::Device device, GetLocalTorchDevice());
  LORA_ASSERT_OK_AND_ASSIGN(GroupPtr group, Join(environment, device));
  if (scenario == kLostPeer) {
    CheckLostPeer(group, device);
  } else {
    CheckSums(group, device);
    CheckSubgroups(group, device);
  }
}

}  // namespace
}  // namespace trainer_lora::distributed
