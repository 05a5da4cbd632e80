// The version of this component, for what a run logs and for code that builds
// against several releases:
//
//   logger.Info(absl::StrCat("trainer_lora ", kVersion));
//
// CHANGELOG.md says what a change of each number means, and to what.
#ifndef TRAINER_LORA_CONFIG_VERSION_H_
#define TRAINER_LORA_CONFIG_VERSION_H_

#include "config/language_version.h"

// Raised by what is incompatible, from 1.0.0 on.
#define TRAINER_LORA_VERSION_MAJOR 0
// Raised by what is new, and before 1.0.0 by what is incompatible.
#define TRAINER_LORA_VERSION_MINOR 1
// Raised by fixes.
#define TRAINER_LORA_VERSION_PATCH 0

namespace trainer_lora::config {

// The numbers as text, with dots.
inline constexpr char kVersion[] = "0.1.0";

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_VERSION_H_
