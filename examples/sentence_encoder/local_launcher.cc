#include "examples/sentence_encoder/local_launcher.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace trainer_lora::examples {
namespace {

constexpr unsigned kGraceSeconds = 10;
constexpr int kMaxRanks = 64;

// The running ranks, for the signal handlers; 0 where there is none.
volatile pid_t ranks[kMaxRanks];

void SignalRanks(int signal) {
  for (int i = 0; i < kMaxRanks; ++i) {
    if (ranks[i] != 0) kill(ranks[i], signal);
  }
}

void PassOn(int signal) { SignalRanks(signal); }
void KillRanks(int) { SignalRanks(SIGKILL); }

void Handle(int signal, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

std::vector<std::string> RankEnvironment(int rank, int num_ranks, int port) {
  std::vector<std::string> environment = {
      absl::StrCat("RANK=", rank),
      absl::StrCat("LOCAL_RANK=", rank),
      absl::StrCat("WORLD_SIZE=", num_ranks),
      absl::StrCat("LOCAL_WORLD_SIZE=", num_ranks),
      "MASTER_ADDR=127.0.0.1",
      absl::StrCat("MASTER_PORT=", port),
      "TORCHELASTIC_USE_AGENT_STORE=True",
  };
  for (char** variable = environ; *variable != nullptr; ++variable) {
    environment.emplace_back(*variable);
  }
  return environment;
}

// Forks and becomes rank `rank` in the child. 0 if that failed.
pid_t StartRank(int rank, int num_ranks, int port, char** argv) {
  std::vector<std::string> environment = RankEnvironment(rank, num_ranks, port);
  std::vector<char*> pointers;
  for (std::string& variable : environment) pointers.push_back(variable.data());
  pointers.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child < 0 ? 0 : child;
  // Only calls that are safe between fork and exec. A group of its own keeps
  // the terminal's Ctrl-C away, which the parent passes on.
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() == parent) execve("/proc/self/exe", argv, pointers.data());
  _exit(127);
}

int ExitCode(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Waits for every rank; 0, or the code of the first that failed.
int WaitForRanks(int num_ranks) {
  int exit_code = 0;
  for (int running = num_ranks; running > 0;) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0) {
      if (errno == EINTR) continue;
      break;
    }
    for (int i = 0; i < num_ranks; ++i) {
      if (ranks[i] != ended) continue;
      ranks[i] = 0;
      --running;
      if (exit_code == 0 && ExitCode(status) != 0) {
        exit_code = ExitCode(status);
        SignalRanks(SIGTERM);
        alarm(kGraceSeconds);
      }
    }
  }
  alarm(0);
  return exit_code;
}

}  // namespace

int RunLocalRanks(int num_ranks, char** argv) {
  if (num_ranks > kMaxRanks) {
    std::cerr << "at most " << kMaxRanks << " local ranks are possible\n";
    return 1;
  }
  c10::intrusive_ptr<c10d::TCPStore> store;
  try {
    c10d::TCPStoreOptions options;
    options.port = 0;  // any that is free
    options.isServer = true;
    options.waitWorkers = false;
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  } catch (const c10::Error& error) {
    std::cerr << "cannot open the rendezvous store: "
              << error.what_without_backtrace() << "\n";
    return 1;
  }
  Handle(SIGINT, PassOn);
  Handle(SIGTERM, PassOn);
  Handle(SIGALRM, KillRanks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child = StartRank(rank, num_ranks, store->getPort(), argv);
    if (child == 0) {
      std::cerr << "cannot start rank " << rank << ": " << std::strerror(errno)
                << "\n";
      SignalRanks(SIGKILL);
      WaitForRanks(rank);
      return 1;
    }
    ranks[rank] = child;
  }
  return WaitForRanks(num_ranks);
}

}  // namespace trainer_lora::examples
