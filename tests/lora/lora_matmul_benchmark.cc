// A frozen linear layer with an adapter, against the same layer without one and
// against the adapter composed of plain operators, forward and backward:
//
//   bazel run -c opt //tests/lora:lora_matmul_benchmark
//
// and a part of the table with --benchmark_filter=/1536/1024/16/Float: without
// AVX-512, bfloat16 takes hours on a CPU.
//
// The three take turns, as the machine's speed drifts; each counts with its
// median. The input requires grad, weight and bias are frozen. A name is
// width (in and out features)/tokens/LoRA rank/dtype.
//
//   overhead         of LoraMatmul() over the layer without an adapter: 0.1 is
//                    a tenth more time
//   plain_overhead   of the plain composition
//   flop_overhead    what the adapter's FLOPs would cost at the layer's rate:
//                    6 N r (in + out) over 4 N in out
//   saved_bytes      alive between forward and backward beside the input, the
//                    output and the parameters
//   peak_bytes       the peak of what forward and backward allocate
//   plain_saved_bytes, plain_peak_bytes    of the plain composition
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/strings/str_cat.h"
#include "benchmark/benchmark.h"
#include "lora/lora_matmul.h"
#include "tests/testutil/median.h"
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
        grad_(at::ones({test.tokens, test.width}, test.dtype)),
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
    return at::randn(shape).mul_(0.02).to(dtype);
  }

  at::Tensor input_, grad_;
  LoraMatmulTerm term_;
};

using testutil::Median;
using Forward = at::Tensor (Layer::*)() const;

double Time(Layer& layer, Forward forward) {
  const auto begin = std::chrono::steady_clock::now();
  layer.Backward((layer.*forward)());
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
      .count();
}

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
  // Of each turn over the base layer of the same turn.
  std::vector<double> fused, plain;
  for (auto _ : state) {
    const double base = Time(layer, &Layer::Base);
    const double fused_time = Time(layer, &Layer::Fused);
    plain.push_back(Time(layer, &Layer::Plain) / base - 1);
    fused.push_back(fused_time / base - 1);
    state.SetIterationTime(fused_time);
  }
  state.counters["overhead"] = Median(fused);
  state.counters["plain_overhead"] = Median(plain);
  state.counters["flop_overhead"] =
      6.0 * test.lora_rank * (2 * test.width) / (4.0 * test.width * test.width);
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
