// How long it takes to put adapters into a diffusion transformer on the meta
// device: 18 modules a block, of which 8 are targets. tests/parity/injection.py
// does the same with PEFT.
//
// vs_walk: the time over that of one libtorch walk of the same model,
// named_modules(), measured in the same run.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "benchmark/benchmark.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/meta_device.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::lora {
namespace {

constexpr int64_t kWidth = 1536;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    for (const char* name : {"to_q", "to_k", "to_v", "to_out"}) {
      register_module(name, ReplicatedLinear(kWidth, kWidth));
    }
  }
};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    const torch::nn::LayerNormOptions norm({kWidth});
    register_module("norm1", torch::nn::LayerNorm(norm));
    register_module("attn1", std::make_shared<AttentionImpl>());
    register_module("norm2", torch::nn::LayerNorm(norm));
    register_module("attn2", std::make_shared<AttentionImpl>());
    register_module("norm3", torch::nn::LayerNorm(norm));
    register_module(
        "ffn", torch::nn::Sequential(ReplicatedLinear(kWidth, 4 * kWidth),
                                     torch::nn::GELU(),
                                     ReplicatedLinear(4 * kWidth, kWidth)));
  }
};

struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(int64_t blocks_count) {
    auto blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < blocks_count; ++i) {
      blocks->push_back(std::make_shared<BlockImpl>());
    }
  }
};

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 16;
  config.target_modules = {"to_q", "to_k", "to_v", "to_out"};
  return config;
}

template <typename Function>
double SecondsOf(const Function& function) {
  const auto begin = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

void BM_EnableLoraTraining(benchmark::State& state) {
  const config::LogSink previous =
      config::SetLogSink([](const config::LogRecord&) {});
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  double enable_seconds = 0;
  double walk_seconds = 0;
  size_t modules = 0;
  for (auto _ : state) {
    std::shared_ptr<TransformerImpl> model;
    {
      const distributed::MetaDeviceGuard meta_device;
      model = std::make_shared<TransformerImpl>(state.range(0));
    }
    walk_seconds += SecondsOf([&] {
      benchmark::DoNotOptimize(modules = model->named_modules().size());
    });
    absl::Status status;
    const double seconds = SecondsOf([&] {
      status = EnableLoraTraining(*model, Config(), options).status();
    });
    if (!status.ok()) {
      state.SkipWithError(std::string(status.message()).c_str());
      break;
    }
    enable_seconds += seconds;
    state.SetIterationTime(seconds);
  }
  state.counters["modules"] = static_cast<double>(modules);
  state.counters["vs_walk"] = enable_seconds / walk_seconds;
  state.SetComplexityN(state.range(0));
  config::SetLogSink(previous);
}
BENCHMARK(BM_EnableLoraTraining)
    ->ArgName("blocks")
    ->Arg(30)
    ->Arg(95)
    ->Arg(300)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

}  // namespace
}  // namespace trainer_lora::lora
