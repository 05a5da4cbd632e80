#include "tests/testutil/peak_memory.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::testutil {
namespace {

// An entry such as "VmRSS:   123 kB" of this process's status, in bytes; -1 if
// it is not there.
int64_t StatusEntry(absl::string_view name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!absl::StartsWith(line, name)) continue;
    const size_t digits = line.find_first_of("0123456789");
    const size_t end = line.find(' ', digits);
    int64_t kilobytes = 0;
    if (digits != line.npos &&
        absl::SimpleAtoi(line.substr(digits, end - digits), &kilobytes)) {
      return kilobytes << 10;
    }
  }
  return -1;
}

}  // namespace

absl::StatusOr<PeakMemory> PeakMemory::Start() {
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5" << std::flush;
  const int64_t resident = StatusEntry("VmRSS:");
  if (!clear || resident < 0) {
    return absl::UnavailableError(
        "this system does not say what memory a process takes");
  }
  return PeakMemory(resident);
}

int64_t PeakMemory::BytesAboveStart() const {
  return std::max<int64_t>(StatusEntry("VmHWM:") - start_, 0);
}

}  // namespace trainer_lora::testutil
