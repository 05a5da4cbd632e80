// Autocast, for what must compute under it as without:
//
//   const AutocastScope autocast;
//   EXPECT_EQ(layer(x).scalar_type(), at::kBFloat16);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_AUTOCAST_SCOPE_H_
#define TRAINER_LORA_TESTS_TESTUTIL_AUTOCAST_SCOPE_H_

#include "ATen/autocast_mode.h"

namespace trainer_lora::testutil {

// While one lives, the CPU computes in bfloat16 what autocast has it compute.
class AutocastScope {
 public:
  AutocastScope() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_AUTOCAST_SCOPE_H_
