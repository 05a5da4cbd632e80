#include "distributed/internal/sigpipe_guard.h"

#include <signal.h>
#include <time.h>

namespace trainer_lora::distributed::internal {
namespace {

sigset_t SigpipeAlone() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGPIPE);
  return signals;
}

bool IsSigpipePending() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGPIPE) == 1;
}

}  // namespace

SigpipeGuard::SigpipeGuard() : was_pending_(IsSigpipePending()) {
  const sigset_t sigpipe = SigpipeAlone();
  pthread_sigmask(SIG_BLOCK, &sigpipe, &old_mask_);
}

SigpipeGuard::~SigpipeGuard() {
  // One that this thread caused meanwhile would arrive with the old mask.
  if (!was_pending_ && IsSigpipePending()) {
    const sigset_t sigpipe = SigpipeAlone();
    const timespec no_wait = {};
    sigtimedwait(&sigpipe, nullptr, &no_wait);
  }
  pthread_sigmask(SIG_SETMASK, &old_mask_, nullptr);
}

}  // namespace trainer_lora::distributed::internal
