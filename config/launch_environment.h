// What a launcher told this process about its place in the job: the environment
// variables of torchrun, Open MPI or Slurm, read and checked once.
//
//   absl::StatusOr<LaunchEnvironment> launch = ReadLaunchEnvironment();
//   if (!launch.ok()) return launch.status();
//   std::cout << "rank " << launch->rank << " of " << launch->world_size
//             << ", started by " << LauncherName(launch->launcher);
//
// The first of these that is there counts, so that torchrun works below srun,
// and mpirun in a Slurm job:
//
//   torchrun  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
//             MASTER_PORT; other launchers may set them too. Beside them, if
//             set, TORCHELASTIC_USE_AGENT_STORE and TORCHELASTIC_RESTART_COUNT.
//   mpirun    Open MPI's OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE.
//   srun      SLURM_PROCID, SLURM_STEP_NUM_TASKS (or SLURM_NTASKS),
//             SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE (or
//             SLURM_TASKS_PER_NODE), in a task of a job step (SLURM_STEP_ID).
//             The shell of an sbatch script or of salloc is a single process.
//
// Where the ranks meet is MASTER_ADDR and MASTER_PORT if they are set. Else,
// the address is the first host of SLURM_STEP_NODELIST (or SLURM_JOB_NODELIST);
// 127.0.0.1 with mpirun on one host; an error with mpirun on several. The port
// is from 10000 to 29999, by a hash (FNV-1a of 32 bits, modulo 20000) of
// "<SLURM_JOB_ID>.<SLURM_STEP_ID>", or of Open MPI's name for the job
// (PMIX_NAMESPACE or OMPI_MCA_ess_base_jobid): the same for all ranks of a job,
// and most likely another one for another job on the same host.
#ifndef TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_
#define TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "config/language_version.h"

namespace trainer_lora::config {

// Whose variables were read.
enum class Launcher { kNone, kTorchrun, kOpenMpi, kSlurm };

// "no launcher", "torchrun", "Open MPI" or "Slurm", for messages.
const char* LauncherName(Launcher launcher);

// Without a launcher: a single process, rank 0 of 1, and no master.
struct LaunchEnvironment {
  // Who started this process.
  Launcher launcher = Launcher::kNone;

  // This process in the job: in [0, world_size).
  int rank = 0;
  // This process on its host: in [0, local_world_size).
  int local_rank = 0;
  // The processes of the job.
  int world_size = 1;
  // Those of them that are on this host, at most world_size.
  int local_world_size = 1;

  // Where the ranks meet, as a host name or an address; empty without a
  // launcher.
  std::string master_addr;
  // The TCP port there; 0 without a launcher.
  uint16_t master_port = 0;

  // torchrun's agent already serves the store at the master's address
  // (TORCHELASTIC_USE_AGENT_STORE=True): every rank connects, none listens.
  bool agent_hosts_store = false;
  // How often torchrun's agent on this host started its processes anew after a
  // failure (TORCHELASTIC_RESTART_COUNT); 0 if that is unset. The agents of
  // several hosts count apart, and may come to different numbers.
  int restart_count = 0;
};

// Returns the value of an environment variable, or nothing if it is unset.
using EnvironmentLookup =
    std::function<std::optional<std::string>(const char* name)>;

// Reads the variables of this process; with none of a launcher's, the result is
// a single process. kInvalidArgument, naming the variables and their values, if
// only some of a launcher's variables are set, a value is out of range, or
// nothing says where the ranks meet. Safe from any thread as long as nothing
// changes the environment meanwhile.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment();

// The same on variables that `lookup` gives.
absl::StatusOr<LaunchEnvironment> ReadLaunchEnvironment(
    const EnvironmentLookup& lookup);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_LAUNCH_ENVIRONMENT_H_
