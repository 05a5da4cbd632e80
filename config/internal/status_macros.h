// Early returns for functions that return absl::Status or absl::StatusOr.
#ifndef TRAINER_LORA_CONFIG_INTERNAL_STATUS_MACROS_H_
#define TRAINER_LORA_CONFIG_INTERNAL_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Evaluates an expression of type absl::Status and returns it if it is an
// error.
#define LORA_RETURN_IF_ERROR(expression)                                \
  do {                                                                  \
    if (absl::Status lora_status_ = (expression); !lora_status_.ok()) { \
      return lora_status_;                                              \
    }                                                                   \
  } while (false)

// LORA_ASSIGN_OR_RETURN(auto value, F()): returns the error of F(), an
// absl::StatusOr, or assigns its value.
#define LORA_ASSIGN_OR_RETURN(declaration, expression)                       \
  LORA_ASSIGN_OR_RETURN_IMPL_(LORA_STATUS_CONCAT_(lora_statusor_, __LINE__), \
                              declaration, expression)

#define LORA_ASSIGN_OR_RETURN_IMPL_(statusor, declaration, expression) \
  auto statusor = (expression);                                        \
  if (!statusor.ok()) return std::move(statusor).status();             \
  declaration = *std::move(statusor)

#define LORA_STATUS_CONCAT_(a, b) LORA_STATUS_CONCAT_IMPL_(a, b)
#define LORA_STATUS_CONCAT_IMPL_(a, b) a##b

#endif  // TRAINER_LORA_CONFIG_INTERNAL_STATUS_MACROS_H_
