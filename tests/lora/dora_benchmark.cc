// The norms that DoRA divides by, factored, against those of the dense sum
// weight + scale * lora_B * lora_A:
//
//   bazel run -c opt //tests/lora:dora_benchmark
//
// Both take turns; the reported time is the mean of the factored turns, with
// the norms of the frozen weight known, as in training.
//
//   vs_dense         the factored median time over the dense: less is better
//   vs_dense_first   the same where the norms of the weight are computed too
//   vs_dense_memory  the factored peak of memory over the dense
//   peak_bytes       the factored peak, above what was allocated before
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "c10/core/GradMode.h"
#include "lora/dora.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/take_turns.h"
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

using testutil::SecondsOnDevice;
using Function = at::Tensor (*)(const Case& test);

double Peak(Function function, const Case& test) {
  const testutil::TensorMemory memory;
  function(test);
  return static_cast<double>(memory.peak_bytes());
}

void BM_DoraSquaredNorms(benchmark::State& state, at::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const int64_t width = state.range(0);
  const int64_t rank = state.range(1);
  const at::TensorOptions options =
      at::TensorOptions(testutil::BenchmarkDevice());
  Case test{at::randn({width, width}, options).to(dtype),
            at::randn({rank, width}, options).to(dtype),
            at::randn({width, rank}, options).to(dtype),
            {}};
  test.squared = SquaredRowNorms(test.weight);
  const auto time = [&](Function function) {
    return [&test, function] {
      return SecondsOnDevice([&] { return function(test); });
    };
  };
  const auto [own, first, dense] = testutil::TakeTurns(
      state, time(Factored), time(FactoredFirst), time(Dense));
  const double peak = Peak(Factored, test);
  state.counters["vs_dense"] = own / dense;
  state.counters["vs_dense_first"] = first / dense;
  state.counters["vs_dense_memory"] = peak / Peak(Dense, test);
  state.counters["peak_bytes"] = peak;
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
