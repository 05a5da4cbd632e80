// What the main() of a benchmark ends with:
//
//   return RunBenchmarks();
#ifndef TRAINER_LORA_TESTS_TESTUTIL_RUN_BENCHMARKS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_RUN_BENCHMARKS_H_

namespace trainer_lora::testutil {

// Runs what --benchmark_filter matches, and reports it as the flags of Google
// Benchmark say. Returns EXIT_FAILURE if it matches nothing, or if one of them
// calls state.SkipWithError(); RunSpecifiedBenchmarks() minds neither.
int RunBenchmarks();

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_RUN_BENCHMARKS_H_
