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
using testutil::IsOk;
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
          {"TORCHELASTIC_RESTART_COUNT", "2"},
          {"GROUP_RANK", "1"}};
}

// What mpirun sets on the one host of three ranks.
Variables OpenMpi() {
  return {{"OMPI_COMM_WORLD_RANK", "2"},
          {"OMPI_COMM_WORLD_SIZE", "3"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
          {"PMIX_NAMESPACE", "prterun-host-4242@1"}};
}

// What srun sets for the last of 4 + 4 + 3 tasks.
Variables Slurm() {
  return {{"SLURM_JOB_ID", "123456"},
          {"SLURM_STEP_ID", "0"},
          {"SLURM_PROCID", "10"},
          {"SLURM_STEP_NUM_TASKS", "11"},
          {"SLURM_LOCALID", "2"},
          {"SLURM_NODEID", "2"},
          {"SLURM_STEP_TASKS_PER_NODE", "4(x2),3"},
          {"SLURM_STEP_NODELIST", "node[003-010,012],gpu1"}};
}

Variables With(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

Variables Without(Variables variables, const std::vector<const char*>& names) {
  for (const char* name : names) variables.erase(name);
  return variables;
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
  EXPECT_EQ(launch.launcher, Launcher::kNone);
  EXPECT_EQ(launch.rank, 0);
  EXPECT_EQ(launch.local_rank, 0);
  EXPECT_EQ(launch.world_size, 1);
  EXPECT_EQ(launch.local_world_size, 1);
  EXPECT_EQ(launch.master_addr, "");
  EXPECT_EQ(launch.master_port, 0);
  EXPECT_FALSE(launch.agent_hosts_store);
  EXPECT_EQ(launch.restart_count, 0);
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
  EXPECT_EQ(launch.restart_count, 2);
}

TEST(LaunchEnvironmentTest, OnlyTorchrunCountsItsRestarts) {
  LORA_ASSERT_OK_AND_ASSIGN(
      LaunchEnvironment launch,
      Read(Without(Torchrun(), {"TORCHELASTIC_RESTART_COUNT"})));
  EXPECT_EQ(launch.restart_count, 0);
  LORA_ASSERT_OK_AND_ASSIGN(
      launch, Read(With(OpenMpi(), {{"TORCHELASTIC_RESTART_COUNT", "2"}})));
  EXPECT_EQ(launch.restart_count, 0);
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
      {"TORCHELASTIC_RESTART_COUNT", "-1", "an integer from 0 on, got \"-1\""},
      {"TORCHELASTIC_RESTART_COUNT", "", "an integer from 0 on, got \"\""},
      {"TORCHELASTIC_RESTART_COUNT", "99999999999", "got \"99999999999\""},
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

// --- Launchers ---------------------------------------------------------------

// Unlike files, variables may have any bytes.
TEST(LaunchEnvironmentTest, AMessageIsOneLineOfUtf8WhateverTheValuesAre) {
  EXPECT_THAT(Read(With(Torchrun(), {{"RANK", "\xff\n1"}})),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(R"(got "\xff\x0a1")")));
  EXPECT_THAT(Read({{"RANK", "\xc3\x1b[0m"}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr(R"(RANK=\xc3\x1b[0m but no)")));
}

TEST(LaunchEnvironmentTest, FindsTheLauncherAndTheProcessesPlace) {
  struct Case {
    const char* name;
    Variables variables;
    Launcher launcher;
    int rank, world_size, local_rank, local_world_size;
  };
  const Variables batch_script = {
      {"SLURM_JOB_ID", "7"}, {"SLURM_PROCID", "0"},
      {"SLURM_NTASKS", "8"}, {"SLURM_TASKS_PER_NODE", "4(x2)"},
      {"SLURM_NODEID", "0"}, {"SLURM_LOCALID", "0"}};
  const std::vector<Case> cases = {
      {"nothing", {}, Launcher::kNone, 0, 1, 0, 1},
      {"torchrun", Torchrun(), Launcher::kTorchrun, 3, 4, 1, 2},
      {"mpirun", OpenMpi(), Launcher::kOpenMpi, 2, 3, 2, 3},
      {"srun", Slurm(), Launcher::kSlurm, 10, 11, 2, 3},
      {"torchrun below srun", With(Slurm(), Torchrun()), Launcher::kTorchrun, 3,
       4, 1, 2},
      {"torchrun below mpirun", With(OpenMpi(), Torchrun()),
       Launcher::kTorchrun, 3, 4, 1, 2},
      {"mpirun in a Slurm job", With(Slurm(), OpenMpi()), Launcher::kOpenMpi, 2,
       3, 2, 3},
      {"mpirun with a master",
       With(OpenMpi(), {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}),
       Launcher::kOpenMpi, 2, 3, 2, 3},
      {"srun with a master",
       With(Slurm(), {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}),
       Launcher::kSlurm, 10, 11, 2, 3},
      {"an sbatch script's own shell", batch_script, Launcher::kNone, 0, 1, 0,
       1},
      {"its batch step", With(batch_script, {{"SLURM_STEP_ID", "4294967291"}}),
       Launcher::kNone, 0, 1, 0, 1},
      {"salloc's interactive step",
       With(batch_script, {{"SLURM_STEP_ID", "4294967290"}}), Launcher::kNone,
       0, 1, 0, 1},
      {"an srun that says only what older ones do",
       With(batch_script, {{"SLURM_STEP_ID", "3"},
                           {"SLURM_PROCID", "5"},
                           {"SLURM_NODEID", "1"},
                           {"SLURM_LOCALID", "1"},
                           {"SLURM_JOB_NODELIST", "a,b"}}),
       Launcher::kSlurm, 5, 8, 1, 4},
      {"a step that is smaller than its job",
       With(Slurm(), {{"SLURM_NTASKS", "99"}, {"SLURM_TASKS_PER_NODE", "99"}}),
       Launcher::kSlurm, 10, 11, 2, 3},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch,
                              Read(c.variables));
    EXPECT_EQ(LauncherName(launch.launcher), LauncherName(c.launcher));
    EXPECT_EQ(launch.rank, c.rank);
    EXPECT_EQ(launch.world_size, c.world_size);
    EXPECT_EQ(launch.local_rank, c.local_rank);
    EXPECT_EQ(launch.local_world_size, c.local_world_size);
    EXPECT_EQ(launch.agent_hosts_store, c.launcher == Launcher::kTorchrun);
  }
}

TEST(LaunchEnvironmentTest, LaunchersHaveNames) {
  EXPECT_STREQ(LauncherName(Launcher::kNone), "no launcher");
  EXPECT_STREQ(LauncherName(Launcher::kTorchrun), "torchrun");
  EXPECT_STREQ(LauncherName(Launcher::kOpenMpi), "Open MPI");
  EXPECT_STREQ(LauncherName(Launcher::kSlurm), "Slurm");
}

TEST(LaunchEnvironmentTest, TasksOnANodeComeFromSlurmsNotation) {
  struct Case {
    const char* text;
    const char* node;
    int tasks;  // 0: an error.
  };
  const std::vector<Case> cases = {
      {"4", "0", 4},         {"4(x2),3", "0", 4}, {"4(x2),3", "1", 4},
      {"4(x2),3", "2", 3},   {"1,2,3", "1", 2},   {"3(x2000000000)", "9", 3},
      {"4(x2),3", "3", 0},   {"", "0", 0},        {"0", "0", 0},
      {"-4", "0", 0},        {"4(x2", "0", 0},    {"4(x)", "0", 0},
      {"4(x0),3", "0", 0},   {"4(y2)", "0", 0},   {"4,,3", "1", 0},
      {"4(x2)(x2)", "0", 0}, {"many", "0", 0},    {"4", "-1", 0},
      {"4", "", 0},          {"4", "x", 0},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(std::string(c.text) + " on node " + c.node);
    const auto launch =
        Read(With(Slurm(), {{"SLURM_STEP_TASKS_PER_NODE", c.text},
                            {"SLURM_NODEID", c.node},
                            {"SLURM_LOCALID", "0"}}));
    if (c.tasks > 0) {
      ASSERT_THAT(launch, IsOk());
      EXPECT_EQ(launch->local_world_size, c.tasks);
    } else {
      EXPECT_THAT(launch, StatusIs(absl::StatusCode::kInvalidArgument,
                                   HasSubstr("variable SLURM_")));
    }
  }
}

TEST(LaunchEnvironmentTest, RanksMeetOnTheFirstHostOfSlurmsList) {
  struct Case {
    const char* list;
    const char* host;  // "": an error.
  };
  const std::vector<Case> cases = {
      {"node[003-010,012],gpu1", "node003"},
      {"gpu1,node[003-010]", "gpu1"},
      {"gpu1", "gpu1"},
      {"gpu[7]", "gpu7"},
      {"gpu[7,9-11]", "gpu7"},
      {"rack[1-2]-node[03-04].cluster", "rack1-node03.cluster"},
      {"node.with-dash,b", "node.with-dash"},
      {"", ""},
      {",a", ""},
      {"node[", ""},
      {"node[3", ""},
      {"node[]", ""},
      {"node[-4]", ""},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.list);
    const auto launch = Read(With(Slurm(), {{"SLURM_STEP_NODELIST", c.list}}));
    if (*c.host != '\0') {
      ASSERT_THAT(launch, IsOk());
      EXPECT_EQ(launch->master_addr, c.host);
    } else {
      EXPECT_THAT(launch, StatusIs(absl::StatusCode::kInvalidArgument,
                                   HasSubstr("SLURM_STEP_NODELIST must be a "
                                             "list of hosts")));
    }
  }
}

TEST(LaunchEnvironmentTest, FindsWhereTheRanksMeet) {
  struct Case {
    const char* name;
    Variables variables;
    const char* address;
    int port;
  };
  // The ports are FNV-1a of "123456.0", "123456.1", "prterun-host-4242@1" and
  // "77", modulo 20000, and 10000.
  const std::vector<Case> cases = {
      {"Slurm", Slurm(), "node003", 16612},
      {"another step", With(Slurm(), {{"SLURM_STEP_ID", "1"}}), "node003",
       14231},
      {"the job's nodes",
       With(Without(Slurm(), {"SLURM_STEP_NODELIST"}),
            {{"SLURM_JOB_NODELIST", "a[1-2]"}}),
       "a1", 16612},
      {"Slurm with an address", With(Slurm(), {{"MASTER_ADDR", "10.0.0.1"}}),
       "10.0.0.1", 16612},
      {"Slurm with a port", With(Slurm(), {{"MASTER_PORT", "29500"}}),
       "node003", 29500},
      {"Slurm with both needs nothing else",
       With(Without(Slurm(), {"SLURM_STEP_NODELIST", "SLURM_JOB_ID"}),
            {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}}),
       "h", 5},
      {"Open MPI", OpenMpi(), "127.0.0.1", 12118},
      {"Open MPI 4",
       With(Without(OpenMpi(), {"PMIX_NAMESPACE"}),
            {{"OMPI_MCA_ess_base_jobid", "77"}}),
       "127.0.0.1", 24963},
      {"Open MPI with both",
       With(Without(OpenMpi(), {"PMIX_NAMESPACE"}),
            {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "5"}}),
       "h", 5},
      {"Open MPI on two hosts",
       With(OpenMpi(), {{"OMPI_COMM_WORLD_SIZE", "6"}, {"MASTER_ADDR", "h"}}),
       "h", 12118},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    LORA_ASSERT_OK_AND_ASSIGN(const LaunchEnvironment launch,
                              Read(c.variables));
    EXPECT_EQ(launch.master_addr, c.address);
    EXPECT_EQ(launch.master_port, c.port);
  }
}

TEST(LaunchEnvironmentTest, RefusesHalfALaunchersEnvironment) {
  struct Case {
    const char* name;
    Variables variables;
    const char* message;
  };
  const std::vector<Case> cases = {
      {"a master alone",
       {{"MASTER_ADDR", "h"}},
       "incomplete: MASTER_ADDR=h but no RANK, WORLD_SIZE, LOCAL_RANK, "
       "LOCAL_WORLD_SIZE, MASTER_PORT; a launcher must set RANK, WORLD_SIZE, "
       "LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun "
       "does), and a single process needs none of them"},
      {"half of torchrun's below srun", With(Slurm(), {{"WORLD_SIZE", "11"}}),
       "incomplete: WORLD_SIZE=11 but no RANK, LOCAL_RANK, "},
      {"half of Open MPI's", Without(OpenMpi(), {"OMPI_COMM_WORLD_LOCAL_RANK"}),
       "incomplete: OMPI_COMM_WORLD_RANK=2, OMPI_COMM_WORLD_SIZE=3, "
       "OMPI_COMM_WORLD_LOCAL_SIZE=3 but no OMPI_COMM_WORLD_LOCAL_RANK; a "
       "launcher must set OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, "
       "OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE (Open MPI's "
       "mpirun does)"},
      {"half of Slurm's",
       Without(Slurm(), {"SLURM_NODEID", "SLURM_STEP_NUM_TASKS"}),
       "incomplete: SLURM_PROCID=10, SLURM_LOCALID=2, "
       "SLURM_STEP_TASKS_PER_NODE=4(x2),3 but no SLURM_STEP_NUM_TASKS or "
       "SLURM_NTASKS, SLURM_NODEID; a launcher must set SLURM_PROCID, "},
      {"a step and nothing else",
       {{"SLURM_STEP_ID", "0"}},
       "incomplete: SLURM_STEP_ID=0 but no SLURM_PROCID, "},
      {"Slurm without hosts", Without(Slurm(), {"SLURM_STEP_NODELIST"}),
       "there is no SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; set "
       "MASTER_ADDR"},
      {"Slurm without a job", Without(Slurm(), {"SLURM_JOB_ID"}),
       "has no SLURM_JOB_ID to choose a port by: set MASTER_PORT"},
      {"Open MPI on two hosts",
       With(OpenMpi(), {{"OMPI_COMM_WORLD_SIZE", "6"}}),
       "the 6 ranks are on several hosts: name its host, with mpirun -x "
       "MASTER_ADDR="},
      {"Open MPI without a job", Without(OpenMpi(), {"PMIX_NAMESPACE"}),
       "with mpirun -x MASTER_PORT=29500"},
      {"Slurm's rank out of range", With(Slurm(), {{"SLURM_PROCID", "11"}}),
       "variable SLURM_PROCID must be an integer from 0 to 10 "
       "(SLURM_STEP_NUM_TASKS is 11), got \"11\""},
      {"Slurm's local rank out of range",
       With(Slurm(), {{"SLURM_LOCALID", "3"}}),
       "variable SLURM_LOCALID must be an integer from 0 to 2 "
       "(SLURM_STEP_TASKS_PER_NODE is 4(x2),3), got \"3\""},
      {"more local tasks than tasks",
       With(Slurm(), {{"SLURM_STEP_TASKS_PER_NODE", "4(x2),12"}}),
       "variable SLURM_STEP_TASKS_PER_NODE must be at most "
       "SLURM_STEP_NUM_TASKS, which is 11, got \"4(x2),12\""},
      {"Open MPI's nonsense",
       With(OpenMpi(), {{"OMPI_COMM_WORLD_SIZE", "three"}}),
       "variable OMPI_COMM_WORLD_SIZE must be a positive integer"},
      {"no port", With(OpenMpi(), {{"MASTER_PORT", "tcp://10.0.0.1:80"}}),
       "variable MASTER_PORT must be a port from 1 to 65535"},
      {"an empty address", With(Slurm(), {{"MASTER_ADDR", ""}}),
       "variable MASTER_ADDR must be the host name or address of rank 0"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_THAT(Read(c.variables), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr(c.message)));
  }
}

}  // namespace
}  // namespace trainer_lora::config
