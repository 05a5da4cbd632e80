// The main() of a benchmark that measures on BenchmarkDevice().
#include <cstdlib>

#include "benchmark/benchmark.h"
#include "tests/testutil/benchmark_device.h"

int main(int argc, char** argv) {
  trainer_lora::testutil::InitializeBenchmark(argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return EXIT_SUCCESS;
}
