// How much memory a step takes at its peak:
//
//   absl::StatusOr<PeakMemory> peak = PeakMemory::Start();
//   if (!peak.ok()) GTEST_SKIP() << peak.status();
//   LoadAll();
//   EXPECT_LE(peak->BytesAboveStart(), 64 << 20);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_PEAK_MEMORY_H_
#define TRAINER_LORA_TESTS_TESTUTIL_PEAK_MEMORY_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace trainer_lora::testutil {

// The resident memory of this process, as Linux counts it.
class PeakMemory {
 public:
  // Forgets the peak so far. kUnavailable where the system can't.
  static absl::StatusOr<PeakMemory> Start();

  // The peak since then, above what was resident then; at least 0.
  int64_t BytesAboveStart() const;

 private:
  explicit PeakMemory(int64_t start) : start_(start) {}

  int64_t start_;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_PEAK_MEMORY_H_
