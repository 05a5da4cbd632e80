#include "distributed/process_group.h"

#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Device.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "config/launch_environment.h"
#include "distributed/internal/gloo_group.h"
#include "distributed/internal/run_collective.h"
#include "distributed/internal/sigpipe_guard.h"
#include "distributed/nccl_process_group.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace trainer_lora::distributed {
namespace {

using Gloo = c10d::ProcessGroupGloo;

constexpr char kLoopback[] = "127.0.0.1";

bool IsLoopback(const std::string& address) {
  return address == "localhost" || address == "::1" ||
         absl::StartsWith(address, "127.");
}

absl::StatusOr<c10::intrusive_ptr<c10d::Store>> JoinStore(
    const config::LaunchEnvironment& environment,
    const ProcessGroupOptions& options) {
  const internal::SigpipeGuard guard;  // The server has a thread.
  c10d::TCPStoreOptions store_options;
  store_options.port = environment.master_port;
  store_options.isServer =
      environment.rank == 0 && !environment.agent_hosts_store;
  // The group waits for its ranks itself.
  store_options.waitWorkers = false;
  store_options.timeout = options.timeout;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_addr,
                                                     store_options);
    if (!environment.agent_hosts_store) {
      return c10::intrusive_ptr<c10d::Store>(std::move(store));
    }
    // The agent's store outlives the attempts, with all that they left in it.
    // Each rank counts its own calls in one: that needs no exchange.
    const std::string attempt =
        absl::StrCat("trainer_lora/attempt_", environment.restart_count);
    const int64_t call =
        store->add(absl::StrCat(attempt, "/calls_of/", environment.rank), 1);
    return c10::intrusive_ptr<c10d::Store>(
        c10::make_intrusive<c10d::PrefixStore>(absl::StrCat(attempt, "/", call),
                                               std::move(store)));
  } catch (const std::exception& exception) {
    // A timeout means here that nobody answered.
    return absl::UnavailableError(absl::StrCat(
        store_options.isServer
            ? "it can't serve the store there; check that the address is this "
              "machine's and that the port is free: "
            : "it can't reach the store there; check that rank 0 is running "
              "and that MASTER_ADDR and MASTER_PORT are right: ",
        internal::ErrorMessage(exception)));
  }
}

absl::StatusOr<c10::intrusive_ptr<Gloo::Options>> MakeGlooOptions(
    const ProcessGroupOptions& options) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const internal::SigpipeGuard guard;  // A device has a thread.
  try {
    if (options.bind_address.empty()) {
      return Gloo::Options::create_default(options.timeout);
    }
    auto gloo_options = Gloo::Options::create(options.timeout);
    gloo_options->devices = {
        Gloo::createDeviceForHostname(options.bind_address)};
    return gloo_options;
  } catch (const std::exception& exception) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Gloo found no address to listen on; check `bind_address` or "
        "GLOO_SOCKET_IFNAME: ",
        internal::ErrorMessage(exception)));
  }
}

absl::Status Annotate(const absl::Status& status, const std::string& context) {
  return absl::Status(status.code(),
                      absl::StrCat(context, ": ", status.message()));
}

// The group for all of the rank's tensors.
absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> CreateGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const ProcessGroupOptions& options) {
  LORA_ASSIGN_OR_RETURN(c10::intrusive_ptr<c10d::ProcessGroup> group,
                        CreateGlooProcessGroup(store, rank, size, options));
  if (!options.device.is_cpu()) {
    LORA_RETURN_IF_ERROR(
        AddNcclBackend(*group, options.device, options.timeout, options.nccl));
  }
  return group;
}

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> JoinThroughStore(
    const config::LaunchEnvironment& environment, ProcessGroupOptions options) {
  LORA_ASSIGN_OR_RETURN(const c10::intrusive_ptr<c10d::Store> store,
                        JoinStore(environment, options));
  if (options.bind_address.empty() && IsLoopback(environment.master_addr)) {
    options.bind_address = kLoopback;
  }
  return CreateGroup(store, environment.rank, environment.world_size, options);
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> InitProcessGroup(
    const config::LaunchEnvironment& environment,
    const ProcessGroupOptions& options) {
  if (environment.world_size == 1) {
    ProcessGroupOptions alone = options;
    alone.bind_address = kLoopback;
    return CreateGroup(c10::make_intrusive<c10d::HashStore>(), /*rank=*/0,
                       /*size=*/1, alone);
  }
  auto group = JoinThroughStore(environment, options);
  if (!group.ok()) {
    return Annotate(
        group.status(),
        absl::StrCat("rank ", environment.rank, " of ", environment.world_size,
                     " could not join the job at ", environment.master_addr,
                     ":", environment.master_port));
  }
  return group;
}

absl::StatusOr<c10::intrusive_ptr<c10d::ProcessGroup>> CreateGlooProcessGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const ProcessGroupOptions& options) {
  if (rank < 0 || rank >= size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a rank must be in [0, ", size, "), the group's size, got ", rank));
  }
  LORA_ASSIGN_OR_RETURN(c10::intrusive_ptr<Gloo::Options> gloo_options,
                        MakeGlooOptions(options));
  store->setTimeout(options.timeout);
  return internal::ConnectGlooGroup(store, rank, size, std::move(gloo_options),
                                    {at::Device(at::kCPU)});
}

}  // namespace trainer_lora::distributed
