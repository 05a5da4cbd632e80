// What becomes of the ranks when one fails. The launcher starts this program
// again as each rank, with a disabled test for what the rank does.
#include "examples/sentence_encoder/local_launcher.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace trainer_lora::examples {
namespace {

// Longer than any test may take.
constexpr std::chrono::hours kNever(1);

int RunThreeRanks(const std::string& test, std::chrono::milliseconds grace) {
  std::vector<std::string> arguments = {
      "rank", absl::StrCat("--gtest_filter=LocalLauncherTest.DISABLED_", test),
      "--gtest_also_run_disabled_tests"};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  return RunLocalRanks(3, argv.data(), grace);
}

// 0, 1 or 2 in a rank, -1 elsewhere.
int Rank() {
  const char* const rank = std::getenv("RANK");
  return rank == nullptr ? -1 : std::atoi(rank);
}

// Only a signal ends it.
void WaitForever() {
  alarm(3600);  // Where a test has failed, nobody sends one.
  while (true) pause();
}

// The ranks that wait would never end without SIGTERM.
TEST(LocalLauncherTest, TheOthersAreEndedAndTheFirstFailureIsTheExitCode) {
  EXPECT_EQ(RunThreeRanks("SecondExitsWith3", kNever), 3);
}

TEST(LocalLauncherTest, DISABLED_SecondExitsWith3) {
  if (Rank() < 0) GTEST_SKIP() << "runs as the ranks' processes";
  if (Rank() == 1) _exit(3);
  WaitForever();
}

TEST(LocalLauncherTest, ASignalThatEndsARankIsTheExitCode) {
  EXPECT_EQ(RunThreeRanks("LastIsKilled", kNever), 128 + SIGKILL);
}

TEST(LocalLauncherTest, DISABLED_LastIsKilled) {
  if (Rank() < 0) GTEST_SKIP() << "runs as the ranks' processes";
  if (Rank() == 2) raise(SIGKILL);
  WaitForever();
}

TEST(LocalLauncherTest, ARankThatIgnoresSigtermIsKilled) {
  // The ranks inherit it.
  const auto before = signal(SIGTERM, SIG_IGN);
  EXPECT_EQ(RunThreeRanks("SecondExitsWith3", std::chrono::milliseconds(1)), 3);
  signal(SIGTERM, before);
}

TEST(LocalLauncherTest, RanksThatEndWellGiveZero) {
  EXPECT_EQ(RunThreeRanks("AllEnd", kNever), 0);
}

TEST(LocalLauncherTest, DISABLED_AllEnd) {
  if (Rank() < 0) GTEST_SKIP() << "runs as the ranks' processes";
  _exit(0);
}

}  // namespace
}  // namespace trainer_lora::examples
