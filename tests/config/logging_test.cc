#include "config/logging.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"

namespace trainer_lora::config {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ExitedWithCode;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::KilledBySignal;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::Truly;
using testutil::LogCapture;

using Variables = std::map<std::string, std::string>;

constexpr int kThreads = 16;

// Variables are read once per process: these tests run their body in a process
// of its own, started afresh, and look at its stderr.
class LoggingProcessTest : public ::testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  static void Set(const Variables& variables) {
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
  }

  static Variables Rank(int rank, int world_size) {
    return {{"RANK", absl::StrCat(rank)},
            {"LOCAL_RANK", absl::StrCat(rank)},
            {"WORLD_SIZE", absl::StrCat(world_size)},
            {"LOCAL_WORLD_SIZE", absl::StrCat(world_size)},
            {"MASTER_ADDR", "localhost"},
            {"MASTER_PORT", "29500"}};
  }

  static void LogAtEveryLevel() {
    const Logger logger = InitLogger("test");
    logger.Debug("a debug line");
    logger.Info("an info line");
    logger.Warning("a warning line");
    logger.Error("an error line");
  }
};

// How often `part` occurs in `text`.
size_t Count(const std::string& text, const std::string& part) {
  return std::vector<std::string>(absl::StrSplit(text, part)).size() - 1;
}

TEST_F(LoggingProcessTest, LineHasTimeLevelAndLogger) {
  EXPECT_EXIT(
      {
        InitLogger("lora").Info("with {} braces {0}");
        std::exit(0);
      },
      ExitedWithCode(0),
      testing::ContainsRegex(
          "^[0-9]+-[0-9]+-[0-9]+ [0-9]+:[0-9]+:[0-9]+\\.[0-9]+ info "
          "lora: with \\{\\} braces \\{0\\}\n$"));
}

TEST_F(LoggingProcessTest, LineNamesTheRankInAJobOfSeveral) {
  EXPECT_EXIT(
      {
        Set(Rank(1, 2));
        InitLogger("lora").Warning("hello");
        std::exit(0);
      },
      ExitedWithCode(0), HasSubstr(" warning [rank 1] lora: hello\n"));
}

TEST_F(LoggingProcessTest, FiltersByRankAndLevel) {
  struct Case {
    const char* name;
    int rank;
    Variables variables;
    // How many of the four levels come through, from the most severe down.
    size_t lines;
  };
  const std::vector<Case> cases = {
      {"rank 0", 0, {}, 3},
      {"rank 1", 1, {}, 2},
      {"rank 1, asked for all ranks",
       1,
       {{"TRAINER_LORA_LOG_ALL_RANKS", "1"}},
       3},
      {"rank 1, all ranks off", 1, {{"TRAINER_LORA_LOG_ALL_RANKS", "0"}}, 2},
      {"rank 0, debug", 0, {{"TRAINER_LORA_LOG_LEVEL", "debug"}}, 4},
      {"rank 1, debug", 1, {{"TRAINER_LORA_LOG_LEVEL", "debug"}}, 2},
      {"rank 1, debug, all ranks",
       1,
       {{"TRAINER_LORA_LOG_LEVEL", "debug"},
        {"TRAINER_LORA_LOG_ALL_RANKS", "1"}},
       4},
      {"rank 0, info", 0, {{"TRAINER_LORA_LOG_LEVEL", "info"}}, 3},
      {"rank 0, warning", 0, {{"TRAINER_LORA_LOG_LEVEL", "warning"}}, 2},
      {"rank 0, error", 0, {{"TRAINER_LORA_LOG_LEVEL", "error"}}, 1},
      {"rank 1, error", 1, {{"TRAINER_LORA_LOG_LEVEL", "error"}}, 1},
  };
  const std::vector<std::string> lines = {"an error line", "a warning line",
                                          "an info line", "a debug line"};
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    EXPECT_EXIT(
        {
          Set(Rank(c.rank, 2));
          Set(c.variables);
          LogAtEveryLevel();
          std::exit(0);
        },
        ExitedWithCode(0), Truly([&](const std::string& output) {
          for (size_t i = 0; i < lines.size(); ++i) {
            if (Count(output, lines[i]) != (i < c.lines ? 1 : 0)) return false;
          }
          return true;
        }));
  }
}

// Local rank, not rank: each host has one voice.
TEST_F(LoggingProcessTest, FirstRankOfTheSecondHostLogsInfo) {
  EXPECT_EXIT(
      {
        Variables variables = Rank(2, 4);
        variables["LOCAL_RANK"] = "0";
        variables["LOCAL_WORLD_SIZE"] = "2";
        Set(variables);
        LogAtEveryLevel();
        std::exit(0);
      },
      ExitedWithCode(0), HasSubstr("info [rank 2] test: an info line\n"));
}

TEST_F(LoggingProcessTest, FilterComesBeforeTheSink) {
  EXPECT_EXIT(
      {
        Set(Rank(1, 2));
        LogCapture logs;
        LogAtEveryLevel();
        const bool filtered = logs.Messages(LogLevel::kInfo).empty() &&
                              logs.Messages(LogLevel::kWarning).size() == 1;
        std::exit(filtered ? 0 : 1);
      },
      ExitedWithCode(0), IsEmpty());
}

TEST_F(LoggingProcessTest, UnknownLevelWarnsAndMeansInfo) {
  EXPECT_EXIT(
      {
        Set({{"TRAINER_LORA_LOG_LEVEL", "loud"}});
        LogAtEveryLevel();
        std::exit(0);
      },
      ExitedWithCode(0),
      AllOf(HasSubstr("warning config: TRAINER_LORA_LOG_LEVEL must be debug, "
                      "info, warning or error, got \"loud\"; using info"),
            HasSubstr("an info line"), Not(HasSubstr("a debug line"))));
}

TEST_F(LoggingProcessTest, BrokenLaunchEnvironmentLogsAsRankZero) {
  EXPECT_EXIT(
      {
        Set({{"RANK", "7"}});
        LogAtEveryLevel();
        std::exit(0);
      },
      ExitedWithCode(0),
      AllOf(HasSubstr("warning config: logging as rank 0: the launcher's "
                      "environment is incomplete: RANK=7 but no WORLD_SIZE"),
            HasSubstr("info test: an info line\n")));
}

// The warning about the level is made by the configuration: one warning, one
// configuration.
TEST_F(LoggingProcessTest, RootIsConfiguredOnceFromManyThreads) {
  EXPECT_EXIT(
      {
        Set({{"TRAINER_LORA_LOG_LEVEL", "loud"}});
        std::vector<std::thread> threads;
        for (int i = 0; i < kThreads; ++i) {
          threads.emplace_back(
              [i] { InitLogger(absl::StrCat("thread", i)).Info("ready"); });
        }
        for (std::thread& thread : threads) thread.join();
        std::exit(0);
      },
      ExitedWithCode(0), Truly([](const std::string& output) {
        return Count(output, "using info") == 1 &&
               Count(output, ": ready\n") == kThreads;
      }));
}

struct LogsWhenDestroyed {
  ~LogsWhenDestroyed() { InitLogger("late").Info("from a static destructor"); }
};

TEST_F(LoggingProcessTest, LosesNoLineAtExit) {
  EXPECT_EXIT(
      {
        static LogsWhenDestroyed late;
        InitLogger("test").Info("first");
        std::exit(0);
      },
      ExitedWithCode(0),
      AllOf(HasSubstr("first\n"), HasSubstr("from a static destructor\n")));
  EXPECT_EXIT(
      {
        InitLogger("test").Info("before _exit");
        _exit(0);
      },
      ExitedWithCode(0), HasSubstr("before _exit\n"));
  EXPECT_EXIT(
      {
        InitLogger("test").Info("before a signal");
        std::raise(SIGKILL);
      },
      KilledBySignal(SIGKILL), HasSubstr("before a signal\n"));
}

TEST(LoggingTest, SinkGetsLevelLoggerAndMessage) {
  LogCapture logs;
  InitLogger("lora").Error("no layer\nof that name");
  ASSERT_THAT(logs.Records(), SizeIs(1));
  EXPECT_EQ(logs.Records()[0].level, LogLevel::kError);
  EXPECT_EQ(logs.Records()[0].logger, "lora");
  EXPECT_EQ(logs.Records()[0].message, "no layer\nof that name");
}

TEST(LoggingTest, SetLogSinkReturnsThePreviousSink) {
  std::vector<std::string> lines;
  EXPECT_EQ(SetLogSink([&](const LogRecord& record) {
              lines.push_back(record.message);
            }),
            nullptr);
  {
    LogCapture inner;
    InitLogger("test").Warning("inner");
    EXPECT_THAT(inner.Messages(LogLevel::kWarning), ElementsAre("inner"));
  }
  InitLogger("test").Warning("outer");
  EXPECT_NE(SetLogSink(nullptr), nullptr);
  EXPECT_THAT(lines, ElementsAre("outer"));
}

TEST(LoggingTest, SinkIsCalledForOneRecordAtATime) {
  constexpr int kLines = 1000;
  std::vector<std::string> lines;  // Guarded by nothing but the promise.
  SetLogSink([&](const LogRecord& record) { lines.push_back(record.message); });
  std::vector<std::string> expected;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    for (int j = 0; j < kLines; ++j)
      expected.push_back(absl::StrCat(i, "/", j));
    threads.emplace_back([i] {
      const Logger logger = InitLogger("test");
      for (int j = 0; j < kLines; ++j) logger.Warning(absl::StrCat(i, "/", j));
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink(nullptr);
  std::sort(lines.begin(), lines.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(lines, expected);
}

}  // namespace
}  // namespace trainer_lora::config
