// The main() of a benchmark that measures on BenchmarkDevice().
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/run_benchmarks.h"

int main(int argc, char** argv) {
  trainer_lora::testutil::InitializeBenchmark(argc, argv);
  return trainer_lora::testutil::RunBenchmarks();
}
