#include "config/launch_environment.h"

#include <array>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::config {
namespace {

constexpr std::array<const char*, 6> kRequired = {
    "RANK",        "WORLD_SIZE",  "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
};

using Variables = std::map<std::string, std::string>;

absl::Status BadVariable(const std::string& name, const std::string& value,
                         const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("the launcher's environment variable ", name, " must be ",
                   expected, ", got \"", value, "\""));
}

// The value of `name` as an integer from `min` to `max`.
absl::StatusOr<int> ReadInteger(const Variables& variables,
                                const std::string& name, int min, int max,
                                const std::string& expected) {
  const std::string& text = variables.at(name);
  int value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < min || value > max) {
    return BadVariable(name, text, expected);
  }
  return value;
}

// Fills `rank` and `world_size` from the variables of these names.
absl::Status ReadPlace(const Variables& variables, const std::string& rank_name,
                       const std::string& world_size_name, int* rank,
                       int* world_size) {
  LORA_ASSIGN_OR_RETURN(
      *world_size,
      ReadInteger(variables, world_size_name, 1,
                  std::numeric_limits<int>::max(), "a positive integer"));
  LORA_ASSIGN_OR_RETURN(
      *rank,
      ReadInteger(variables, rank_name, 0, *world_size - 1,
                  absl::StrCat("an integer from 0 to ", *world_size - 1, " (",
                               world_size_name, " is ", *world_size, ")")));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment() {
  return ReadLaunchEnvironment(
      [](const char* name) -> std::optional<std::string> {
        const char* value = std::getenv(name);
        if (value == nullptr) return std::nullopt;
        return std::string(value);
      });
}

absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment(
    const EnvironmentLookup& lookup) {
  Variables variables;
  std::vector<std::string> set, missing;
  for (const char* name : kRequired) {
    if (std::optional<std::string> value = lookup(name)) {
      set.push_back(absl::StrCat(name, "=", *value));
      variables[name] = *std::move(value);
    } else {
      missing.push_back(name);
    }
  }
  if (set.empty()) return LaunchEnvironment();
  if (!missing.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the launcher's environment is incomplete: ", absl::StrJoin(set, ", "),
        " but no ", absl::StrJoin(missing, ", "), "; a launcher must set ",
        absl::StrJoin(kRequired, ", "),
        " (torchrun does), and a single process needs none of them"));
  }

  LaunchEnvironment launch;
  LORA_RETURN_IF_ERROR(ReadPlace(variables, "RANK", "WORLD_SIZE", &launch.rank,
                                 &launch.world_size));
  LORA_RETURN_IF_ERROR(ReadPlace(variables, "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                 &launch.local_rank, &launch.local_world_size));
  if (launch.local_world_size > launch.world_size) {
    return BadVariable(
        "LOCAL_WORLD_SIZE", variables["LOCAL_WORLD_SIZE"],
        absl::StrCat("at most WORLD_SIZE, which is ", launch.world_size));
  }
  launch.master_addr = variables["MASTER_ADDR"];
  if (launch.master_addr.empty()) {
    return BadVariable("MASTER_ADDR", launch.master_addr,
                       "the host name or address of rank 0");
  }
  LORA_ASSIGN_OR_RETURN(launch.master_port,
                        ReadInteger(variables, "MASTER_PORT", 1, 65535,
                                    "a port from 1 to 65535"));
  launch.agent_hosts_store = lookup("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return launch;
}

}  // namespace trainer_lora::config
