// The example's program as a user runs it: ranks as processes, signals, errors.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/runfiles.h"

namespace trainer_lora::examples {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

namespace fs = std::filesystem;

struct Result {
  int exit_code;
  std::string output;  // stdout and stderr
};

// Runs the program; sends it SIGINT when a line of its output contains
// `interrupt_at`, unless that is empty.
Result Train(const std::vector<std::string>& flags,
             const std::string& interrupt_at = "") {
  const std::string program =
      testutil::RunfilePath("trainer_lora/examples/sentence_encoder/train");
  std::vector<std::string> arguments = {program};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);

  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  close(ends[1]);
  Result result;
  std::FILE* output = fdopen(ends[0], "r");
  char line[4096];
  bool interrupted = interrupt_at.empty();
  while (std::fgets(line, sizeof(line), output) != nullptr) {
    result.output += line;
    if (!interrupted && absl::StrContains(line, interrupt_at)) {
      interrupted = true;
      kill(child, SIGINT);
    }
  }
  std::fclose(output);
  int status = 0;
  waitpid(child, &status, 0);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

std::string TempPath(const std::string& name) {
  const std::string path = testing::TempDir() + "train_test_" + name;
  fs::remove_all(path);
  return path;
}

std::string SmallConfig(const std::string& name, int steps) {
  const std::string path = TempPath(name);
  std::ofstream(path) << "models: {student: {lora: {enable: true, rank: 4, "
                         "target_modules: [query, value]}}}\n"
                         "training: {held_out: 10, batch_size: 4, steps: "
                      << steps << "}\n";
  return path;
}

TEST(TrainTest, TwoRanksTrainAndLeaveAnAdapter) {
  const std::string folder = TempPath("adapter");
  const Result result =
      Train({"--config=" + SmallConfig("two.yaml", 2), "--output=" + folder});
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(
      result.output,
      AllOf(ContainsRegex(
                "student +12 \\(12 of rank 4\\) +22,602,240 +36,864 +0.16 %"),
            ContainsRegex("held-out before: recall@1 [0-9.]+, MRR [0-9.]+"),
            ContainsRegex("step 2/2  loss [0-9.]+  grad norm [0-9.]+  [0-9.]+ "
                          "examples/s  0:00 left"),
            ContainsRegex("held-out after: recall@1 [0-9.]+, MRR [0-9.]+"),
            HasSubstr("PeftModel.from_pretrained(base, \"" + folder + "\")")));
  EXPECT_TRUE(fs::exists(folder + "/adapter_model.safetensors"));
  EXPECT_TRUE(fs::exists(folder + "/adapter_config.json"));
}

TEST(TrainTest, AnInterruptStopsAllRanksAndSaves) {
  const std::string folder = TempPath("interrupted");
  const Result result = Train(
      {"--config=" + SmallConfig("long.yaml", 100000), "--output=" + folder},
      /*interrupt_at=*/"step 1/");
  EXPECT_EQ(result.exit_code, 0) << result.output;
  EXPECT_THAT(result.output, HasSubstr("interrupted after step "));
  EXPECT_TRUE(fs::exists(folder + "/adapter_model.safetensors"));
}

TEST(TrainTest, HelpSaysHowToRunIt) {
  EXPECT_THAT(
      Train({"--help"}).output,
      AllOf(HasSubstr("--nproc"), HasSubstr("--steps"), HasSubstr("--config"),
            HasSubstr("--output"), HasSubstr("torchrun")));
}

TEST(TrainTest, MistakesAreOneClearLine) {
  const std::string taken = TempPath("taken");
  fs::create_directory(taken);
  const std::string bad_yaml = TempPath("bad.yaml");
  std::ofstream(bad_yaml) << "models: {student: {lora: {enable: true, rank: "
                             "16.7}}}\n";
  const std::string long_name = TempPath("") + std::string(300, 'x');
  const std::string read_only = TempPath("read_only");
  fs::create_directory(read_only);
  fs::permissions(read_only, fs::perms::owner_read | fs::perms::owner_exec);
  struct Case {
    std::vector<std::string> flags;
    std::string message;
  };
  std::vector<Case> cases = {
      {{"--config=nowhere.yaml"}, "nowhere.yaml"},
      {{"--config=" + bad_yaml},
       bad_yaml + ":1:47: models.student.lora.rank must be a positive "
                  "integer, got 16.7"},
      {{"--output=" + taken}, taken + " exists"},
      {{"--output=" + taken + "/"}, taken + " exists"},
      {{"--output=" + taken + "/none/adapter/"},
       taken + "/none is not a folder: create it, or choose another "
               "folder with --output"},
      {{"--output=" + bad_yaml + "/adapter"}, bad_yaml + " is not a folder"},
      {{"--output=" + long_name},
       long_name + " can't be written: choose another folder"},
      {{"--steps=-1"}, "--steps must not be negative, got -1"},
      {{"--nproc=0"}, "--nproc must be at least 1, got 0"},
      {{"extra"}, "takes flags only"},
  };
  // Root may write anywhere.
  if (access(read_only.c_str(), W_OK) != 0) {
    cases.push_back({{"--output=" + read_only + "/adapter"},
                     read_only + " can't be written: choose another folder "
                                 "with --output: Permission denied"});
  }
  for (const Case& test : cases) {
    const Result result = Train(test.flags);
    EXPECT_EQ(result.exit_code, 1) << test.message;
    EXPECT_THAT(result.output, HasSubstr(test.message));
    EXPECT_EQ(result.output.find('\n'), result.output.size() - 1)
        << result.output;
  }
  EXPECT_TRUE(fs::is_empty(taken));
}

}  // namespace
}  // namespace trainer_lora::examples
