// The names of the operators, collectives and ranges that a thread runs, as
// profilers see them:
//
//   const OperatorLog log;
//   layer(input).sum().backward();
//   EXPECT_EQ(log.Count("aten::addmm_"), 1);
//   EXPECT_EQ(log.CountCollectives(), 1);
#ifndef TRAINER_LORA_TESTS_TESTUTIL_OPERATOR_LOG_H_
#define TRAINER_LORA_TESTS_TESTUTIL_OPERATOR_LOG_H_

#include <cstdint>

#include "ATen/record_function.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::testutil {

// Sees what this thread starts from its construction on, in backward passes on
// the CPU too, as these run on the thread that calls them. One at a time lives
// in a thread.
class OperatorLog {
 public:
  OperatorLog();
  ~OperatorLog();
  OperatorLog(const OperatorLog&) = delete;
  OperatorLog& operator=(const OperatorLog&) = delete;

  int64_t Count(absl::string_view name) const;
  int64_t CountCollectives() const;

 private:
  at::CallbackHandle handle_;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_OPERATOR_LOG_H_
