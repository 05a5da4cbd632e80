// The device that a benchmark measures on, as its flag --device= says, and a
// clock for what runs there:
//
//   const at::Tensor x = at::randn({n, n}, BenchmarkDevice());
//   state.SetIterationTime(SecondsOnDevice([&] { return at::matmul(x, x); }));
//
// All of it goes through libtorch's interface for devices of any kind, so that
// the source of a benchmark is the same for a libtorch with CUDA and without.
#ifndef TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_DEVICE_H_
#define TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_DEVICE_H_

#include <chrono>
#include <optional>
#include <type_traits>

#include "benchmark/benchmark.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"

namespace trainer_lora::testutil {

// What a main() begins with: takes --device=cpu, the default, or --device=cuda
// out of the arguments, and initializes Google Benchmark with the others, to
// whose context it adds the device and the versions of compiler and libtorch.
// Ends the process: with success, and a line that says so, where a GPU is asked
// for and none is there; with failure for an argument that no one knows.
void InitializeBenchmark(int& argc, char** argv);

// cpu or cuda:0, after InitializeBenchmark().
at::Device BenchmarkDevice();

// Returns when `device` has done all that is queued on it.
void Synchronize(at::Device device);

// Runs from its construction to Stop(): on the clock of the host for the CPU,
// between two events on the current stream for CUDA.
class DeviceTimer {
 public:
  // Synchronizes before it starts, so that earlier work does not count.
  explicit DeviceTimer(at::Device device);

  // The seconds until all that is now on the stream is done; waits for it.
  double Stop();

 private:
  const at::Device device_;
  std::optional<c10::Event> begin_;  // For CUDA.
  std::chrono::steady_clock::time_point host_begin_;
};

// The seconds that `function` takes on BenchmarkDevice(). What it returns is
// let go of when the time is taken.
template <typename Function>
double SecondsOnDevice(const Function& function) {
  DeviceTimer timer(BenchmarkDevice());
  if constexpr (std::is_void_v<decltype(function())>) {
    function();
    return timer.Stop();
  } else {
    const auto result = function();
    benchmark::DoNotOptimize(&result);
    return timer.Stop();
  }
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_DEVICE_H_
