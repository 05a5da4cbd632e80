// A frozen linear layer with an adapter, against the same layer without one and
// against the adapter composed of plain operators, forward and backward:
//
//   bazel run -c opt //tests/lora:lora_matmul_benchmark
//
// and a part of the table with --benchmark_filter=/1536/1024/16/Float: without
// AVX-512, bfloat16 takes hours on a CPU.
//
// The three take turns; each counts with its median. The input requires grad,
// weight and bias are frozen. A name is width (in and out features)/tokens/LoRA
// rank/dtype.
//
//   vs_base          the time of LoraMatmul() over that of the layer without an
//                    adapter: 1.1 is a tenth more
//   vs_plain         over that of the plain composition
//   plain_vs_base    the plain composition over the layer without an adapter
//   flops_vs_base    what the adapter's FLOPs alone would make of vs_base:
//                    1 + 6 N r (in + out) / (4 N in out)
//   saved_bytes      alive between forward and backward beside the input, the
//                    output and the parameters
//   peak_bytes       the peak of what forward and backward allocate
//   plain_saved_bytes, plain_peak_bytes    of the plain composition
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "lora/lora_matmul.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/take_turns.h"
#include "tests/testutil/tensor_memory.h"

namespace trainer_lora::lora {
namespace {

struct Case {
  int64_t width;
  int64_t tokens;
  int64_t lora_rank;
  at::ScalarType dtype;
};

class Layer {
 public:
  explicit Layer(const Case& test)
      : input_(Random({test.tokens, test.width}, test.dtype).requires_grad_()),
        grad_(at::ones_like(input_)),
        term_{Random({test.width, test.width}, test.dtype),
              Random({test.width}, test.dtype),
              Random({test.lora_rank, test.width}, test.dtype).requires_grad_(),
              Random({test.width, test.lora_rank}, test.dtype).requires_grad_(),
              /*scale=*/2} {}

  at::Tensor Base() const {
    return at::linear(input_, term_.weight, term_.bias);
  }
  at::Tensor Plain() const {
    const at::Tensor share =
        at::matmul(at::matmul(input_, term_.lora_A.t()), term_.lora_B.t());
    return Base() + share * term_.scale;
  }
  at::Tensor Fused() const { return LoraMatmul(input_, term_); }

  // `output` of one of the above. Leaves no gradients.
  void Backward(const at::Tensor& output) {
    output.backward(grad_);
    for (at::Tensor* leaf : {&input_, &term_.lora_A, &term_.lora_B}) {
      leaf->mutable_grad() = at::Tensor();
    }
  }

 private:
  static at::Tensor Random(at::IntArrayRef shape, at::ScalarType dtype) {
    return at::randn(shape, testutil::BenchmarkDevice()).mul_(0.02).to(dtype);
  }

  at::Tensor input_, grad_;
  LoraMatmulTerm term_;
};

using Forward = at::Tensor (Layer::*)() const;

struct Memory {
  double saved_bytes;
  double peak_bytes;
};

Memory MemoryOf(Layer& layer, Forward forward) {
  const testutil::TensorMemory memory;
  at::Tensor output = (layer.*forward)();
  const double saved_bytes = memory.bytes() - output.nbytes();
  layer.Backward(output);
  return {saved_bytes, static_cast<double>(memory.peak_bytes())};
}

void BM_LoraMatmul(benchmark::State& state, const Case& test) {
  Layer layer(test);
  const Memory fused_memory = MemoryOf(layer, &Layer::Fused);
  const Memory plain_memory = MemoryOf(layer, &Layer::Plain);
  const auto time = [&](Forward forward) {
    return [&layer, forward] {
      return testutil::SecondsOnDevice(
          [&] { layer.Backward((layer.*forward)()); });
    };
  };
  const auto [fused, base, plain] = testutil::TakeTurns(
      state, time(&Layer::Fused), time(&Layer::Base), time(&Layer::Plain));
  state.counters["vs_base"] = fused / base;
  state.counters["vs_plain"] = fused / plain;
  state.counters["plain_vs_base"] = plain / base;
  state.counters["flops_vs_base"] = 1 + 6.0 * test.lora_rank *
                                            (2 * test.width) /
                                            (4.0 * test.width * test.width);
  state.counters["saved_bytes"] = fused_memory.saved_bytes;
  state.counters["plain_saved_bytes"] = plain_memory.saved_bytes;
  state.counters["peak_bytes"] = fused_memory.peak_bytes;
  state.counters["plain_peak_bytes"] = plain_memory.peak_bytes;
}

void RegisterAll() {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const auto& [width, tokens] :
         std::vector<std::pair<int64_t, int64_t>>{{1536, 256},
                                                  {1536, 1024},
                                                  {1536, 4096},
                                                  {5120, 256},
                                                  {5120, 1024}}) {
      for (const int64_t lora_rank : {8, 16, 64, 128}) {
        const Case test = {width, tokens, lora_rank, dtype};
        benchmark::RegisterBenchmark(
            absl::StrCat("LoraMatmul/", width, "/", tokens, "/", lora_rank, "/",
                         at::toString(dtype))
                .c_str(),
            [test](benchmark::State& state) { BM_LoraMatmul(state, test); })
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
  }
}

const bool kRegistered = (RegisterAll(), true);

}  // namespace
}  // namespace trainer_lora::lora
