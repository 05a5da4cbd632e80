// Reached from every public header that uses libtorch. c10d, the dispatcher and
// autograd's functions are no stable interfaces: with a release that was not
// tested a build must fail here, and a training run not at all.
#ifndef TRAINER_LORA_DISTRIBUTED_LIBTORCH_VERSION_H_
#define TRAINER_LORA_DISTRIBUTED_LIBTORCH_VERSION_H_

#include "config/language_version.h"
#include "torch/version.h"

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR != 11
#error "trainer_lora is tested with libtorch 2.11 alone"
#endif

#endif  // TRAINER_LORA_DISTRIBUTED_LIBTORCH_VERSION_H_
