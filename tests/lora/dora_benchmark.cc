// The norms that DoRA divides by, factored, against those of the dense sum
// weight + scale * lora_B * lora_A:
//
//   bazel run -c opt //tests/lora:dora_benchmark
//
// Both take turns; the reported time is the mean of the factored turns, with
// the norms of the frozen weight known, as in training.
//
//   ratio             the dense median time over the factored: more is better
//   ratio_first       the same where the norms of the weight are computed too
//   peak_ratio        the dense peak of memory over the factored
//   peak_bytes        the factored peak, above what was allocated before
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "c10/core/GradMode.h"
#include "lora/dora.h"
#include "tests/testutil/median.h"
#include "tests/testutil/tensor_memory.h"

namespace trainer_lora::lora {
namespace {

constexpr double kScale = 2;

struct Case {
  at::Tensor weight;
  at::Tensor a;
  at::Tensor b;
  at::Tensor squared;
};

at::Tensor Dense(const Case& test) {
  return at::linalg_vector_norm(
             test.weight + kScale * at::matmul(test.b, test.a), 2,
             at::IntArrayRef({1}), false, at::kFloat)
      .square_();
}

at::Tensor Factored(const Case& test) {
  return DoraSquaredNorms(test.weight, test.a, test.b, kScale, test.squared);
}

at::Tensor FactoredFirst(const Case& test) {
  return DoraSquaredNorms(test.weight, test.a, test.b, kScale);
}

using testutil::Median;
using Function = at::Tensor (*)(const Case& test);

double Time(Function function, const Case& test) {
  const auto begin = std::chrono::steady_clock::now();
  const at::Tensor norms = function(test);
  benchmark::DoNotOptimize(norms.const_data_ptr());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

double Peak(Function function, const Case& test) {
  const testutil::TensorMemory memory;
  function(test);
  return static_cast<double>(memory.peak_bytes());
}

void BM_DoraSquaredNorms(benchmark::State& state, at::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const int64_t width = state.range(0);
  const int64_t rank = state.range(1);
  Case test{at::randn({width, width}).to(dtype),
            at::randn({rank, width}).to(dtype),
            at::randn({width, rank}).to(dtype),
            {}};
  test.squared = SquaredRowNorms(test.weight);
  std::vector<double> own, first, dense;
  for (auto _ : state) {
    own.push_back(Time(Factored, test));
    first.push_back(Time(FactoredFirst, test));
    dense.push_back(Time(Dense, test));
    state.SetIterationTime(own.back());
  }
  state.counters["ratio"] = Median(dense) / Median(own);
  state.counters["ratio_first"] = Median(dense) / Median(first);
  state.counters["peak_bytes"] = Peak(Factored, test);
  state.counters["peak_ratio"] = Peak(Dense, test) / Peak(Factored, test);
}

void RegisterAll() {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    benchmark::RegisterBenchmark(
        absl::StrCat("DoraSquaredNorms/", at::toString(dtype)).c_str(),
        [dtype](benchmark::State& state) { BM_DoraSquaredNorms(state, dtype); })
        ->ArgNames({"width", "rank"})
        ->ArgsProduct({{256, 1536, 5120}, {16, 64}})
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond);
  }
}

const bool kRegistered = (RegisterAll(), true);

}  // namespace
}  // namespace trainer_lora::lora
