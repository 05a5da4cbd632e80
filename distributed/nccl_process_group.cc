#include "distributed/nccl_process_group.h"

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/internal/nccl_subgroup.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed {
namespace {

using Nccl = c10d::ProcessGroupNCCL;

class NcclBackend final : public Nccl {
 public:
  NcclBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
              c10::intrusive_ptr<Options> options, bool end_process_on_error)
      : Nccl(std::move(store), rank, size, std::move(options)),
        end_process_on_error_(end_process_on_error) {
    // The watchdog thread reads this after a collective was queued.
    if (!end_process_on_error &&
        std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING") == nullptr) {
      asyncErrorHandling_ = c10d::CleanUpOnly;
    }
  }

  // As the base class, which also warns: it takes this for the end of a Python
  // program that forgot to destroy the group.
  ~NcclBackend() override {
    if (!terminateProcessGroup_.load()) abort();
  }

  bool end_process_on_error() const { return end_process_on_error_; }

 private:
  bool end_process_on_error_;
};

// Collective where the group has a backend for the CPU: NCCL would wait without
// end for a rank that `status` keeps from connecting.
absl::Status AgreeToConnect(c10d::ProcessGroup& group,
                            const absl::Status& status) {
  for (const at::Device& device : group.getDeviceTypes()) {
    if (!device.is_cpu()) continue;
    return internal::AgreeOnStatus(
        group, absl::StrCat("a process group of ", group.getSize()),
        "connecting NCCL", status);
  }
  return status;
}

// Collective; `status` is what this rank has found so far.
absl::Status Connect(c10d::ProcessGroup& group,
                     const std::optional<at::Device>& device,
                     const c10::intrusive_ptr<Nccl::Options>& options,
                     bool end_process_on_error, absl::Status status) {
  const std::string what = absl::StrCat(
      "rank ", group.getRank(), " of ", group.getSize(), ": connecting NCCL",
      device.has_value() ? " on " + device->str() : "");
  // Else an eager connection is made in the background, and fails there.
  options->config.blocking = 1;
  c10::intrusive_ptr<NcclBackend> backend;
  if (status.ok()) {
    status = internal::CallCollective(what, [&] {
      backend = c10::make_intrusive<NcclBackend>(
          c10::make_intrusive<c10d::PrefixStore>("trainer_lora/nccl",
                                                 group.getStore()),
          group.getRank(), group.getSize(), options, end_process_on_error);
      backend->setBoundDeviceId(device);
      // Whether the device works.
      if (device.has_value()) at::zeros({1}, at::TensorOptions(*device)).cpu();
    });
  }
  LORA_RETURN_IF_ERROR(AgreeToConnect(group, status));
  return internal::CallCollective(what, [&] {
    if (device.has_value()) backend->eagerConnectSingleDevice(*device);
    // The group gets what works alone. It passes the device on.
    constexpr auto kNccl = c10d::ProcessGroup::BackendType::NCCL;
    group.setBoundDeviceId(device);
    group.setDefaultBackend(kNccl);
    group.setBackend(at::kCUDA, kNccl,
                     c10::intrusive_ptr<c10d::Backend>(backend));
  });
}

absl::Status CheckDevice(const c10d::ProcessGroup& group,
                         const at::Device& device) {
  if (!device.is_cuda() || !device.has_index()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "NCCL needs a CUDA device with an index, such as cuda:0, got ",
        device.str()));
  }
  for (const at::Device& taken : group.getDeviceTypes()) {
    if (taken.is_cuda()) {
      return absl::FailedPreconditionError(
          "the process group has a backend for CUDA already");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AddNcclBackend(c10d::ProcessGroup& group, at::Device device,
                            std::chrono::milliseconds timeout,
                            const NcclOptions& options) {
  const auto nccl_options = Nccl::Options::create(options.high_priority_stream);
  nccl_options->timeout = timeout;
  return Connect(group, device, nccl_options, options.end_process_on_error,
                 CheckDevice(group, device));
}

namespace internal {

absl::Status AddNcclBackendOf(c10d::ProcessGroup& parent,
                              const std::vector<uint64_t>& global_ranks,
                              c10d::ProcessGroup& group) {
  const auto backend =
      c10::dynamic_intrusive_pointer_cast<Nccl>(parent.getBackend(at::kCUDA));
  if (backend == nullptr) {
    return absl::UnimplementedError(
        "the process group's backend for CUDA is not c10d's NCCL");
  }
  const auto* ours = dynamic_cast<const NcclBackend*>(backend.get());
  const auto options =
      c10::make_intrusive<Nccl::Options>(*backend->getOptions());
  options->split_from = nullptr;
  options->global_ranks_in_group = global_ranks;
  return Connect(group, backend->getBoundDeviceId(), options,
                 ours == nullptr || ours->end_process_on_error(),
                 absl::OkStatus());
}

}  // namespace internal

}  // namespace trainer_lora::distributed
