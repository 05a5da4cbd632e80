// Operations in the types of their inputs, under autocast too:
//
//   const NoAutocastGuard no_autocast;
//   at::addmm_out(sum, bias, a, b);
#ifndef TRAINER_LORA_LORA_INTERNAL_NO_AUTOCAST_GUARD_H_
#define TRAINER_LORA_LORA_INTERNAL_NO_AUTOCAST_GUARD_H_

#include "ATen/autocast_mode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::lora::internal {

// While one lives, autocast is off in its thread.
class NoAutocastGuard {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

}  // namespace trainer_lora::lora::internal

#endif  // TRAINER_LORA_LORA_INTERNAL_NO_AUTOCAST_GUARD_H_
