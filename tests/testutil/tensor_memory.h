// How many bytes of tensors are alive, and were at the peak:
//
//   const TensorMemory memory;
//   const at::Tensor output = layer(input);
//   EXPECT_LE(memory.bytes(), output.nbytes() + 1024);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_TENSOR_MEMORY_H_
#define TRAINER_LORA_TESTS_TESTUTIL_TENSOR_MEMORY_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "c10/core/Allocator.h"
#include "c10/util/ThreadLocalDebugInfo.h"

namespace trainer_lora::testutil {

// Counts what this thread allocates and frees while it lives, as libtorch's
// profiler does, on all devices; those of one thread end in the reverse order
// of their start.
class TensorMemory {
 public:
  // Allocated since the start, less what was freed; of tensors that are older,
  // too, so it can be negative.
  int64_t bytes() const { return counter_->bytes; }
  // The maximum of bytes() since the start or the last call of ResetPeak().
  int64_t peak_bytes() const { return counter_->peak_bytes; }
  void ResetPeak() const { counter_->peak_bytes = counter_->bytes; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void* /*pointer*/, int64_t size,
                           size_t /*total_allocated*/,
                           size_t /*total_reserved*/,
                           c10::Device /*device*/) override {
      bytes += size;
      peak_bytes = std::max(peak_bytes, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }

    int64_t bytes = 0;
    int64_t peak_bytes = 0;
  };

  const std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE,
                                   counter_};
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_TENSOR_MEMORY_H_
