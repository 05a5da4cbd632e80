// Reading a trainer's file, from text to checked LoRA settings. In the same run
// yaml-cpp alone loads the same text: `yaml_cpp` is its time, and `ratio` how
// many times as long the whole takes.
//
//   bazel run -c opt //tests/config:lora_config_benchmark

#include <chrono>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "config/logging.h"
#include "config/trainer_config.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// An everyday file of four roles. Bazel starts programs where its files are.
std::string TypicalFile() {
  std::ifstream file("tests/testdata/wan_distillation.yaml");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

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

// Loads and parses in turns, so that both see the same machine.
void Parse(benchmark::State& state, const std::string& text,
           const std::vector<std::string>& overrides = {}) {
  Seconds parse_time(0), load_time(0);
  for (auto _ : state) {
    const auto start = Clock::now();
    {
      const absl::StatusOr<TrainerConfig> config =
          TrainerConfig::Parse(text, "train.yaml", overrides);
      if (!config.ok()) {
        state.SkipWithError(config.status().ToString().c_str());
        return;
      }
    }
    const auto parsed = Clock::now();
    { benchmark::DoNotOptimize(YAML::Load(text)); }
    const auto loaded = Clock::now();
    state.SetIterationTime(Seconds(parsed - start).count());
    parse_time += parsed - start;
    load_time += loaded - parsed;
  }
  state.SetBytesProcessed(static_cast<int64_t>(text.size()) *
                          state.iterations());
  state.SetComplexityN(static_cast<int64_t>(text.size()));
  state.counters["bytes"] = static_cast<double>(text.size());
  state.counters["yaml_cpp"] =
      benchmark::Counter(load_time.count(), benchmark::Counter::kAvgIterations);
  state.counters["ratio"] = parse_time / load_time;
}

void BM_TypicalFile(benchmark::State& state) { Parse(state, TypicalFile()); }
BENCHMARK(BM_TypicalFile)->UseManualTime()->Unit(benchmark::kMicrosecond);

void BM_TypicalFileWithOverrides(benchmark::State& state) {
  Parse(state, TypicalFile(),
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
      TrainerConfig::Parse(TypicalFile(), "train.yaml");
  for (auto _ : state) benchmark::DoNotOptimize(config->ToYaml());
}
BENCHMARK(BM_ToYaml)->Unit(benchmark::kMicrosecond);

// The file has a disabled block, of which each reading logs a line.
const LogSink kNoLog = SetLogSink([](const LogRecord&) {});

}  // namespace
}  // namespace trainer_lora::config
