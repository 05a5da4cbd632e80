// In the place of nccl_process_group.cc in a build for CPU.
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "distributed/internal/nccl_subgroup.h"
#include "distributed/nccl_process_group.h"

namespace trainer_lora::distributed {
namespace {

absl::Status NoNccl() {
  return absl::UnimplementedError(
      "this is a build for CPU, which has no NCCL: build with --config=cuda, "
      "or with --@trainer_lora//third_party:cuda in another workspace");
}

}  // namespace

absl::Status AddNcclBackend(c10d::ProcessGroup&, at::Device,
                            std::chrono::milliseconds, const NcclOptions&) {
  return NoNccl();
}

namespace internal {

absl::Status AddNcclBackendOf(c10d::ProcessGroup&, const std::vector<uint64_t>&,
                              c10d::ProcessGroup&) {
  return NoNccl();
}

}  // namespace internal

}  // namespace trainer_lora::distributed
