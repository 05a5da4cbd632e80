// Runs a program as several ranks on this machine, as torchrun does: for
// trainers that should start with one command.
//
//   if (absl::GetFlag(FLAGS_nproc) > 1) {
//     return RunLocalRanks(absl::GetFlag(FLAGS_nproc), argv);
//   }
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_LOCAL_LAUNCHER_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_LOCAL_LAUNCHER_H_

#include <chrono>

namespace trainer_lora::examples {

// Starts this program `num_ranks` times with `argv` and torchrun's environment
// variables, and waits for all. The rendezvous store lives in this process, on
// a free port of the loopback interface. SIGINT and SIGTERM are passed on to
// the ranks. When a rank fails the others get SIGTERM, and after `grace`
// SIGKILL; when this process dies they get SIGTERM. Returns the exit code for
// main(): 0, or that of the first rank that failed (128 + the signal that ended
// it). Call it before the program starts threads.
int RunLocalRanks(int num_ranks, char** argv,
                  std::chrono::milliseconds grace = std::chrono::seconds(10));

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_LOCAL_LAUNCHER_H_
