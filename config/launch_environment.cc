#include "config/launch_environment.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/internal/fnv1a.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"

namespace trainer_lora::config {
namespace {

struct Variable {
  std::string name;
  std::string value;
};

// Names of which the first that is set counts.
using Names = std::vector<const char*>;

// What a launcher calls the place of a process.
struct LauncherVariables {
  Launcher launcher;
  const char* program;
  Names rank;
  Names world_size;
  Names local_rank;
  Names local_world_size;
  std::vector<Names> others;  // That must be set too.

  std::vector<Names> All() const {
    std::vector<Names> all = {rank, world_size, local_rank, local_world_size};
    all.insert(all.end(), others.begin(), others.end());
    return all;
  }
};

const LauncherVariables& Torchrun() {
  static const auto& variables =
      *new LauncherVariables{Launcher::kTorchrun,
                             "torchrun",
                             {"RANK"},
                             {"WORLD_SIZE"},
                             {"LOCAL_RANK"},
                             {"LOCAL_WORLD_SIZE"},
                             {{"MASTER_ADDR"}, {"MASTER_PORT"}}};
  return variables;
}

const LauncherVariables& OpenMpi() {
  static const auto& variables =
      *new LauncherVariables{Launcher::kOpenMpi,
                             "Open MPI's mpirun",
                             {"OMPI_COMM_WORLD_RANK"},
                             {"OMPI_COMM_WORLD_SIZE"},
                             {"OMPI_COMM_WORLD_LOCAL_RANK"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE"},
                             {}};
  return variables;
}

const LauncherVariables& Slurm() {
  static const auto& variables = *new LauncherVariables{
      Launcher::kSlurm,  "Slurm's srun",
      {"SLURM_PROCID"},  {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
      {"SLURM_LOCALID"}, {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"},
      {{"SLURM_NODEID"}}};
  return variables;
}

absl::Status BadVariable(const Variable& variable,
                         const std::string& expected) {
  return absl::InvalidArgumentError(Printable(
      absl::StrCat("the launcher's environment variable ", variable.name,
                   " must be ", expected, ", got \"", variable.value, "\"")));
}

// The variable's value as an integer from `min` to `max`.
absl::StatusOr<int> ReadInteger(const Variable& variable, int min, int max,
                                const std::string& expected) {
  int value = 0;
  if (!absl::SimpleAtoi(variable.value, &value) || value < min || value > max) {
    return BadVariable(variable, expected);
  }
  return value;
}

// --- Slurm's notations -------------------------------------------------------

// How many tasks run on node `node` according to a text such as "4(x2),3", for
// 4, 4 and 3 tasks.
absl::StatusOr<int> TasksOnNode(const Variable& tasks_per_node, int node) {
  const absl::Status bad =
      BadVariable(tasks_per_node,
                  absl::StrCat("a list such as 4(x2),3 with a positive number "
                               "of tasks for node ",
                               node));
  for (absl::string_view run : absl::StrSplit(tasks_per_node.value, ',')) {
    const std::vector<std::string> parts = absl::StrSplit(run, "(x");
    int tasks = 0, nodes = 1;
    if (parts.size() > 2 || !absl::SimpleAtoi(parts[0], &tasks) || tasks < 1) {
      return bad;
    }
    if (parts.size() == 2 &&
        (!absl::EndsWith(parts[1], ")") ||
         !absl::SimpleAtoi(parts[1].substr(0, parts[1].size() - 1), &nodes) ||
         nodes < 1)) {
      return bad;
    }
    if (node < nodes) return tasks;
    node -= nodes;
  }
  return bad;
}

// The first host of a text such as "node[003-010,012],gpu1": node003.
absl::StatusOr<std::string> FirstHost(const Variable& node_list) {
  const absl::Status bad =
      BadVariable(node_list, "a list of hosts such as node[003-010],gpu1");
  const std::string& text = node_list.value;
  std::string host;
  for (size_t i = 0; i < text.size() && text[i] != ','; ++i) {
    if (text[i] != '[') {
      host += text[i];
      continue;
    }
    const size_t close = text.find(']', i);
    const size_t end = text.find_first_of("-,]", i);
    if (close == std::string::npos || end == i + 1) return bad;
    host += text.substr(i + 1, end - i - 1);
    i = close;
  }
  if (host.empty()) return bad;
  return host;
}

// -----------------------------------------------------------------------------

// A port that all ranks of the job agree on and other jobs hardly have: not one
// that the system gives out (from 32768 on), nor one of its services.
uint16_t PortOfJob(absl::string_view job) {
  return static_cast<uint16_t>(10000 + Fnv1a32(job) % 20000);
}

class LaunchReader {
 public:
  explicit LaunchReader(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  absl::StatusOr<LaunchEnvironment> Read() {
    const LauncherVariables* variables = FindLauncher();
    if (variables == nullptr) return LaunchEnvironment();
    LORA_RETURN_IF_ERROR(CheckComplete(*variables));
    launch_.launcher = variables->launcher;
    LORA_RETURN_IF_ERROR(ReadPlace(*variables));
    LORA_ASSIGN_OR_RETURN(launch_.master_addr, MasterAddress());
    LORA_ASSIGN_OR_RETURN(launch_.master_port, MasterPort());
    if (launch_.launcher == Launcher::kTorchrun) {
      LORA_RETURN_IF_ERROR(ReadAgent());
    }
    return launch_;
  }

 private:
  std::optional<Variable> Find(const Names& names) const {
    for (const char* name : names) {
      if (std::optional<std::string> value = lookup_(name)) {
        return Variable{name, *std::move(value)};
      }
    }
    return std::nullopt;
  }

  Variable Get(const Names& names) const {
    return Find(names).value_or(Variable{names.front(), ""});
  }

  bool AnySet(const std::vector<Names>& variables) const {
    return std::any_of(variables.begin(), variables.end(),
                       [&](const Names& names) { return Find(names); });
  }

  // Null for none. Half of a launcher's variables count as that launcher.
  const LauncherVariables* FindLauncher() const {
    const LauncherVariables& torchrun = Torchrun();
    if (AnySet({torchrun.rank, torchrun.world_size, torchrun.local_rank,
                torchrun.local_world_size})) {
      return &torchrun;
    }
    if (AnySet(OpenMpi().All())) return &OpenMpi();
    if (IsSlurmTask()) return &Slurm();
    return AnySet(torchrun.others) ? &torchrun : nullptr;
  }

  // Slurm numbers the steps that are shells or its own from the top.
  bool IsSlurmTask() const {
    constexpr uint32_t kFirstSpecialStep = 0xfffffff0;
    const std::optional<std::string> step = lookup_("SLURM_STEP_ID");
    uint32_t id = 0;
    return step && !(absl::SimpleAtoi(*step, &id) && id >= kFirstSpecialStep);
  }

  absl::Status CheckComplete(const LauncherVariables& variables) const {
    std::vector<std::string> wanted, set, missing;
    for (const Names& names : variables.All()) {
      wanted.emplace_back(names.front());
      if (const std::optional<Variable> found = Find(names)) {
        set.push_back(absl::StrCat(found->name, "=", found->value));
      } else {
        missing.push_back(absl::StrJoin(names, " or "));
      }
    }
    if (missing.empty()) return absl::OkStatus();
    if (set.empty()) {  // Only this told that there is a launcher.
      set.push_back(absl::StrCat("SLURM_STEP_ID=", *lookup_("SLURM_STEP_ID")));
    }
    return absl::InvalidArgumentError(Printable(absl::StrCat(
        "the launcher's environment is incomplete: ", absl::StrJoin(set, ", "),
        " but no ", absl::StrJoin(missing, ", "), "; a launcher must set ",
        absl::StrJoin(wanted, ", "), " (", variables.program,
        " does), and a single process needs none of them")));
  }

  absl::Status ReadPlace(const LauncherVariables& variables) {
    const Variable world_size = Get(variables.world_size);
    const Variable local_world_size = Get(variables.local_world_size);
    LORA_ASSIGN_OR_RETURN(launch_.world_size, ReadSize(world_size));
    LORA_ASSIGN_OR_RETURN(
        launch_.rank,
        ReadRank(Get(variables.rank), world_size, launch_.world_size));
    if (launch_.launcher == Launcher::kSlurm) {
      LORA_ASSIGN_OR_RETURN(
          const int node,
          ReadInteger(Get({"SLURM_NODEID"}), 0, std::numeric_limits<int>::max(),
                      "an integer from 0 on"));
      LORA_ASSIGN_OR_RETURN(launch_.local_world_size,
                            TasksOnNode(local_world_size, node));
    } else {
      LORA_ASSIGN_OR_RETURN(launch_.local_world_size,
                            ReadSize(local_world_size));
    }
    LORA_ASSIGN_OR_RETURN(launch_.local_rank,
                          ReadRank(Get(variables.local_rank), local_world_size,
                                   launch_.local_world_size));
    if (launch_.local_world_size > launch_.world_size) {
      return BadVariable(local_world_size,
                         absl::StrCat("at most ", world_size.name,
                                      ", which is ", launch_.world_size));
    }
    return absl::OkStatus();
  }

  static absl::StatusOr<int> ReadSize(const Variable& size) {
    return ReadInteger(size, 1, std::numeric_limits<int>::max(),
                       "a positive integer");
  }

  static absl::StatusOr<int> ReadRank(const Variable& rank,
                                      const Variable& size_variable, int size) {
    return ReadInteger(
        rank, 0, size - 1,
        absl::StrCat("an integer from 0 to ", size - 1, " (",
                     size_variable.name, " is ", size_variable.value, ")"));
  }

  absl::StatusOr<std::string> MasterAddress() const {
    if (const auto address = Find({"MASTER_ADDR"})) {
      if (!address->value.empty()) return address->value;
      return BadVariable(*address, "the host name or address of rank 0");
    }
    if (launch_.launcher == Launcher::kSlurm) {
      const auto nodes = Find({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"});
      if (nodes) return FirstHost(*nodes);
      return absl::InvalidArgumentError(
          "Slurm's environment does not say where rank 0 is: there is no "
          "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST; set MASTER_ADDR to the "
          "host of rank 0");
    }
    if (launch_.world_size == launch_.local_world_size) return "127.0.0.1";
    return absl::InvalidArgumentError(absl::StrCat(
        "Open MPI's environment does not say where rank 0 is, and the ",
        launch_.world_size,
        " ranks are on several hosts: name its host, with mpirun -x "
        "MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."));
  }

  absl::StatusOr<uint16_t> MasterPort() const {
    if (const auto port = Find({"MASTER_PORT"})) {
      LORA_ASSIGN_OR_RETURN(
          const int number,
          ReadInteger(*port, 1, 65535, "a port from 1 to 65535"));
      return static_cast<uint16_t>(number);
    }
    if (launch_.launcher == Launcher::kSlurm) {
      if (const auto job = Find({"SLURM_JOB_ID"})) {
        return PortOfJob(
            absl::StrCat(job->value, ".", Get({"SLURM_STEP_ID"}).value));
      }
      return absl::InvalidArgumentError(
          "Slurm's environment has no SLURM_JOB_ID to choose a port by: set "
          "MASTER_PORT to a free port of rank 0's host");
    }
    if (const auto job = Find({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"})) {
      return PortOfJob(job->value);
    }
    return absl::InvalidArgumentError(
        "Open MPI's environment has no PMIX_NAMESPACE or "
        "OMPI_MCA_ess_base_jobid to choose a port by: name a free port of rank "
        "0's host, with mpirun -x MASTER_PORT=29500 ...");
  }

  // What torchrun's agent says of itself.
  absl::Status ReadAgent() {
    launch_.agent_hosts_store =
        lookup_("TORCHELASTIC_USE_AGENT_STORE") == "True";
    if (const auto restarts = Find({"TORCHELASTIC_RESTART_COUNT"})) {
      LORA_ASSIGN_OR_RETURN(
          launch_.restart_count,
          ReadInteger(*restarts, 0, std::numeric_limits<int>::max(),
                      "an integer from 0 on"));
    }
    return absl::OkStatus();
  }

  const EnvironmentLookup& lookup_;
  LaunchEnvironment launch_;
};

}  // namespace

const char* LauncherName(Launcher launcher) {
  switch (launcher) {
    case Launcher::kNone:
      return "no launcher";
    case Launcher::kTorchrun:
      return "torchrun";
    case Launcher::kOpenMpi:
      return "Open MPI";
    case Launcher::kSlurm:
      break;
  }
  return "Slurm";
}

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
  return LaunchReader(lookup).Read();
}

}  // namespace trainer_lora::config
