// The main() of a benchmark that also takes --device=cpu or --device=cuda.
#include <cstdlib>
#include <optional>

#include "benchmark/benchmark.h"
#include "tests/testutil/benchmark_flags.h"

int main(int argc, char** argv) {
  if (const std::optional<int> status =
          trainer_lora::testutil::TakeDeviceFlag(argc, argv)) {
    return *status;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return EXIT_FAILURE;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return EXIT_SUCCESS;
}
