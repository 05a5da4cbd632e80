#include "tests/testutil/benchmark_flags.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::testutil {

std::optional<std::string> TakeFlag(int& argc, char** argv,
                                    absl::string_view name) {
  const std::string prefix = absl::StrCat("--", name, "=");
  for (int i = 1; i < argc; ++i) {
    if (!absl::StartsWith(argv[i], prefix)) continue;
    const std::string value = argv[i] + prefix.size();
    // With the null pointer at the end.
    std::move(argv + i + 1, argv + argc + 1, argv + i);
    --argc;
    return value;
  }
  return std::nullopt;
}

std::string TakeDeviceFlag(int& argc, char** argv) {
  const std::string device = TakeFlag(argc, argv, "device").value_or("cpu");
  if (device != "cpu" && device != "cuda") {
    std::cerr << "--device=" << device << ": give cpu or cuda" << std::endl;
    std::exit(EXIT_FAILURE);
  }
  return device;
}

std::string CompilerVersion() {
#ifdef __clang__
  return __VERSION__;
#else
  return absl::StrCat("g++ ", __VERSION__);
#endif
}

}  // namespace trainer_lora::testutil
