// GoogleTest matchers for absl::Status and absl::StatusOr:
//
//   EXPECT_THAT(Finalize(model), IsOk());
//   EXPECT_THAT(Load(path), StatusIs(absl::StatusCode::kNotFound,
//                                    HasSubstr("train.yaml")));
//   LORA_ASSERT_OK_AND_ASSIGN(auto config, Load(path));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_STATUS_MATCHERS_H_
#define TRAINER_LORA_TESTS_TESTUTIL_STATUS_MATCHERS_H_

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {

inline const absl::Status& GetStatus(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& GetStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

MATCHER(IsOk, "is OK") {
  *result_listener << GetStatus(arg).ToString();
  return GetStatus(arg).ok();
}

MATCHER_P2(StatusIs, code, message_matcher,
           "has status " + absl::StatusCodeToString(code) +
               " and a message that matches") {
  *result_listener << GetStatus(arg).ToString();
  return GetStatus(arg).code() == code &&
         testing::Matches(message_matcher)(
             std::string(GetStatus(arg).message()));
}

}  // namespace trainer_lora::testutil

#define LORA_ASSERT_OK_AND_ASSIGN(declaration, expression)                   \
  LORA_ASSERT_OK_AND_ASSIGN_IMPL_(LORA_TEST_CONCAT_(lora_result_, __LINE__), \
                                  declaration, expression)
#define LORA_ASSERT_OK_AND_ASSIGN_IMPL_(result, declaration, expression) \
  auto result = (expression);                                            \
  ASSERT_TRUE(result.ok()) << result.status();                           \
  declaration = *std::move(result)
#define LORA_TEST_CONCAT_(a, b) LORA_TEST_CONCAT_IMPL_(a, b)
#define LORA_TEST_CONCAT_IMPL_(a, b) a##b

#endif  // TRAINER_LORA_TESTS_TESTUTIL_STATUS_MATCHERS_H_
