// What a launcher told this process about its place in the job: torchrun's
// environment variables, read and checked once.
//
//   absl::StatusOr<LaunchEnvironment> launch = ReadLaunchEnvironment();
//   if (!launch.ok()) return launch.status();
//   std::cout << "rank " << launch->rank << " of " << launch->world_size;
#ifndef TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_
#define TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "config/language_version.h"

namespace trainer_lora::config {

// Without a launcher: a single process, rank 0 of 1, and no master.
struct LaunchEnvironment {
  // This process in the job (RANK of WORLD_SIZE) and on its host (LOCAL_RANK of
  // LOCAL_WORLD_SIZE). 0 <= rank < world_size, and the same for the local ones.
  int rank = 0;
  int local_rank = 0;
  int world_size = 1;
  int local_world_size = 1;

  // Where the ranks meet (MASTER_ADDR, MASTER_PORT); empty and 0 without a
  // launcher.
  std::string master_addr;
  uint16_t master_port = 0;

  // torchrun's agent already serves the store at the master's address
  // (TORCHELASTIC_USE_AGENT_STORE=True): every rank connects, none listens.
  bool agent_hosts_store = false;
};

// Returns the value of an environment variable, or nothing if it is unset.
using EnvironmentLookup =
    std::function<std::optional<std::string>(const char* name)>;

// Reads the variables of this process. With none of RANK, WORLD_SIZE,
// LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, the result is
// a single process. kInvalidArgument, naming the variable and its value, if
// only some of them are set or a value is out of range. Safe from any thread as
// long as nothing changes the environment meanwhile.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment();

// The same on variables that `lookup` gives.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment(
    const EnvironmentLookup& lookup);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_
