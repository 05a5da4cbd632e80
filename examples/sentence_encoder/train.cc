// Trains a LoRA adapter for a sentence encoder on the ranks of this machine, or
// as one rank of whatever launcher started it.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "ATen/Parallel.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "config/launch_environment.h"
#include "config/logging.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/process_group.h"
#include "examples/sentence_encoder/local_launcher.h"
#include "examples/sentence_encoder/progress.h"
#include "examples/sentence_encoder/trainer.h"
#include "examples/sentence_encoder/training_config.h"
#include "lora/model_summary.h"
#include "tools/cpp/runfiles/runfiles.h"

ABSL_FLAG(std::string, config, "",
          "YAML file of the run (empty: the train.yaml of this example)");
ABSL_FLAG(std::string, output, "",
          "new folder for the adapter (empty: sentence_encoder_adapter-<time>-"
          "<pid> in the current folder)");
ABSL_FLAG(int64_t, steps, 0, "optimizer steps (0: as the config says)");
ABSL_FLAG(int32_t, nproc, 2,
          "ranks to start on this machine; a launcher such as torchrun goes "
          "before this flag");

namespace trainer_lora::examples {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr char kUsage[] =
    "trains a LoRA adapter of all-MiniLM-L6-v2 that finds WordNet nouns by "
    "their "
    "definition.\n\n"
    "  train                        two ranks on this machine, as in "
    "train.yaml\n"
    "  train --nproc=1 --steps=20   one process, twenty steps\n"
    "  torchrun --no-python --nproc-per-node=2 train\n\n"
    "Ctrl-C stops all ranks after the step and saves the adapter.";

volatile sig_atomic_t interrupted = 0;

// The first signal asks for an orderly end; the second ends the process.
void StopAtFirstSignal() {
  struct sigaction action = {};
  action.sa_handler = [](int) { interrupted = 1; };
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

// `bazel run` starts programs elsewhere than where the user stands.
std::string UserPath(const std::string& path) {
  const char* directory = std::getenv("BUILD_WORKING_DIRECTORY");
  return directory == nullptr ? path : (fs::path(directory) / path).string();
}

struct Run {
  TrainingConfig config;
  TrainingFiles files;
  std::string output;
};

// Of the folder that is to be made, an error that would otherwise come after
// the training, on the rank that writes it: no other needs to see it.
absl::StatusOr<std::string> OutputPath(const std::string& flag, bool writes) {
  constexpr char kWayOut[] = "choose another folder with --output";
  const auto refuse = [&](int error, const std::string& path) {
    return absl::ErrnoToStatus(
        error, absl::StrCat(path, " can't be written: ", kWayOut));
  };
  std::error_code error;
  fs::path path = fs::absolute(UserPath(flag), error).lexically_normal();
  if (error) return refuse(error.value(), flag);
  if (!path.has_filename()) path = path.parent_path();  // It ends with a slash.
  if (!writes) return path.string();
  const fs::file_status status = fs::symlink_status(path, error);
  if (fs::exists(status)) {
    return absl::AlreadyExistsError(
        absl::StrCat(path.string(), " exists: ", kWayOut));
  }
  if (status.type() != fs::file_type::not_found) {
    return refuse(error.value(), path.string());
  }
  const std::string parent = path.parent_path().string();
  if (!fs::is_directory(parent, error)) {
    return absl::NotFoundError(
        absl::StrCat(parent, " is not a folder: create it, or ", kWayOut));
  }
  if (access(parent.c_str(), W_OK | X_OK) != 0) {
    return refuse(errno, parent);
  }
  return path.string();
}

absl::StatusOr<Run> ReadFlags(const std::string& program, bool writes) {
  using ::bazel::tools::cpp::runfiles::Runfiles;
  std::string error;
  const std::unique_ptr<Runfiles> runfiles(Runfiles::Create(program, &error));
  if (runfiles == nullptr) return absl::NotFoundError(error);

  Run run;
  const std::string config_flag = absl::GetFlag(FLAGS_config);
  auto config = TrainingConfig::Load(
      config_flag.empty()
          ? runfiles->Rlocation(absl::StrCat(
                "trainer_lora/examples/sentence_encoder/", "train.yaml"))
          : UserPath(config_flag));
  if (!config.ok()) return config.status();
  run.config = *std::move(config);
  const int64_t steps = absl::GetFlag(FLAGS_steps);
  if (steps < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--steps must not be negative, got ", steps));
  }
  if (steps > 0) run.config.steps = steps;

  run.files = {runfiles->Rlocation("minilm/config.json"),
               runfiles->Rlocation("minilm/model.safetensors"),
               runfiles->Rlocation("minilm/vocab.txt"),
               runfiles->Rlocation("wordnet/wordnet/data.noun")};

  std::string output = absl::GetFlag(FLAGS_output);
  if (output.empty()) {
    char now[32];
    const std::time_t seconds = std::time(nullptr);
    std::strftime(now, sizeof(now), "%Y%m%d-%H%M%S", std::localtime(&seconds));
    output = absl::StrCat("sentence_encoder_adapter-", now, "-", getpid());
  }
  auto path = OutputPath(output, writes);
  if (!path.ok()) return path.status();
  run.output = *std::move(path);
  return run;
}

void PrintMetrics(const char* when, const RetrievalMetrics& metrics) {
  absl::PrintF("held-out %s: recall@1 %.3f, MRR %.3f\n", when,
               metrics.recall_at_1, metrics.mean_reciprocal_rank);
  std::fflush(stdout);
}

// Rank 0 measures while the others wait, so it can have their cores.
RetrievalMetrics EvaluateWithAllCores(Trainer& trainer, int local_world_size) {
  at::set_num_threads(local_world_size);
  const RetrievalMetrics metrics = trainer.Evaluate();
  at::set_num_threads(1);
  return metrics;
}

// Runs the steps, until the last or until some rank was interrupted.
absl::Status TrainSteps(Trainer& trainer, const distributed::DeviceMesh& mesh,
                        int64_t steps) {
  const config::Logger logger = config::InitLogger("sentence_encoder");
  Progress progress(stdout, isatty(fileno(stdout)) != 0, steps);
  const Clock::time_point start = Clock::now();
  int64_t pairs = 0;
  for (int64_t step = 1; step <= steps; ++step) {
    const auto result = trainer.Step();
    if (!result.ok()) return result.status();
    pairs += result->pairs;
    const double seconds =
        std::chrono::duration<double>(Clock::now() - start).count();
    if (mesh.rank() == 0) {
      progress.Report({step, result->loss, result->grad_norm, pairs / seconds,
                       seconds / step * (steps - step)});
    }
    if (!std::isfinite(result->grad_norm)) {
      progress.Finish();
      logger.Warning(absl::StrCat("step ", step, " was skipped: gradient norm ",
                                  result->grad_norm));
    }
    // All ranks leave after the same step, or some would wait for the others.
    const auto stop =
        distributed::AllReduce(mesh, interrupted, distributed::ReduceOp::kMax);
    if (!stop.ok()) return stop.status();
    if (*stop > 0) {
      progress.Finish();
      if (mesh.rank() == 0) {
        absl::PrintF("interrupted after step %d\n", step);
      }
      break;
    }
  }
  progress.Finish();
  return absl::OkStatus();
}

void PrintHowToOpen(const std::string& folder) {
  absl::PrintF(
      "adapter: %s\n\nIn Python:\n"
      "  from peft import PeftModel; from transformers import AutoModel\n"
      "  base = AutoModel.from_pretrained("
      "\"sentence-transformers/all-MiniLM-L6-v2\")\n"
      "  model = PeftModel.from_pretrained(base, \"%s\")\n",
      folder, folder);
}

absl::Status TrainAsRank(const Run& run,
                         const config::LaunchEnvironment& environment) {
  StopAtFirstSignal();
  at::set_num_threads(1);
  auto group = distributed::InitProcessGroup(environment);
  if (!group.ok()) return group.status();
  auto mesh = distributed::DeviceMesh::Create(*std::move(group));
  if (!mesh.ok()) return mesh.status();
  const bool is_first = (*mesh)->rank() == 0;

  auto created = Trainer::Create(run.config, run.files, *mesh);
  if (!created.ok()) return created.status();
  Trainer& trainer = **created;
  if (is_first) {
    absl::PrintF("%s", lora::SummaryTable(
                           {{"student", lora::Summarize(*trainer.encoder())}}));
    PrintMetrics("before",
                 EvaluateWithAllCores(trainer, environment.local_world_size));
  }
  const absl::Status trained = TrainSteps(trainer, **mesh, run.config.steps);
  if (!trained.ok()) return trained;

  absl::Status saved;
  if (is_first) {
    saved = trainer.Save(run.output);
    if (saved.ok()) {
      PrintMetrics("after",
                   EvaluateWithAllCores(trainer, environment.local_world_size));
      PrintHowToOpen(run.output);
    }
  }
  const absl::Status met = distributed::Barrier(**mesh);
  return saved.ok() ? met : saved;
}

int Main(int argc, char** argv) {
  absl::SetProgramUsageMessage(kUsage);
  if (absl::ParseCommandLine(argc, argv).size() > 1) {
    std::cerr << "train: takes flags only; see --help\n";
    return 1;
  }
  const auto fail = [](const absl::Status& status) {
    std::cerr << "train: " << status.message() << "\n";
    return 1;
  };
  const auto environment = config::ReadLaunchEnvironment();
  if (!environment.ok()) return fail(environment.status());
  const auto run = ReadFlags(argv[0], environment->rank == 0);
  if (!run.ok()) return fail(run.status());

  const int nproc = absl::GetFlag(FLAGS_nproc);
  if (nproc < 1) {
    return fail(absl::InvalidArgumentError(
        absl::StrCat("--nproc must be at least 1, got ", nproc)));
  }
  const bool has_launcher = !environment->master_addr.empty();
  if (!has_launcher && nproc > 1) return RunLocalRanks(nproc, argv);
  const absl::Status status = TrainAsRank(*run, *environment);
  return status.ok() ? 0 : fail(status);
}

}  // namespace
}  // namespace trainer_lora::examples

int main(int argc, char** argv) {
  return trainer_lora::examples::Main(argc, argv);
}
