#include "distributed/device.h"

#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "config/internal/status_macros.h"
#include "config/launch_environment.h"

namespace trainer_lora::distributed {

absl::StatusOr<at::Device> GetLocalTorchDevice() {
  LORA_ASSIGN_OR_RETURN(const config::LaunchEnvironment environment,
                        config::ReadLaunchEnvironment());
  // The hooks are there in a CPU-only build too, and then count 0.
  return LocalDevice(environment.local_rank,
                     at::detail::getCUDAHooks().deviceCount());
}

absl::StatusOr<at::Device> LocalDevice(int local_rank, int cuda_devices) {
  if (cuda_devices <= 0) return at::Device(at::kCPU);
  if (cuda_devices == 1) return at::Device(at::kCUDA, 0);
  if (local_rank < 0 || local_rank >= cuda_devices) {
    return absl::FailedPreconditionError(absl::StrCat(
        "local rank ", local_rank, " has no CUDA device: this process sees ",
        cuda_devices, "; start at most ", cuda_devices,
        " processes on this machine, or check CUDA_VISIBLE_DEVICES"));
  }
  return at::Device(at::kCUDA, static_cast<at::DeviceIndex>(local_rank));
}

}  // namespace trainer_lora::distributed
