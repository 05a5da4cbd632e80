// The flags of a benchmark that Google Benchmark does not know, taken out of
// the arguments before benchmark::Initialize() sees them:
//
//   const bool smoke = TakeFlag(argc, argv, "smoke") == "true";
//
// A benchmark with no flags of its own but --device needs no main(): that of
// the target benchmark_main does this, or that of host_benchmark_main for what
// knows nothing of torch.
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

// Takes `--device=` out of the arguments and returns "cpu", also without the
// flag, or "cuda". Ends the process, with a line on stderr, for anything else.
std::string TakeDeviceFlag(int& argc, char** argv);

// The compiler of this program, such as "g++ 12.2.0".
std::string CompilerVersion();

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_BENCHMARK_FLAGS_H_
