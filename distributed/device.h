// The device that this process computes on:
//
//   LORA_ASSIGN_OR_RETURN(at::Device device, GetLocalTorchDevice());
//   model.to(device);
#ifndef TRAINER_LORA_DISTRIBUTED_DEVICE_H_
#define TRAINER_LORA_DISTRIBUTED_DEVICE_H_

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::distributed {

// The CUDA device of this process's local rank, which the launcher's
// environment gives; `cpu` where there is no CUDA device. Errors as below, and
// those of config::ReadLaunchEnvironment.
absl::StatusOr<at::Device> GetLocalTorchDevice();

// The rule of GetLocalTorchDevice, for a process that sees `cuda_devices` CUDA
// devices: `cpu` for none; `cuda:0` for one, as with a launcher that shows each
// task its own; else `cuda:local_rank`. kFailedPrecondition for a local rank
// that is none of several devices.
absl::StatusOr<at::Device> LocalDevice(int local_rank, int cuda_devices);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_DEVICE_H_
