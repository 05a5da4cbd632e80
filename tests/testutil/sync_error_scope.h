// Shows that the host does not wait for the device:
//
//   {
//     const SyncErrorScope scope;
//     loss.backward();  // Throws if an operator synchronizes.
//   }
#ifndef TRAINER_LORA_TESTS_TESTUTIL_SYNC_ERROR_SCOPE_H_
#define TRAINER_LORA_TESTS_TESTUTIL_SYNC_ERROR_SCOPE_H_

#include "c10/cuda/CUDAFunctions.h"

namespace trainer_lora::testutil {

// While one lives, whatever in libtorch makes the host wait for the device
// throws, as under torch.cuda.set_sync_debug_mode("error") in Python. One
// thread uses it at a time; it counts for all.
class SyncErrorScope {
 public:
  SyncErrorScope() {
    c10::cuda::warning_state().set_sync_debug_mode(
        c10::cuda::SyncDebugMode::L_ERROR);
  }
  ~SyncErrorScope() {
    c10::cuda::warning_state().set_sync_debug_mode(
        c10::cuda::SyncDebugMode::L_DISABLED);
  }
  SyncErrorScope(const SyncErrorScope&) = delete;
  SyncErrorScope& operator=(const SyncErrorScope&) = delete;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_SYNC_ERROR_SCOPE_H_
