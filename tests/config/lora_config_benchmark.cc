// Reading a trainer's file, from text to checked LoRA settings, and writing it
// again:
//
//   bazel run -c opt //tests/config:lora_config_benchmark
//
// yaml-cpp alone takes turns with it, loading or writing the same text.
//
//   yaml_cpp     the median seconds of yaml-cpp alone
//   vs_yaml_cpp  the median time over that: less is better
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "config/logging.h"
#include "config/trainer_config.h"
#include "tests/testutil/take_turns.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using testutil::SecondsOnHost;
using testutil::TakeTurns;

// An everyday file of four roles.
constexpr char kTypicalFile[] =
#include "tests/config/wan_distillation.inc"
    ;

// 1000 roles have about 220 kB.
std::string FileOfRoles(int roles) {
  std::string text = "models:\n";
  for (int i = 0; i < roles; ++i) {
    absl::StrAppend(&text, "  expert_", i, ":\n",
                    "    _target_: trainer.models.wan.WanModel\n"
                    "    init_from: checkpoints/wan-1.3b\n"
                    "    trainable: true\n"
                    "    lora:\n"
                    "      enable: true\n"
                    "      rank: 16\n"
                    "      alpha: 32\n"
                    "      target_modules: [to_q, to_k, to_v, to_out]\n");
  }
  return text;
}

std::string FileOfPatterns(int patterns) {
  std::string text =
      "models:\n  student:\n    lora:\n      enable: true\n      rank: 16\n"
      "      rank_pattern:\n";
  for (int i = 0; i < patterns; ++i) {
    absl::StrAppend(&text, "        blocks.", i, ".attn.to_q: 8\n");
  }
  return text;
}

void Parse(benchmark::State& state, const std::string& text,
           const std::vector<std::string>& overrides = {}) {
  const auto [parse, yaml_cpp] = TakeTurns(
      state,
      [&] {
        return SecondsOnHost([&] {
          const absl::StatusOr<TrainerConfig> config =
              TrainerConfig::Parse(text, "train.yaml", overrides);
          if (!config.ok()) {
            state.SkipWithError(config.status().ToString().c_str());
          }
        });
      },
      [&] {
        return SecondsOnHost(
            [&] { benchmark::DoNotOptimize(YAML::Load(text)); });
      });
  state.SetBytesProcessed(static_cast<int64_t>(text.size()) *
                          state.iterations());
  state.SetComplexityN(static_cast<int64_t>(text.size()));
  state.counters["bytes"] = static_cast<double>(text.size());
  state.counters["yaml_cpp"] = yaml_cpp;
  state.counters["vs_yaml_cpp"] = parse / yaml_cpp;
}

void BM_TypicalFile(benchmark::State& state) { Parse(state, kTypicalFile); }
BENCHMARK(BM_TypicalFile)->UseManualTime()->Unit(benchmark::kMicrosecond);

void BM_TypicalFileWithOverrides(benchmark::State& state) {
  Parse(state, kTypicalFile,
        {"models.student.lora.rank=16", "models.critic.lora.rank=8",
         "training.optimizer.learning_rate=1e-5"});
}
BENCHMARK(BM_TypicalFileWithOverrides)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// The last is a file of 1 MB.
void BM_Roles(benchmark::State& state) {
  Parse(state, FileOfRoles(static_cast<int>(state.range(0))));
}
BENCHMARK(BM_Roles)
    ->Arg(1)
    ->Arg(10)
    ->Arg(100)
    ->Arg(1000)
    ->Arg(4600)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

void BM_RankPatterns(benchmark::State& state) {
  Parse(state, FileOfPatterns(static_cast<int>(state.range(0))));
}
BENCHMARK(BM_RankPatterns)
    ->Arg(100)
    ->Arg(1000)
    ->Arg(10000)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

void BM_ToYaml(benchmark::State& state) {
  const absl::StatusOr<TrainerConfig> config =
      TrainerConfig::Parse(kTypicalFile, "train.yaml");
  if (!config.ok()) {
    state.SkipWithError(config.status().ToString().c_str());
    return;
  }
  const YAML::Node node = YAML::Load(kTypicalFile);
  const auto [write, yaml_cpp] = TakeTurns(
      state,
      [&] {
        return SecondsOnHost(
            [&] { benchmark::DoNotOptimize(config->ToYaml()); });
      },
      [&] {
        return SecondsOnHost(
            [&] { benchmark::DoNotOptimize(YAML::Dump(node)); });
      });
  state.counters["yaml_cpp"] = yaml_cpp;
  state.counters["vs_yaml_cpp"] = write / yaml_cpp;
}
BENCHMARK(BM_ToYaml)->UseManualTime()->Unit(benchmark::kMicrosecond);

// The file has a disabled block, of which each reading logs a line.
const LogSink kNoLog = SetLogSink([](const LogRecord&) {});

}  // namespace
}  // namespace trainer_lora::config
