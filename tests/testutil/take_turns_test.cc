#include "tests/testutil/take_turns.h"

#include <functional>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {
namespace {

using ::testing::ElementsAre;

class Reporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& reported) override {
    runs.insert(runs.end(), reported.begin(), reported.end());
  }

  std::vector<Run> runs;
};

// The result of three iterations of `function`.
benchmark::BenchmarkReporter::Run RunThrice(
    const std::function<void(benchmark::State&)>& function) {
  benchmark::ClearRegisteredBenchmarks();
  benchmark::RegisterBenchmark("run", function)
      ->Iterations(3)
      ->UseManualTime()
      ->Unit(benchmark::kSecond);
  Reporter reporter;
  benchmark::RunSpecifiedBenchmarks(&reporter, "run");
  EXPECT_EQ(reporter.runs.size(), 1);
  return reporter.runs.at(0);
}

TEST(TakeTurnsTest, GivesTheMediansOfTurnsWithoutTheFirst) {
  const std::vector<double> own_seconds = {100, 1, 5, 3};
  const std::vector<double> baseline_seconds = {100, 9, 2, 2};
  std::string turns;
  std::vector<double> medians;
  const auto run = RunThrice([&](benchmark::State& state) {
    const auto [own, baseline] = TakeTurns(
        state,
        [&] {
          const size_t turn = turns.size() / 2;
          turns += 'o';
          return own_seconds.at(turn);
        },
        [&] {
          const size_t turn = turns.size() / 2;
          turns += 'b';
          return baseline_seconds.at(turn);
        });
    medians = {own, baseline};
  });
  EXPECT_EQ(turns, "obobobob");
  EXPECT_THAT(medians, ElementsAre(3, 2));
  EXPECT_EQ(run.GetAdjustedRealTime(), 3);  // The mean of own: 9 / 3.
}

TEST(TakeTurnsTest, EndsAfterAnError) {
  int turns = 0;
  const auto run = RunThrice([&](benchmark::State& state) {
    TakeTurns(state, [&] {
      if (++turns == 2) state.SkipWithError("out of luck");
      return 1.0;
    });
  });
  EXPECT_EQ(turns, 2);
  EXPECT_TRUE(run.error_occurred);
  EXPECT_EQ(run.error_message, "out of luck");
}

TEST(TakeTurnsTest, EndsAfterAnErrorWhileItWarmsUp) {
  int turns = 0;
  const auto run = RunThrice([&](benchmark::State& state) {
    TakeTurns(state, [&] {
      ++turns;
      state.SkipWithError("out of luck");
      return 1.0;
    });
  });
  EXPECT_EQ(turns, 1);
  EXPECT_TRUE(run.error_occurred);
}

TEST(SecondsOnHostTest, TakesNoLongerThanTheClockAroundIt) {
  double inner = 0;
  const double outer = SecondsOnHost([&] { inner = SecondsOnHost([] {}); });
  EXPECT_GE(inner, 0);
  EXPECT_LE(inner, outer);
}

}  // namespace
}  // namespace trainer_lora::testutil
