// The flags of a benchmark that Google Benchmark does not know:
//
//   if (const std::optional<int> status = TakeDeviceFlag(argc, argv)) {
//     return *status;
//   }
//   const bool smoke = TakeFlag(argc, argv, "smoke") == "true";
//   benchmark::Initialize(&argc, argv);
//
// A benchmark with no flags of its own but --device needs no main(): that of
// the target benchmark_main does this.
#ifndef TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_FLAGS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_FLAGS_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace trainer_lora::testutil {

// Takes the first `--name=value` out of the arguments and returns the value;
// nothing if there is none.
std::optional<std::string> TakeFlag(int& argc, char** argv,
                                    absl::string_view name);

// Takes `--device=` out of the arguments. Returns the exit status if there is
// nothing to measure: success, and a line that says so, for cuda, since this
// build has no CUDA; failure for anything but cpu and cuda. Nothing for cpu or
// without the flag.
std::optional<int> TakeDeviceFlag(int& argc, char** argv);

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_FLAGS_H_
