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

TEST(BenchmarkFlagsTest, MeasuresOnTheCpu) {
  Arguments no_flag({"program", "--benchmark_min_time=0"});
  EXPECT_EQ(TakeDeviceFlag(no_flag.argc, no_flag.argv()), std::nullopt);
  EXPECT_THAT(no_flag.left(), ElementsAre("program", "--benchmark_min_time=0"));
  Arguments cpu({"program", "--device=cpu"});
  EXPECT_EQ(TakeDeviceFlag(cpu.argc, cpu.argv()), std::nullopt);
  EXPECT_THAT(cpu.left(), ElementsAre("program"));
}

TEST(BenchmarkFlagsTest, SucceedsWithOneLineForCuda) {
  Arguments arguments({"program", "--device=cuda"});
  testing::internal::CaptureStdout();
  EXPECT_THAT(TakeDeviceFlag(arguments.argc, arguments.argv()),
              Optional(EXIT_SUCCESS));
  EXPECT_EQ(testing::internal::GetCapturedStdout(),
            "--device=cuda: nothing is measured, as this build has no CUDA\n");
}

TEST(BenchmarkFlagsTest, FailsForAnotherDevice) {
  Arguments arguments({"program", "--device=tpu"});
  testing::internal::CaptureStderr();
  EXPECT_THAT(TakeDeviceFlag(arguments.argc, arguments.argv()),
              Optional(EXIT_FAILURE));
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "--device=tpu: give cpu or cuda\n");
}

}  // namespace
}  // namespace trainer_lora::testutil
