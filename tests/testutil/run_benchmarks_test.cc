#include "tests/testutil/run_benchmarks.h"

#include <cstdlib>

#include "benchmark/benchmark.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {
namespace {

void Register(const char* name, const char* error) {
  benchmark::RegisterBenchmark(name, [error](benchmark::State& state) {
    if (error != nullptr) state.SkipWithError(error);
    for (auto _ : state) continue;
  })->Iterations(1);
}

class RunBenchmarksTest : public testing::Test {
 protected:
  RunBenchmarksTest() { benchmark::ClearRegisteredBenchmarks(); }
};

TEST_F(RunBenchmarksTest, SucceedsWhenAllDo) {
  Register("first", nullptr);
  Register("second", nullptr);
  EXPECT_EQ(RunBenchmarks(), EXIT_SUCCESS);
}

TEST_F(RunBenchmarksTest, FailsWhenOneHasAnError) {
  Register("first", "out of luck");
  Register("second", nullptr);
  EXPECT_EQ(RunBenchmarks(), EXIT_FAILURE);
}

TEST_F(RunBenchmarksTest, FailsWhenThereAreNone) {
  EXPECT_EQ(RunBenchmarks(), EXIT_FAILURE);
}

}  // namespace
}  // namespace trainer_lora::testutil
