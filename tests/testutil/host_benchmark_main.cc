// The main() of a benchmark of what only uses the host. --device=cuda changes
// nothing.
#include <cstdlib>
#include <iostream>

#include "benchmark/benchmark.h"
#include "tests/testutil/benchmark_flags.h"
#include "tests/testutil/run_benchmarks.h"

int main(int argc, char** argv) {
  if (trainer_lora::testutil::TakeDeviceFlag(argc, argv) == "cuda") {
    std::cerr << "--device=cuda: the host is measured, as nothing here uses a "
                 "device"
              << std::endl;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return EXIT_FAILURE;
  benchmark::AddCustomContext("device", "host");
  benchmark::AddCustomContext("compiler",
                              trainer_lora::testutil::CompilerVersion());
  return trainer_lora::testutil::RunBenchmarks();
}
