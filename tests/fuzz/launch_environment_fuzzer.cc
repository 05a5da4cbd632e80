// The environment of a launcher. The input has a line NAME=VALUE for each
// variable; of two of one name the first counts.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/launch_environment.h"
#include "tests/fuzz/fuzz_check.h"

namespace trainer_lora::config {
namespace {

using ::trainer_lora::fuzz::IsLine;
using Variables = std::map<std::string, std::string>;

// A process's environment whose look-ups are noted.
class Environment {
 public:
  explicit Environment(Variables variables)
      : variables_(std::move(variables)) {}

  absl::StatusOr<LaunchEnvironment> Read() {
    return ReadLaunchEnvironment([this](const char* name) {
      asked_.insert(name);
      return Find(name);
    });
  }

  std::optional<std::string> Find(const std::string& name) const {
    const auto found = variables_.find(name);
    if (found == variables_.end()) return std::nullopt;
    return found->second;
  }

  const std::set<std::string>& asked() const { return asked_; }

 private:
  const Variables variables_;
  std::set<std::string> asked_;
};

void CheckError(const absl::Status& status,
                const std::set<std::string>& variables) {
  FUZZ_CHECK(status.code() == absl::StatusCode::kInvalidArgument) << status;
  FUZZ_CHECK(IsLine(status.message())) << status;
  FUZZ_CHECK(std::any_of(variables.begin(), variables.end(),
                         [&](const std::string& name) {
                           return absl::StrContains(status.message(), name);
                         }))
      << "no variable is named in: " << status;
}

void CheckPlace(const LaunchEnvironment& launch) {
  FUZZ_CHECK(0 <= launch.rank && launch.rank < launch.world_size);
  FUZZ_CHECK(0 <= launch.local_rank &&
             launch.local_rank < launch.local_world_size);
  FUZZ_CHECK(launch.local_world_size <= launch.world_size);
}

void CheckMaster(const LaunchEnvironment& launch,
                 const Environment& environment) {
  FUZZ_CHECK(launch.launcher != Launcher::kNone);
  FUZZ_CHECK(!launch.master_addr.empty());
  FUZZ_CHECK(launch.master_port != 0);
  if (const auto address = environment.Find("MASTER_ADDR")) {
    FUZZ_CHECK(launch.master_addr == *address);
  }
  if (!environment.Find("MASTER_PORT")) {
    FUZZ_CHECK(launch.master_port >= 10000 && launch.master_port < 30000);
  }
  FUZZ_CHECK(!launch.agent_hosts_store ||
             launch.launcher == Launcher::kTorchrun);
  FUZZ_CHECK(launch.restart_count >= 0);
}

void TestEnvironment(Environment environment) {
  const absl::StatusOr<LaunchEnvironment> launch = environment.Read();
  if (!launch.ok()) return CheckError(launch.status(), environment.asked());
  CheckPlace(*launch);
  if (launch->launcher == Launcher::kNone) {
    FUZZ_CHECK(launch->world_size == 1);
    FUZZ_CHECK(launch->master_addr.empty() && launch->master_port == 0);
  } else {
    CheckMaster(*launch, environment);
  }
}

}  // namespace
}  // namespace trainer_lora::config

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  trainer_lora::config::Variables variables;
  for (const absl::string_view line : absl::StrSplit(input, '\n')) {
    variables.insert(absl::StrSplit(line, absl::MaxSplits('=', 1)));
  }
  trainer_lora::config::TestEnvironment(
      trainer_lora::config::Environment(std::move(variables)));
  return 0;
}
