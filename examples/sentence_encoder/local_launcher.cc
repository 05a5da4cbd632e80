#include "examples/sentence_encoder/local_launcher.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <iostream>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace trainer_lora::examples {
namespace {

using Clock = std::chrono::steady_clock;

// Signals that wait to be taken by sigtimedwait(), so that nothing runs in a
// handler; as before once it is gone.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigemptyset(&signals_);
    for (const int number : {SIGINT, SIGTERM, SIGCHLD}) {
      sigaddset(&signals_, number);
    }
    pthread_sigmask(SIG_BLOCK, &signals_, &before_);
    // Where it is ignored, nobody can wait for a process.
    signal(SIGCHLD, SIG_DFL);
  }
  ~BlockedSignals() { Unblock(); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  // Waits for one of them; -1 once it is `deadline`, if there is one.
  int Wait(const std::optional<Clock::time_point>& deadline) const {
    if (!deadline.has_value()) return sigwaitinfo(&signals_, nullptr);
    const auto left = std::max(Clock::duration(0), *deadline - Clock::now());
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec timeout = {seconds.count(),
                              std::chrono::nanoseconds(left - seconds).count()};
    return sigtimedwait(&signals_, nullptr, &timeout);
  }

  // Safe between fork and exec.
  void Unblock() const { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t signals_;
  sigset_t before_;
};

void SignalRanks(const std::set<pid_t>& ranks, int signal) {
  for (const pid_t rank : ranks) kill(rank, signal);
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
pid_t StartRank(int rank, int num_ranks, int port, char** argv,
                const BlockedSignals& signals) {
  std::vector<std::string> environment = RankEnvironment(rank, num_ranks, port);
  std::vector<char*> pointers;
  for (std::string& variable : environment) pointers.push_back(variable.data());
  pointers.push_back(nullptr);

  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child < 0 ? 0 : child;
  // Only calls that are safe between fork and exec. A group of its own keeps
  // the terminal's Ctrl-C away, which the parent passes on.
  signals.Unblock();
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() == parent) execve("/proc/self/exe", argv, pointers.data());
  _exit(127);
}

int ExitCode(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Waits for every rank, and passes SIGINT and SIGTERM on to them; 0, or the
// code of the first that failed, `grace` after which the others are killed.
int WaitForRanks(std::set<pid_t> ranks, std::chrono::milliseconds grace,
                 const BlockedSignals& signals) {
  int exit_code = 0;
  std::optional<Clock::time_point> deadline;  // From a failure to SIGKILL.
  while (!ranks.empty()) {
    const int signal = signals.Wait(deadline);
    if (signal == SIGINT || signal == SIGTERM) SignalRanks(ranks, signal);
    if (signal < 0 && errno == EAGAIN) {
      SignalRanks(ranks, SIGKILL);
      deadline.reset();
    }
    int status = 0;
    for (pid_t ended; (ended = waitpid(-1, &status, WNOHANG)) > 0;) {
      ranks.erase(ended);
      if (exit_code == 0 && ExitCode(status) != 0) {
        exit_code = ExitCode(status);
        deadline = Clock::now() + grace;
        SignalRanks(ranks, SIGTERM);
      }
    }
  }
  return exit_code;
}

}  // namespace

int RunLocalRanks(int num_ranks, char** argv, std::chrono::milliseconds grace) {
  // Before a thread starts, which would take them.
  const BlockedSignals signals;
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
  std::set<pid_t> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t child =
        StartRank(rank, num_ranks, store->getPort(), argv, signals);
    if (child == 0) {
      std::cerr << "cannot start rank " << rank << ": " << std::strerror(errno)
                << "\n";
      SignalRanks(ranks, SIGKILL);
      WaitForRanks(std::move(ranks), grace, signals);
      return 1;
    }
    ranks.insert(child);
  }
  return WaitForRanks(std::move(ranks), grace, signals);
}

}  // namespace trainer_lora::examples
