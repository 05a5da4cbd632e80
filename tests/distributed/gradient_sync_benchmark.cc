// What persistent gradient buffers cost without a network: planning them, and
// making their gradients zero.
//
//   bazel run -c opt //tests/distributed:gradient_sync_benchmark
//
// The baselines take turns; the ratios are of medians, and less is better:
//   vs_copy  planning over copying the descriptions that are planned
//   vs_each  zeroing over zeroing as many gradients a tensor at a time
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_bucket.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/process_group.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/take_turns.h"

namespace trainer_lora::distributed {
namespace {

using testutil::BenchmarkDevice;
using testutil::SecondsOnDevice;
using testutil::SecondsOnHost;
using testutil::TakeTurns;

void BM_PlanGradientBuckets(benchmark::State& state) {
  const GradientBucketKey key = {"replicate", "", "Float", 4, "cpu"};
  std::vector<GradientSpec> gradients;
  for (int64_t i = 0; i < state.range(0); ++i) {
    gradients.push_back({absl::StrCat("layer", i, ".lora_A"), 256, key});
  }
  const auto [plan, copy] = TakeTurns(
      state,
      [&] {
        return SecondsOnHost(
            [&] { benchmark::DoNotOptimize(PlanGradientBuckets(gradients)); });
      },
      [&] {
        return SecondsOnHost([&] {
          const std::vector<GradientSpec> copied = gradients;
          benchmark::DoNotOptimize(copied.data());
        });
      });
  state.counters["vs_copy"] = plan / copy;
  state.SetComplexityN(state.range(0));
}
BENCHMARK(BM_PlanGradientBuckets)
    ->ArgName("gradients")
    ->Arg(200)
    ->Arg(2000)
    ->Arg(20000)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond)
    ->Complexity(benchmark::oN);

std::vector<at::Tensor> MakeParameters(int64_t tensors, int64_t floats) {
  std::vector<at::Tensor> parameters;
  for (int64_t i = 0; i < tensors; ++i) {
    parameters.push_back(
        at::zeros({floats}, BenchmarkDevice()).set_requires_grad(true));
  }
  return parameters;
}

absl::StatusOr<std::unique_ptr<GradientSync>> MakeSync(
    const std::vector<at::Tensor>& parameters) {
  ProcessGroupOptions options;
  options.device = BenchmarkDevice();
  auto group = InitProcessGroup(config::LaunchEnvironment(), options);
  if (!group.ok()) return group.status();
  absl::StatusOr<std::shared_ptr<const DeviceMesh>> mesh =
      DeviceMesh::Create(*std::move(group));
  if (!mesh.ok()) return mesh.status();
  std::vector<DistributedParameter> distributed;
  for (size_t i = 0; i < parameters.size(); ++i) {
    distributed.push_back({absl::StrCat("layer", i, ".lora_A"), parameters[i],
                           ParameterLayout::Replicated(*mesh)});
  }
  return GradientSync::Create(*mesh, std::move(distributed));
}

void BM_ZeroGrad(benchmark::State& state) {
  at::set_num_threads(1);
  const std::vector<at::Tensor> parameters =
      MakeParameters(state.range(0), state.range(1));
  const absl::StatusOr<std::unique_ptr<GradientSync>> sync =
      MakeSync(parameters);
  if (!sync.ok()) {
    state.SkipWithError(sync.status().ToString().c_str());
    return;
  }
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    gradients.push_back(at::zeros_like(parameter));
  }
  const auto [zero_grad, each] = TakeTurns(
      state, [&] { return SecondsOnDevice([&] { (*sync)->ZeroGrad(); }); },
      [&] {
        return SecondsOnDevice([&] {
          for (at::Tensor& gradient : gradients) gradient.zero_();
        });
      });
  state.counters["vs_each"] = zero_grad / each;
}
BENCHMARK(BM_ZeroGrad)
    ->ArgNames({"tensors", "floats"})
    ->Args({480, 24576})
    ->Args({20000, 256})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace

}  // namespace trainer_lora::distributed
