#include "config/launch_environment.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::config {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testutil::StatusIs;

using Variables = std::map<std::string, std::string>;

// What torchrun sets on the second host of two with two ranks each.
Variables Torchrun() {
  return {{"RANK", "3"},
          {"LOCAL_RANK", "1"},
          {"WORLD_SIZE", "4"},
          {"LOCAL_WORLD_SIZE", "2"},
          {"MASTER_ADDR", "node0.cluster"},
          {"MASTER_PORT", "29500"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"},
          {"GROUP_RANK", "1"}};
}

absl::StatusOr<LaunchEnvironment> Read(const Variables& variables) {
  return ReadLaunchEnvironment(
      [&](const char* name) -> std::optional<std::string> {
        const auto found = variables.find(name);
        if (found == variables.end()) return std::nullopt;
        return found->second;
      });
}

TEST(LaunchEnvironmentTest, WithoutLauncherIsOneProcess) {
  LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch, Read({}));
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_EQ(launch.local_world_size, 1);
  EXPECT_EQ(launch.master_addr, "");
  EXPECT_EQ(launch.master_port, 0);
  EXPECT_FALSE(launch.agent_hosts_store);
}

TEST(LaunchEnvironmentTest, ReadsTorchrunsVariables) {
  LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch, Read(Torchrun()));
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_world_size, 2);
  EXPECT_EQ(launch.master_addr, "node0.cluster");
  EXPECT_EQ(launch.master_port, 29500);
  EXPECT_TRUE(launch.agent_hosts_store);
}

TEST(LaunchEnvironmentTest, OnlyTrueMeansThatTheAgentHostsTheStore) {
  for (const char* value : {"False", "", "0"}) {
    SCOPED_TRACE(value);
    Variables variables = Torchrun();
    variables["TORCHELASTIC_USE_AGENT_STORE"] = value;
    LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch, Read(variables));
    EXPECT_FALSE(launch.agent_hosts_store);
  }
  Variables variables = Torchrun();
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch, Read(variables));
  EXPECT_FALSE(launch.agent_hosts_store);
}

TEST(LaunchEnvironmentTest, ReadsTheLargestPort) {
  Variables variables = Torchrun();
  variables["MASTER_PORT"] = "65535";
  LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch, Read(variables));
  EXPECT_EQ(launch.master_port, 65535);
}

TEST(LaunchEnvironmentTest, RefusesEachMissingVariableByName) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK",
                           "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    SCOPED_TRACE(name);
    Variables variables = Torchrun();
    variables.erase(name);
    EXPECT_THAT(Read(variables),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(std::string("but no ") + name + ";"),
                               HasSubstr("a launcher must set RANK, "))));
  }
}

TEST(LaunchEnvironmentTest, NamesWhatIsSetWhenTheRestIsMissing) {
  EXPECT_THAT(
      Read({{"RANK", "1"}}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("incomplete: RANK=1 but no WORLD_SIZE, LOCAL_RANK, "
                         "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT;")));
}

TEST(LaunchEnvironmentTest, RefusesNonsenseWithVariableAndValue) {
  struct Case {
    const char* name;
    const char* value;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"RANK", "4", "from 0 to 3 (WORLD_SIZE is 4), got \"4\""},
      {"RANK", "-1", "got \"-1\""},
      {"RANK", "", "got \"\""},
      {"RANK", "one", "got \"one\""},
      {"RANK", "1.0", "got \"1.0\""},
      {"LOCAL_RANK", "2", "from 0 to 1 (LOCAL_WORLD_SIZE is 2), got \"2\""},
      {"LOCAL_RANK", "-1", "got \"-1\""},
      {"WORLD_SIZE", "0", "a positive integer, got \"0\""},
      {"WORLD_SIZE", "-4", "a positive integer, got \"-4\""},
      {"WORLD_SIZE", "99999999999", "a positive integer, got \"99999999999\""},
      {"LOCAL_WORLD_SIZE", "0", "a positive integer, got \"0\""},
      {"LOCAL_WORLD_SIZE", "5", "at most WORLD_SIZE, which is 4, got \"5\""},
      {"MASTER_ADDR", "", "the host name or address of rank 0, got \"\""},
      {"MASTER_PORT", "0", "a port from 1 to 65535, got \"0\""},
      {"MASTER_PORT", "65536", "a port from 1 to 65535, got \"65536\""},
      {"MASTER_PORT", "-1", "a port from 1 to 65535, got \"-1\""},
      {"MASTER_PORT", "http", "a port from 1 to 65535, got \"http\""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.name) + "=" + c.value);
    Variables variables = Torchrun();
    variables[c.name] = c.value;
    EXPECT_THAT(
        Read(variables),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr(std::string("variable ") + c.name + " must"),
                       HasSubstr(c.message))));
  }
}

}  // namespace
}  // namespace trainer_lora::config
