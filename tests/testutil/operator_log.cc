#include "tests/testutil/operator_log.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/record_function.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::testutil {
namespace {

// A callback can have no state of its own.
thread_local std::vector<std::string> names;

std::unique_ptr<at::ObserverContext> Record(
    const at::RecordFunction& function) {
  names.emplace_back(function.name());
  return nullptr;
}

}  // namespace

OperatorLog::OperatorLog()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&Record))) {
  names.clear();
}

OperatorLog::~OperatorLog() { at::removeCallback(handle_); }

int64_t OperatorLog::Count(absl::string_view name) const {
  return std::count(names.begin(), names.end(), name);
}

int64_t OperatorLog::CountCollectives() const {
  return std::count_if(names.begin(), names.end(), [](const auto& name) {
    return absl::StartsWith(name, "c10d::");
  });
}

}  // namespace trainer_lora::testutil
