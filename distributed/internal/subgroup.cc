#include "distributed/internal/subgroup.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/internal/gloo_group.h"
#include "distributed/internal/nccl_subgroup.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed::internal {
namespace {

using Gloo = c10d::ProcessGroupGloo;

// What carries the collectives of a group.
struct Backends {
  c10::intrusive_ptr<Gloo> gloo;  // Null for a group of NCCL alone.
  std::vector<at::Device> gloo_devices;
  bool has_nccl = false;                  // For CUDA.
  c10::intrusive_ptr<c10d::Backend> any;  // One of them.
};

absl::StatusOr<Backends> BackendsOf(c10d::ProcessGroup& group) {
  Backends backends;
  try {
    for (const at::Device& device : group.getDeviceTypes()) {
      const c10::intrusive_ptr<c10d::Backend> backend =
          group.getBackend(device.type());
      backends.any = backend;
      auto gloo = c10::dynamic_intrusive_pointer_cast<Gloo>(backend);
      if (gloo != nullptr) {
        backends.gloo = std::move(gloo);
        backends.gloo_devices.push_back(device);
      } else if (device.is_cuda() && backend->getBackendName() == "nccl") {
        backends.has_nccl = true;
      } else {
        return absl::UnimplementedError(absl::StrCat(
            "a part of a process group can be made with the backends gloo and ",
            "nccl alone, and this one uses ", backend->getBackendName(),
            " for ", device.str()));
      }
    }
  } catch (const std::exception& exception) {
    return absl::FailedPreconditionError(
        absl::StrCat("the process group has no backend any more: ",
                     ErrorMessage(exception)));
  }
  if (backends.any == nullptr) {
    return absl::FailedPreconditionError("the process group has no backend");
  }
  return backends;
}

// A part of the parent's store that no call before has had on any rank.
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> NewMeetingPlace(
    const c10d::ProcessGroup& parent) {
  const c10::intrusive_ptr<c10d::Store> store = parent.getStore();
  if (store == nullptr) {
    return absl::FailedPreconditionError(
        "the process group has no store in which parts of it could meet");
  }
  try {
    // Each rank counts its own calls: that needs no exchange.
    const int64_t call = store->add(
        absl::StrCat("trainer_lora/subgroup/calls_of/", parent.getRank()), 1);
    return c10::make_intrusive<c10d::PrefixStore>(
        absl::StrCat("trainer_lora/subgroup/", call), store);
  } catch (const std::exception& exception) {
    return StatusFromException(exception, "the store does not answer");
  }
}

// The ranks of the job that the `ranks` of `parent` are. A parent without such
// a list, or with that of a group which was split from it, counts as the job.
std::vector<uint64_t> GlobalRanks(const std::vector<uint64_t>& of_parent,
                                  int64_t parent_size,
                                  const std::vector<int64_t>& ranks) {
  std::vector<uint64_t> global_ranks;
  for (const int64_t rank : ranks) {
    global_ranks.push_back(of_parent.size() == parent_size ? of_parent[rank]
                                                           : rank);
  }
  return global_ranks;
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> SubgroupMaker::Create(
    const std::string& kind, const std::vector<int64_t>& ranks) {
  if (place_ == nullptr) {
    LORA_ASSIGN_OR_RETURN(place_, NewMeetingPlace(parent_));
  }
  const auto store = c10::make_intrusive<c10d::PrefixStore>(
      absl::StrCat(kind, "/", ranks.front()), place_);
  LORA_ASSIGN_OR_RETURN(const Backends backends, BackendsOf(parent_));
  const int rank = static_cast<int>(
      std::find(ranks.begin(), ranks.end(), parent_.getRank()) - ranks.begin());
  const int size = static_cast<int>(ranks.size());
  // c10d names the ranks of the job in its logs.
  const std::vector<uint64_t> global_ranks =
      GlobalRanks(backends.any->getBackendOptions()->global_ranks_in_group,
                  parent_.getSize(), ranks);

  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  if (backends.gloo != nullptr) {
    auto options =
        c10::make_intrusive<Gloo::Options>(*backends.gloo->getOptions());
    options->global_ranks_in_group = global_ranks;
    LORA_ASSIGN_OR_RETURN(
        group, ConnectGlooGroup(store, rank, size, std::move(options),
                                backends.gloo_devices));
  }
  if (backends.has_nccl) {
    LORA_RETURN_IF_ERROR(AddNcclBackendOf(parent_, global_ranks, *group));
  }
  return group;
}

}  // namespace trainer_lora::distributed::internal
