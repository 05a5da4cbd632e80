#include "distributed/internal/subgroup.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/internal/gloo_group.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace trainer_lora::distributed::internal {
namespace {

using Gloo = c10d::ProcessGroupGloo;

// The one Gloo backend behind all devices of `group`.
absl::StatusOr<c10::intrusive_ptr<Gloo>> GlooBackend(
    c10d::ProcessGroup& group) {
  c10::intrusive_ptr<Gloo> gloo;
  try {
    for (const at::Device& device : group.getDeviceTypes()) {
      const c10::intrusive_ptr<c10d::Backend> backend =
          group.getBackend(device.type());
      gloo = c10::dynamic_intrusive_pointer_cast<Gloo>(backend);
      if (gloo == nullptr) {
        return absl::UnimplementedError(absl::StrCat(
            "a part of a process group can be made with the backend gloo ",
            "alone, and this one uses ", backend->getBackendName(), " for ",
            device.str()));
      }
    }
  } catch (const std::exception& exception) {
    return absl::FailedPreconditionError(
        absl::StrCat("the process group has no backend any more: ",
                     ErrorMessage(exception)));
  }
  if (gloo == nullptr) {
    return absl::FailedPreconditionError("the process group has no backend");
  }
  return gloo;
}

// Where the ranks of a new group meet: in a part of the parent's store that is
// theirs alone.
absl::StatusOr<c10::intrusive_ptr<c10d::Store>> NewMeetingPlace(
    const c10d::ProcessGroup& parent, int64_t first_rank) {
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
        absl::StrCat("trainer_lora/subgroup/", call, "/", first_rank), store);
  } catch (const std::exception& exception) {
    return StatusFromException(exception, "the store does not answer");
  }
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> CreateSubgroup(
    c10d::ProcessGroup& parent, const std::vector<int64_t>& ranks) {
  LORA_ASSIGN_OR_RETURN(const c10::intrusive_ptr<c10d::Store> store,
                        NewMeetingPlace(parent, ranks.front()));
  LORA_ASSIGN_OR_RETURN(const c10::intrusive_ptr<Gloo> gloo,
                        GlooBackend(parent));
  auto options = c10::make_intrusive<Gloo::Options>(*gloo->getOptions());
  // c10d names the ranks of the job in its logs. A parent without such a list,
  // or with that of a group which was split from it, counts as the job.
  const std::vector<uint64_t> of_parent =
      std::move(options->global_ranks_in_group);
  options->global_ranks_in_group.clear();
  for (const int64_t rank : ranks) {
    options->global_ranks_in_group.push_back(
        of_parent.size() == parent.getSize() ? of_parent[rank] : rank);
  }

  const int64_t rank =
      std::find(ranks.begin(), ranks.end(), parent.getRank()) - ranks.begin();
  return ConnectGlooGroup(store, static_cast<int>(rank),
                          static_cast<int>(ranks.size()), std::move(options),
                          parent.getDeviceTypes());
}

}  // namespace trainer_lora::distributed::internal
