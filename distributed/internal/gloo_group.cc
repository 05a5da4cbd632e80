#include "distributed/internal/gloo_group.h"

#include <exception>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "distributed/internal/run_collective.h"
#include "distributed/internal/sigpipe_guard.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed::internal {

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> ConnectGlooGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    c10::intrusive_ptr<c10d::ProcessGroupGloo::Options> options,
    const std::vector<at::Device>& devices) {
  const SigpipeGuard guard;
  try {
    constexpr auto kGloo = c10d::ProcessGroup::BackendType::GLOO;
    const auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(
        store, rank, size, std::move(options));
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
    group->setDefaultBackend(kGloo);
    for (const at::Device& device : devices) {
      group->setBackend(device.type(), kGloo, backend);
    }
    // Gloo is content with its own connections: without this a rank that
    // leaves early would break the others while they still connect.
    StartCollective(*group, [&] { return group->barrier(); })->wait();
    return group;
  } catch (const std::exception& exception) {
    return StatusFromException(
        exception,
        absl::StrCat("rank ", rank, " could not connect to the other ",
                     size - 1, " ranks"));
  }
}

}  // namespace trainer_lora::distributed::internal
