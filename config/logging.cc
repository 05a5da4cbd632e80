#include "config/logging.h"

#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "config/launch_environment.h"
#include "spdlog/logger.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace trainer_lora::config {
namespace {

constexpr char kLevelVariable[] = "TRAINER_LORA_LOG_LEVEL";
constexpr char kAllRanksVariable[] = "TRAINER_LORA_LOG_ALL_RANKS";

std::string EnvironmentOr(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value == nullptr ? fallback : value;
}

std::optional<LogLevel> ParseLevel(const std::string& text) {
  if (text == "debug") return LogLevel::kDebug;
  if (text == "info") return LogLevel::kInfo;
  if (text == "warning") return LogLevel::kWarning;
  if (text == "error") return LogLevel::kError;
  return std::nullopt;
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      break;
  }
  return spdlog::level::err;
}

// What all loggers share: the filter and where lines go.
class Root {
 public:
  // Made by the first use and never destroyed, so that static destructors can
  // log too.
  static Root& Get() {
    static Root& root = *new Root;
    return root;
  }

  void Log(LogLevel level, const std::string& logger,
           absl::string_view message) {
    if (level < level_) return;
    if (level < LogLevel::kWarning && !logs_info_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (sink_ != nullptr) {
      sink_({level, logger, std::string(message)});
      return;
    }
    const std::string line = absl::StrCat(rank_prefix_, logger, ": ", message);
    // As a view, so that braces in the message aren't taken for a format.
    stderr_.log(ToSpdlog(level), spdlog::string_view_t(line));
  }

  LogSink SetSink(LogSink sink) {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(sink_, std::move(sink));
  }

 private:
  Root()
      : stderr_("trainer_lora",
                std::make_shared<spdlog::sinks::stderr_sink_st>()) {
    stderr_.set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
    stderr_.set_level(spdlog::level::debug);
    stderr_.flush_on(spdlog::level::debug);

    const absl::StatusOr<LaunchEnvironment> launch = ReadLaunchEnvironment();
    const int local_rank = launch.ok() ? launch->local_rank : 0;
    logs_info_ =
        local_rank == 0 || EnvironmentOr(kAllRanksVariable, "0") == "1";
    if (launch.ok() && launch->world_size > 1) {
      rank_prefix_ = absl::StrCat("[rank ", launch->rank, "] ");
    }
    const std::string level = EnvironmentOr(kLevelVariable, "info");
    level_ = ParseLevel(level).value_or(LogLevel::kInfo);

    if (!launch.ok()) {
      Log(LogLevel::kWarning, "config",
          absl::StrCat("logging as rank 0: ", launch.status().message()));
    }
    if (!ParseLevel(level)) {
      Log(LogLevel::kWarning, "config",
          absl::StrCat(kLevelVariable,
                       " must be debug, info, warning or "
                       "error, got \"",
                       level, "\"; using info"));
    }
  }

  LogLevel level_ = LogLevel::kInfo;
  bool logs_info_ = true;
  std::string rank_prefix_;

  std::mutex mutex_;
  LogSink sink_;           // Guarded by mutex_; null: stderr_.
  spdlog::logger stderr_;  // Guarded by mutex_.
};

}  // namespace

void Logger::Debug(absl::string_view message) const {
  Root::Get().Log(LogLevel::kDebug, name_, message);
}

void Logger::Info(absl::string_view message) const {
  Root::Get().Log(LogLevel::kInfo, name_, message);
}

void Logger::Warning(absl::string_view message) const {
  Root::Get().Log(LogLevel::kWarning, name_, message);
}

void Logger::Error(absl::string_view message) const {
  Root::Get().Log(LogLevel::kError, name_, message);
}

Logger InitLogger(absl::string_view name) {
  Root::Get();
  return Logger(name);
}

LogSink SetLogSink(LogSink sink) {
  return Root::Get().SetSink(std::move(sink));
}

}  // namespace trainer_lora::config
