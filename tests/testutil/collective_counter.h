// Counts the collectives that a rank makes:
//
//   const CollectiveCounter counter;
//   layer(input).sum().backward();
//   EXPECT_EQ(counter.count(), 1);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_COLLECTIVE_COUNTER_H_
#define TRAINER_LORA_TESTS_TESTUTIL_COLLECTIVE_COUNTER_H_

#include <cstdint>

#include "ATen/record_function.h"

namespace trainer_lora::testutil {

// Sees what this thread starts from its construction on, in backward passes on
// the CPU too, as these run on the thread that calls them. One at a time lives
// in a thread.
class CollectiveCounter {
 public:
  CollectiveCounter();
  ~CollectiveCounter();
  CollectiveCounter(const CollectiveCounter&) = delete;
  CollectiveCounter& operator=(const CollectiveCounter&) = delete;

  int64_t count() const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_COLLECTIVE_COUNTER_H_
