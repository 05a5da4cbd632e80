// Log lines of a training job: one logger a component, one process-wide root.
//
//   const Logger logger = InitLogger("lora");
//   logger.Info("Enabled LoRA training on 12 layers");
//   logger.Warning("target \"to_qq\" matched no layer");
//
// A line on stderr has time, level, rank (in a job of several) and logger:
//
//   2026-01-31 12:00:00.000 info [rank 0] lora: Enabled LoRA training on 12 ...
//
// DEBUG and INFO come from local rank 0 alone, WARNING and ERROR from every
// rank. Two environment variables, read once, change that:
//   TRAINER_LORA_LOG_LEVEL      debug, info (the default), warning or error
//   TRAINER_LORA_LOG_ALL_RANKS  1: DEBUG and INFO from every rank
#ifndef TRAINER_LORA_CONFIG_LOGGING_H_
#define TRAINER_LORA_CONFIG_LOGGING_H_

#include <functional>
#include <string>

#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace trainer_lora::config {

// From the least to the most important.
enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Cheap to copy, safe to use from any thread at any time, static destructors
// included. A line is written and flushed before the call returns.
class Logger {
 public:
  // For whoever looks for a fault: not written unless asked for.
  void Debug(absl::string_view message) const;
  // What a run does.
  void Info(absl::string_view message) const;
  // What is hardly meant so, with which the run goes on.
  void Warning(absl::string_view message) const;
  // What failed.
  void Error(absl::string_view message) const;

 private:
  friend Logger InitLogger(absl::string_view name);
  explicit Logger(absl::string_view name) : name_(name) {}

  std::string name_;
};

// Returns the logger called `name`. The first call, from whatever thread,
// configures the root; it never fails: a broken launch environment counts as
// rank 0, an unknown level as info, each with one warning.
Logger InitLogger(absl::string_view name);

// A line, without what stderr shows before it.
struct LogRecord {
  // The level that it was logged at.
  LogLevel level;
  // The name that InitLogger() got.
  std::string logger;
  // The text.
  std::string message;
};

// Takes log lines; see SetLogSink().
using LogSink = std::function<void(const LogRecord&)>;

// Sends the lines that pass level and rank to `sink` and no longer to stderr;
// null means stderr again. Returns the sink before (null for stderr), which is
// not called any more once this returns. A sink is called for one record at a
// time, under a lock: it must not log, set a sink or throw.
LogSink SetLogSink(LogSink sink);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_LOGGING_H_
