#include "distributed/device.h"

#include <string>

#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::StatusIs;

TEST(LocalDeviceTest, FollowsTheLocalRankAndTheVisibleDevices) {
  const struct {
    const char* name;
    int local_rank;
    int cuda_devices;
    const char* device;
  } cases[] = {
      {"no CUDA", 0, 0, "cpu"},
      {"no CUDA, a later rank", 3, 0, "cpu"},
      {"one device", 0, 1, "cuda:0"},
      {"a launcher that shows each task its own device", 3, 1, "cuda:0"},
      {"first of several", 0, 8, "cuda:0"},
      {"last of several", 7, 8, "cuda:7"},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    LORA_ASSERT_OK_AND_ASSIGN(at::Device device,
                              LocalDevice(c.local_rank, c.cuda_devices));
    EXPECT_EQ(device.str(), c.device);
  }
}

TEST(LocalDeviceTest, RefusesARankBeyondTheVisibleDevices) {
  EXPECT_THAT(LocalDevice(/*local_rank=*/2, /*cuda_devices=*/2),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("local rank 2"), HasSubstr("sees 2"),
                             HasSubstr("CUDA_VISIBLE_DEVICES"))));
}

TEST(GetLocalTorchDeviceTest, IsTheCpuWithoutCuda) {
  if (at::detail::getCUDAHooks().deviceCount() > 0) {
    GTEST_SKIP() << "this machine has CUDA devices";
  }
  LORA_ASSERT_OK_AND_ASSIGN(at::Device device, GetLocalTorchDevice());
  EXPECT_EQ(device, at::Device(at::kCPU));
}

}  // namespace
}  // namespace trainer_lora::distributed
