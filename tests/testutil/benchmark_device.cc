#include "tests/testutil/benchmark_device.h"

#include <chrono>
#include <cstdlib>
#include <iostream>

#include "ATen/detail/CUDAHooksInterface.h"
#include "benchmark/benchmark.h"
#include "c10/core/Device.h"
#include "c10/core/Event.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "tests/testutil/benchmark_flags.h"
#include "torch/version.h"

namespace trainer_lora::testutil {
namespace {

at::Device measured_device = at::kCPU;

c10::Event RecordEvent(at::Device device) {
  c10::Event event(device.type(),
                   c10::EventFlag::BACKEND_DEFAULT);  // With a time.
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}

}  // namespace

void InitializeBenchmark(int& argc, char** argv) {
  if (TakeDeviceFlag(argc, argv) == "cuda") {
    const at::CUDAHooksInterface& cuda = at::detail::getCUDAHooks();
    if (cuda.deviceCount() <= 0) {
      std::cerr << "--device=cuda: nothing is measured, as "
                << (cuda.hasCUDART() ? "this machine has no GPU"
                                     : "this build has no CUDA")
                << std::endl;
      std::exit(EXIT_SUCCESS);
    }
    measured_device = at::Device(at::kCUDA, 0);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    std::exit(EXIT_FAILURE);
  }
  benchmark::AddCustomContext("device", measured_device.str());
  benchmark::AddCustomContext("compiler", CompilerVersion());
  benchmark::AddCustomContext("libtorch", TORCH_VERSION);
}

at::Device BenchmarkDevice() { return measured_device; }

void Synchronize(at::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

DeviceTimer::DeviceTimer(at::Device device) : device_(device) {
  Synchronize(device_);
  if (!device_.is_cpu()) begin_ = RecordEvent(device_);
  host_begin_ = std::chrono::steady_clock::now();
}

double DeviceTimer::Stop() {
  if (device_.is_cpu()) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         host_begin_)
        .count();
  }
  const c10::Event end = RecordEvent(device_);
  end.synchronize();
  return begin_->elapsedTime(end) / 1e3;  // It is in milliseconds.
}

}  // namespace trainer_lora::testutil
