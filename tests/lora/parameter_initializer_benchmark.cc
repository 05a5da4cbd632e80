// Making the initial value of a lora_A on a device, against at::empty with
// at::uniform_ (by default) or at::normal_ (gaussian) for as many elements of
// the same type there:
//
//   bazel run -c opt //tests/lora:parameter_initializer_benchmark
//
// Both take turns; the reported time is the mean of the initializer's turns,
// with the copy to the device if that is not the CPU.
//
//   vs_uniform, vs_normal  the initializer's median time over the baseline's:
//                          less is better
//   bytes_per_second       of the slice that is made
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "config/lora_config.h"
#include "lora/parameter_initializer.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/take_turns.h"

namespace trainer_lora::lora {
namespace {

using config::AdapterInitialization;
using distributed::TensorSlice;
using testutil::BenchmarkDevice;

struct Case {
  std::string name;
  AdapterInitialization kind;
  at::ScalarType dtype;
  std::vector<int64_t> shape;  // [rank, in_features]
  TensorSlice slice;
};

at::Tensor Draw(const Case& test) {
  const LoraInitialization initialization{/*seed=*/42, /*scope=*/"", test.kind};
  return InitialLoraValue(initialization, "to_q.lora_A", test.shape, test.dtype,
                          test.slice)
      .to(BenchmarkDevice());
}

at::Tensor DrawBaseline(const Case& test) {
  at::Tensor value = at::empty(test.slice.sizes,
                               at::dtype(test.dtype).device(BenchmarkDevice()));
  if (test.kind == AdapterInitialization::kGaussian) {
    return value.normal_(0, 1 / static_cast<double>(test.shape[0]));
  }
  const double bound = 1 / std::sqrt(static_cast<double>(test.shape[1]));
  return value.uniform_(-bound, bound);
}

void BM_InitialLoraValue(benchmark::State& state, const Case& test) {
  const auto [own, baseline] = testutil::TakeTurns(
      state,
      [&] { return testutil::SecondsOnDevice([&] { return Draw(test); }); },
      [&] {
        return testutil::SecondsOnDevice([&] { return DrawBaseline(test); });
      });
  const bool gaussian = test.kind == AdapterInitialization::kGaussian;
  state.counters[gaussian ? "vs_normal" : "vs_uniform"] = own / baseline;
  int64_t bytes = at::elementSize(test.dtype);
  for (const int64_t size : test.slice.sizes) bytes *= size;
  state.SetBytesProcessed(state.iterations() * bytes);
}

void Register(const Case& test) {
  benchmark::RegisterBenchmark(
      absl::StrCat("InitialLoraValue/", test.name, "/",
                   at::toString(test.dtype))
          .c_str(),
      [test](benchmark::State& state) { BM_InitialLoraValue(state, test); })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

void RegisterAll() {
  for (const auto kind :
       {AdapterInitialization::kDefault, AdapterInitialization::kGaussian}) {
    const char* const kind_name =
        kind == AdapterInitialization::kDefault ? "default" : "gaussian";
    const auto add = [&](const std::vector<int64_t>& shape,
                         const TensorSlice& slice, absl::string_view suffix) {
      const std::string name = absl::StrCat(kind_name, "/", shape[0], "x",
                                            shape[1], std::string(suffix));
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        Register({name, kind, dtype, shape, slice});
      }
    };
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{16, 1536}, {64, 5120}, {128, 16384}}) {
      add(shape, TensorSlice::Whole(shape), "");
    }
    // What the second of eight ranks has under Shard(1).
    add({128, 16384}, {{0, 2048}, {128, 2048}}, "/shard1_of_8");
  }
}

const bool kRegistered = (RegisterAll(), true);

}  // namespace
}  // namespace trainer_lora::lora
