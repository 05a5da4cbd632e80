#include "tests/testutil/collective_counter.h"

#include <cstdint>
#include <cstring>
#include <memory>

#include "ATen/record_function.h"

namespace trainer_lora::testutil {
namespace {

// A callback can have no state of its own.
thread_local int64_t collectives = 0;

std::unique_ptr<at::ObserverContext> Count(const at::RecordFunction& function) {
  constexpr char kNamespace[] = "c10d::";
  if (std::strncmp(function.name(), kNamespace, sizeof(kNamespace) - 1) == 0) {
    ++collectives;
  }
  return nullptr;
}

}  // namespace

CollectiveCounter::CollectiveCounter()
    : handle_(at::addThreadLocalCallback(at::RecordFunctionCallback(&Count))) {
  collectives = 0;
}

CollectiveCounter::~CollectiveCounter() { at::removeCallback(handle_); }

int64_t CollectiveCounter::count() const { return collectives; }

}  // namespace trainer_lora::testutil
