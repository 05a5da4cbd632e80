// The ranks of a job as processes, for what a thread can't show: a rank that is
// killed or stopped, or that ends. The test starts itself once a rank, with
// torchrun's variables, as the disabled test that is called Rank:
//
//   TEST(LostPeerTest, TheOthersEnd) {
//     ProcessRanks ranks("lost peer", /*world_size=*/3);
//     ranks.WaitForMark(1);
//     ranks.Signal(1, SIGKILL);
//     EXPECT_TRUE(ranks.EndedWell(0));
//   }
//   TEST(LostPeerTest, DISABLED_Rank) {
//     if (!IsRankProcess()) GTEST_SKIP() << "runs as the ranks' processes";
//     if (RankScenario() == "lost peer") { MakeMark(); ... }
//   }
#ifndef TRAINER_LORA_TESTS_TESTUTIL_PROCESS_RANKS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_PROCESS_RANKS_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace trainer_lora::testutil {

// Used by one thread. Ranks that still run at its end are killed.
class ProcessRanks {
 public:
  // `scenario` is what RankScenario() returns in each of the processes.
  ProcessRanks(const std::string& scenario, int world_size);
  ~ProcessRanks();
  ProcessRanks(const ProcessRanks&) = delete;
  ProcessRanks& operator=(const ProcessRanks&) = delete;

  // Returns when the rank called MakeMark() once more; a failure of the test if
  // it ended instead.
  void WaitForMark(int rank);

  // Sends it a signal, if it has not been waited for.
  void Signal(int rank, int signal);

  // Returns when SIGSTOP has stopped the rank.
  void WaitUntilStopped(int rank);

  // Waits until the rank has ended; returns its wait status, also when called
  // again.
  int Wait(int rank);

  // Waits; whether it exited with status 0, or else how it ended.
  testing::AssertionResult EndedWell(int rank);

 private:
  struct Rank {
    pid_t pid = -1;
    int marks = -1;  // The read end of the pipe for MakeMark().
    bool ended = false;
    int status = 0;
  };
  std::vector<Rank> ranks_;
};

// In a process that ProcessRanks started:

bool IsRankProcess();
std::string RankScenario();
// Lets a WaitForMark() of this rank return. Does not wait.
void MakeMark();

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_PROCESS_RANKS_H_
