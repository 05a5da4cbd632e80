// Collects the log records made while it lives, instead of stderr:
//
//   LogCapture logs;
//   Coerce(...);
//   EXPECT_THAT(logs.Messages(LogLevel::kWarning),
//               ElementsAre(HasSubstr("unknown keys")));
#ifndef TRAINER_LORA_TESTS_TESTUTIL_LOG_CAPTURE_H_
#define TRAINER_LORA_TESTS_TESTUTIL_LOG_CAPTURE_H_

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "config/logging.h"

namespace trainer_lora::testutil {

// Safe while other threads log. Nest captures like scopes.
class LogCapture {
 public:
  LogCapture()
      : previous_(config::SetLogSink([this](const config::LogRecord& record) {
          std::lock_guard<std::mutex> lock(mutex_);
          records_.push_back(record);
        })) {}
  ~LogCapture() { config::SetLogSink(std::move(previous_)); }

  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  std::vector<config::LogRecord> Records() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return records_;
  }

  // The messages of one level, in order.
  std::vector<std::string> Messages(config::LogLevel level) const {
    std::vector<std::string> messages;
    for (const config::LogRecord& record : Records()) {
      if (record.level == level) messages.push_back(record.message);
    }
    return messages;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<config::LogRecord> records_;
  config::LogSink previous_;
};

}  // namespace trainer_lora::testutil

#endif  // TRAINER_LORA_TESTS_TESTUTIL_LOG_CAPTURE_H_
