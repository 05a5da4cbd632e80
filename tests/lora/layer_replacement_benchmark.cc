// Putting adapters into a diffusion transformer, 18 modules a block, of which 8
// are targets:
//
//   bazel run -c opt //tests/lora:layer_replacement_benchmark
//
// BM_EnableLoraTraining does it on the meta device, on the host alone, as
// tests/parity/injection_speed.py does with PEFT; BM_EnableOnDevice on a model
// in the memory of a device, where adapters get their initial values at once.
// The model is made anew for each turn, untimed.
//
//   vs_walk      the median time over that of one libtorch walk of the same
//                model, named_modules(), which takes turns with it
//   vs_uniform   that over the time of at::uniform_ and at::zeros for as many
//                parameters on the device
//
// Less is better.
#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "benchmark/benchmark.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/meta_device.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/take_turns.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::lora {
namespace {

using testutil::BenchmarkDevice;
using testutil::SecondsOnDevice;
using testutil::SecondsOnHost;
using testutil::TakeTurns;

constexpr int64_t kWidth = 1536;
constexpr int64_t kLoraRank = 16;
constexpr int64_t kTargetsOfBlock = 8;

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
  config.rank = kLoraRank;
  config.target_modules = {"to_q", "to_k", "to_v", "to_out"};
  return config;
}

std::shared_ptr<TransformerImpl> MetaModel(int64_t blocks) {
  const distributed::MetaDeviceGuard meta_device;
  return std::make_shared<TransformerImpl>(blocks);
}

// Its memory is not written to.
absl::StatusOr<std::shared_ptr<TransformerImpl>> ModelOnDevice(int64_t blocks) {
  std::shared_ptr<TransformerImpl> model = MetaModel(blocks);
  for (const at::Tensor& parameter : model->parameters()) {
    const absl::Status status = distributed::MaterializeInPlace(
        parameter, at::empty(parameter.sizes(), BenchmarkDevice()));
    if (!status.ok()) return status;
  }
  return model;
}

void Skip(benchmark::State& state, const absl::Status& status) {
  state.SkipWithError(status.ToString().c_str());
}

void BM_EnableLoraTraining(benchmark::State& state) {
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  size_t modules = 0;
  const auto [enable, walk] = TakeTurns(
      state,
      [&] {
        const auto model = MetaModel(state.range(0));
        absl::Status status;
        const double seconds = SecondsOnHost([&] {
          status = EnableLoraTraining(*model, Config(), options).status();
        });
        if (!status.ok()) Skip(state, status);
        return seconds;
      },
      [&] {
        const auto model = MetaModel(state.range(0));
        return SecondsOnHost([&] {
          benchmark::DoNotOptimize(modules = model->named_modules().size());
        });
      });
  state.counters["modules"] = static_cast<double>(modules);
  state.counters["vs_walk"] = enable / walk;
  state.SetComplexityN(state.range(0));
}
BENCHMARK(BM_EnableLoraTraining)
    ->ArgName("blocks")
    ->Arg(30)
    ->Arg(95)
    ->Arg(300)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond)
    ->Complexity(benchmark::oN);

void BM_EnableOnDevice(benchmark::State& state) {
  const auto [enable, uniform] = TakeTurns(
      state,
      [&] {
        const auto model = ModelOnDevice(state.range(0));
        if (!model.ok()) {
          Skip(state, model.status());
          return 0.0;
        }
        absl::Status status;
        const double seconds = SecondsOnDevice(
            [&] { status = EnableLoraTraining(**model, Config()).status(); });
        if (!status.ok()) Skip(state, status);
        return seconds;
      },
      [&] {
        return SecondsOnDevice([&] {
          for (int64_t i = 0; i < kTargetsOfBlock * state.range(0); ++i) {
            at::empty({kLoraRank, kWidth}, BenchmarkDevice()).uniform_(-1, 1);
            at::zeros({kWidth, kLoraRank}, BenchmarkDevice());
          }
        });
      });
  state.counters["vs_uniform"] = enable / uniform;
}
BENCHMARK(BM_EnableOnDevice)
    ->ArgName("blocks")
    ->Arg(30)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// Each turn logs what it adapted.
const config::LogSink kNoLog =
    config::SetLogSink([](const config::LogRecord&) {});

}  // namespace
}  // namespace trainer_lora::lora
