// The message of what a call throws:
//
//   EXPECT_THAT(ErrorOf([&] { layer(input); }), HasSubstr("to_q is merged"));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_ERROR_OF_H_
#define TRAINER_LORA_TESTS_TESTUTIL_ERROR_OF_H_

#include <functional>
#include <string>

#include "c10/util/Exception.h"

namespace trainer_lora::testutil {

// Of the c10::Error that `call` throws; empty if it throws nothing.
inline std::string ErrorOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_ERROR_OF_H_
