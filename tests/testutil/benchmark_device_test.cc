#include "tests/testutil/benchmark_device.h"

#include <chrono>
#include <cstdlib>
#include <string>

#include "ATen/detail/CUDAHooksInterface.h"
#include "ATen/ops/ones.h"
#include "c10/core/Device.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {
namespace {

bool HasGpu() { return at::detail::getCUDAHooks().deviceCount() > 0; }

// InitializeBenchmark() for `flag`, and then an end with status 3.
void InitializeAndExit(std::string flag) {
  std::string program = "program";
  char* argv[] = {program.data(), flag.data(), nullptr};
  int argc = 2;
  InitializeBenchmark(argc, argv);
  std::exit(3);
}

TEST(InitializeBenchmarkTest, EndsWithSuccessAndOneLineWithoutGpu) {
  if (HasGpu()) GTEST_SKIP() << "this machine has a GPU";
  EXPECT_EXIT(InitializeAndExit("--device=cuda"),
              testing::ExitedWithCode(EXIT_SUCCESS),
              "^--device=cuda: nothing is measured, as this (build has no "
              "CUDA|machine has no GPU)\n$");
}

TEST(InitializeBenchmarkTest, GoesOnWithADevice) {
  EXPECT_EXIT(InitializeAndExit("--device=cpu"), testing::ExitedWithCode(3),
              "");
  EXPECT_EXIT(InitializeAndExit("--benchmark_min_time=1"),
              testing::ExitedWithCode(3), "");
}

TEST(InitializeBenchmarkTest, FailsForAnUnknownArgument) {
  EXPECT_EXIT(InitializeAndExit("--rounds=3"),
              testing::ExitedWithCode(EXIT_FAILURE), "--rounds=3");
}

TEST(BenchmarkDeviceTest, IsTheCpuByDefault) {
  EXPECT_EQ(BenchmarkDevice(), at::Device(at::kCPU));
}

TEST(DeviceTimerTest, TakesNoLongerThanTheClockAroundIt) {
  const auto begin = std::chrono::steady_clock::now();
  const double seconds = SecondsOnDevice([] { return at::ones({1000}).sum(); });
  const std::chrono::duration<double> around =
      std::chrono::steady_clock::now() - begin;
  EXPECT_GT(seconds, 0);
  EXPECT_LE(seconds, around.count());
}

TEST(DeviceTimerTest, TimesWhatTheGpuStillComputes) {
  if (!HasGpu()) GTEST_SKIP() << "this machine has no GPU";
  const at::Device gpu(at::kCUDA, 0);
  const at::Tensor x = at::ones({4096, 4096}, gpu);
  DeviceTimer timer(gpu);
  const auto queue_begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) x.mm(x);
  const std::chrono::duration<double> queueing =
      std::chrono::steady_clock::now() - queue_begin;
  // 13.7 TFLOP, which no GPU does while the host queues a hundred kernels.
  EXPECT_GT(timer.Stop(), queueing.count());
}

}  // namespace
}  // namespace trainer_lora::testutil
