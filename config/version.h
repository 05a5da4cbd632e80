// The version of this component, for what a run logs and for code that builds
// against several releases:
//
//   logger.Info(absl::StrCat("trainer_lora ", kVersion));
//
// CHANGELOG.md says what a change of each number means, and to what.
#ifndef TRAINER_LORA_CONFIG_VERSION_H_
#define TRAINER_LORA_CONFIG_VERSION_H_

#include "config/language_version.h"

// What is incompatible raises it, from 1 on.
#define TRAINER_LORA_VERSION_MAJOR 0
// What is new raises it, and, while the major number is 0, what is
// incompatible.
#define TRAINER_LORA_VERSION_MINOR 1
// What is mended raises it.
#define TRAINER_LORA_VERSION_PATCH 0

namespace trainer_lora::config {

// The same as numbers and as text, such as "0.1.0".
inline constexpr char kVersion[] = "0.1.0";

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_VERSION_H_
