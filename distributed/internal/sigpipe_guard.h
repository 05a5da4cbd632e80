// Keeps a lost peer from ending this process.
#ifndef TRAINER_LORA_DISTRIBUTED_INTERNAL_SIGPIPE_GUARD_H_
#define TRAINER_LORA_DISTRIBUTED_INTERNAL_SIGPIPE_GUARD_H_

#include <signal.h>

namespace trainer_lora::distributed::internal {

// While one lives, its thread and those that are started from it don't get
// SIGPIPE; the started ones never will. Gloo's threads write to connections
// that a peer may have closed, and the signal's default ends the process.
// Python ignores it everywhere; a library may not decide that for its program.
class SigpipeGuard {
 public:
  SigpipeGuard();
  ~SigpipeGuard();
  SigpipeGuard(const SigpipeGuard&) = delete;
  SigpipeGuard& operator=(const SigpipeGuard&) = delete;

 private:
  bool was_pending_;
  sigset_t old_mask_;
};

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_INTERNAL_SIGPIPE_GUARD_H_
