#include "tests/testutil/benchmark_flags.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace trainer_lora::testutil {
namespace {

using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::Optional;

// The arguments of a main(), which may change them.
struct Arguments {
  explicit Arguments(std::vector<std::string> given)
      : texts(std::move(given)), argc(static_cast<int>(texts.size())) {
    for (std::string& text : texts) pointers.push_back(text.data());
    pointers.push_back(nullptr);
  }

  // Those that are left; a null pointer ends them.
  std::vector<std::string> left() const {
    EXPECT_EQ(pointers[argc], nullptr);
    return std::vector<std::string>(pointers.begin(), pointers.begin() + argc);
  }

  char** argv() { return pointers.data(); }

  std::vector<std::string> texts;
  std::vector<char*> pointers;
  int argc;
};

TEST(BenchmarkFlagsTest, TakesAFlagOutOfTheArguments) {
  Arguments arguments({"program", "--a=1", "--rounds=3", "--b"});
  EXPECT_THAT(TakeFlag(arguments.argc, arguments.argv(), "rounds"),
              Optional(Eq("3")));
  EXPECT_THAT(arguments.left(), ElementsAre("program", "--a=1", "--b"));
  EXPECT_EQ(TakeFlag(arguments.argc, arguments.argv(), "b"), std::nullopt);
  EXPECT_EQ(TakeFlag(arguments.argc, arguments.argv(), "program"),
            std::nullopt);
  EXPECT_THAT(arguments.left(), ElementsAre("program", "--a=1", "--b"));
}

TEST(BenchmarkFlagsTest, TakesTheDevice) {
  Arguments no_flag({"program", "--benchmark_min_time=0"});
  EXPECT_EQ(TakeDeviceFlag(no_flag.argc, no_flag.argv()), "cpu");
  EXPECT_THAT(no_flag.left(), ElementsAre("program", "--benchmark_min_time=0"));
  for (const char* const device : {"cpu", "cuda"}) {
    Arguments arguments({"program", std::string("--device=") + device});
    EXPECT_EQ(TakeDeviceFlag(arguments.argc, arguments.argv()), device);
    EXPECT_THAT(arguments.left(), ElementsAre("program"));
  }
}

TEST(BenchmarkFlagsTest, FailsForAnotherDevice) {
  Arguments arguments({"program", "--device=tpu"});
  EXPECT_EXIT(TakeDeviceFlag(arguments.argc, arguments.argv()),
              testing::ExitedWithCode(EXIT_FAILURE),
              "^--device=tpu: give cpu or cuda\n$");
}

}  // namespace
}  // namespace trainer_lora::testutil
