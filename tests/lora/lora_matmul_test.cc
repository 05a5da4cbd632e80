#include "lora/lora_matmul.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/autocast_scope.h"
#include "tests/testutil/gradcheck.h"
#include "tests/testutil/operator_log.h"
#include "tests/testutil/tensor_memory.h"
#include "torch/csrc/autograd/autograd.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using ::trainer_lora::testutil::AutocastScope;
using ::trainer_lora::testutil::GradCheck;
using ::trainer_lora::testutil::GradGradCheck;
using ::trainer_lora::testutil::OperatorLog;
using ::trainer_lora::testutil::TensorFunction;
using ::trainer_lora::testutil::TensorMemory;

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kIn = 3;
constexpr int64_t kOut = 4;
constexpr int64_t kRank = 2;
// Few rows take two small GEMMs, many the sum W + scale B A.
constexpr int64_t kFewRows = 2;
constexpr int64_t kManyRows = 8;

at::Tensor Random(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return (at::rand(shape, at::kDouble) * 2 - 1).to(dtype);
}

// A frozen layer, and an adapter that requires grad.
LoraMatmulTerm RandomTerm(int64_t in_features, int64_t out_features,
                          int64_t rank, at::ScalarType dtype = at::kDouble) {
  return {Random({out_features, in_features}, dtype),
          Random({out_features}, dtype),
          Random({rank, in_features}, dtype).requires_grad_(),
          Random({out_features, rank}, dtype).requires_grad_(),
          /*scale=*/1.5};
}

Tensors TensorsOf(const at::Tensor& input, const LoraMatmulTerm& term) {
  return {input, term.weight, term.bias, term.lora_A, term.lora_B};
}

// The term with other tensors.
LoraMatmulTerm WithTensors(LoraMatmulTerm term, const Tensors& tensors) {
  term.weight = tensors[1];
  term.bias = tensors[2];
  term.lora_A = tensors[3];
  term.lora_B = tensors[4];
  return term;
}

// The oracle: plain operators.
at::Tensor Composed(const at::Tensor& input, const LoraMatmulTerm& term) {
  const at::Tensor share =
      at::linear(at::linear(input, term.lora_A.to(input.scalar_type())),
                 term.lora_B.to(input.scalar_type()));
  return at::linear(input, term.weight, term.bias) + share * term.scale;
}

// The gradients of `inputs` that require grad, for a gradient of `output` that
// depends on its shape alone.
Tensors GradientsOf(const at::Tensor& output, const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) leaves.push_back(input);
  }
  const at::Tensor grad =
      at::linspace(-1, 1, output.numel(), at::kDouble).view(output.sizes());
  return torch::autograd::grad({output}, leaves,
                               {grad.to(output.scalar_type())});
}

// Compares dtypes, and norms of the differences.
void ExpectAllClose(const Tensors& actual, const Tensors& expected,
                    double tolerance = 1e-12) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << i;
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes()) << i;
    const at::Tensor wanted = expected[i].to(at::kDouble);
    const at::Tensor difference = actual[i].to(at::kDouble) - wanted;
    EXPECT_LE(difference.norm().item<double>(),
              tolerance * wanted.norm().item<double>())
        << i;
  }
}

// What bfloat16 rounds, over what it rounds it to.
constexpr double kBfloat16Tolerance = 1e-2;

int64_t Gemms(const OperatorLog& log) {
  return log.Count("aten::mm") + log.Count("aten::addmm") +
         log.Count("aten::addmm_");
}

// --- Values and gradients ----------------------------------------------------

TEST(LoraMatmulTest, IsThePlainComposition) {
  for (const std::vector<int64_t>& rows : std::vector<std::vector<int64_t>>{
           {}, {kFewRows}, {kManyRows}, {2, 1, kFewRows}, {0}, {2, 0}}) {
    for (const bool with_bias : {true, false}) {
      for (const int64_t rank : {int64_t{1}, kRank, 2 * kOut}) {
        std::vector<int64_t> shape = rows;
        shape.push_back(kIn);
        SCOPED_TRACE(::testing::Message() << "input " << shape << " bias "
                                          << with_bias << " rank " << rank);
        const at::Tensor input = Random(shape).requires_grad_();
        LoraMatmulTerm term = RandomTerm(kIn, kOut, rank);
        if (!with_bias) term.bias = at::Tensor();
        const at::Tensor output = LoraMatmul(input, term);
        const at::Tensor expected = Composed(input, term);
        ExpectAllClose({output}, {expected});
        ExpectAllClose(GradientsOf(output, TensorsOf(input, term)),
                       GradientsOf(expected, TensorsOf(input, term)));
      }
    }
  }
}

TEST(LoraMatmulTest, TakesTensorsThatAreNotContiguous) {
  for (const int64_t rows : {kFewRows, kManyRows}) {
    LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
    term.weight = Random({kIn, 2 * kOut}).t().slice(0, 0, 2 * kOut, 2);
    term.lora_A = Random({kIn, kRank}).t().requires_grad_();
    for (const at::Tensor& input :
         {Random({kIn, rows}).t(), Random({rows, 2 * kIn}).slice(1, 1, kIn + 1),
          Random({kIn}).expand({rows, kIn}),
          Random({kIn, 2, rows}).permute({1, 2, 0})}) {
      input.requires_grad_();
      const at::Tensor output = LoraMatmul(input, term);
      ExpectAllClose({output}, {Composed(input, term)});
      ExpectAllClose(
          GradientsOf(output, TensorsOf(input, term)),
          GradientsOf(Composed(input, term), TensorsOf(input, term)));
      // The gradient of a sum is expanded.
      ExpectAllClose(torch::autograd::grad({LoraMatmul(input, term).sum()},
                                           {input, term.lora_B}),
                     torch::autograd::grad({Composed(input, term).sum()},
                                           {input, term.lora_B}));
    }
  }
}

struct DerivativeCase {
  int64_t rows;
  bool with_bias;
  double dropout;
  // Of input, weight, bias, lora_A and lora_B.
  unsigned requires_grad;
};

std::vector<DerivativeCase> DerivativeCases() {
  std::vector<DerivativeCase> cases;
  for (const int64_t rows : {kFewRows, kManyRows}) {
    for (const bool with_bias : {true, false}) {
      for (const double dropout : {0.0, 0.4}) {
        for (unsigned requires_grad = 1; requires_grad < 32; ++requires_grad) {
          // Without a bias, two cases will do: all that can, and the adapter.
          if (!with_bias && requires_grad != 27 && requires_grad != 24) {
            continue;
          }
          cases.push_back({rows, with_bias, dropout, requires_grad});
        }
      }
    }
  }
  return cases;
}

TEST(LoraMatmulTest, FirstAndSecondDerivativesAreRight) {
  // Thousands of tiny operators: threads would wait for each other.
  at::set_num_threads(1);
  for (const DerivativeCase& test : DerivativeCases()) {
    SCOPED_TRACE(::testing::Message()
                 << test.rows << " rows, bias " << test.with_bias
                 << ", dropout " << test.dropout << ", requires grad "
                 << test.requires_grad);
    LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
    term.dropout = test.dropout;
    if (!test.with_bias) term.bias = at::Tensor();
    const Tensors tensors = TensorsOf(Random({test.rows, kIn}), term);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined()) {
        tensors[i].requires_grad_((test.requires_grad >> i) & 1);
      }
    }
    const TensorFunction function = [&](const Tensors& inputs) -> Tensors {
      at::manual_seed(5);
      return {LoraMatmul(inputs[0], WithTensors(term, inputs))};
    };
    EXPECT_TRUE(GradCheck(function, tensors));
    EXPECT_TRUE(GradGradCheck(function, tensors));
  }
}

TEST(LoraMatmulTest, IsTheBaseLayerBitwiseWhileLoraBIsZero) {
  for (const int64_t rows : {8, 200}) {
    LoraMatmulTerm term = RandomTerm(64, 48, 4, at::kFloat);
    term.lora_B = at::zeros_like(term.lora_B).requires_grad_();
    const at::Tensor input = Random({rows, 64}, at::kFloat);
    EXPECT_TRUE(at::equal(LoraMatmul(input, term),
                          at::linear(input, term.weight, term.bias)));
  }
}

TEST(LoraMatmulTest, ComputesWithoutAutogradAndOnMeta) {
  const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
  const at::Tensor input = Random({kFewRows, kIn});
  {
    const c10::NoGradGuard no_grad;
    const at::Tensor output = LoraMatmul(input, term);
    EXPECT_FALSE(output.requires_grad());
    ExpectAllClose({output}, {Composed(input, term)});
  }
  for (const double dropout : {0.0, 0.5}) {
    LoraMatmulTerm meta = term;
    meta.dropout = dropout;
    for (at::Tensor* tensor :
         {&meta.weight, &meta.bias, &meta.lora_A, &meta.lora_B}) {
      *tensor = tensor->detach().to(at::kMeta);
    }
    const at::Tensor output =
        LoraMatmul(at::empty({2, kFewRows, kIn},
                             at::TensorOptions(at::kMeta).dtype(at::kDouble)),
                   meta);
    EXPECT_TRUE(output.is_meta());
    EXPECT_THAT(output.sizes(), ElementsAre(2, kFewRows, kOut));
  }
}

// --- Several layers with one input -------------------------------------------

// As that of at::linear.
TEST(LoraMatmulTest, AnOutputWithoutAutogradCanBeChangedWithIt) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{kIn}, {2, kIn}, {2, 3, kIn}}) {
    SCOPED_TRACE(::testing::Message() << "input " << shape);
    const at::Tensor input = Random(shape);
    const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
    Tensors outputs;
    at::Tensor expected;
    {
      const c10::NoGradGuard no_grad;
      expected = Composed(input, term);
      outputs = {LoraMatmul(input, term),
                 LoraAdd(at::linear(input, term.weight, term.bias), input,
                         term.lora_A, term.lora_B, term.scale)};
    }
    for (at::Tensor& output : outputs) {
      EXPECT_FALSE(output.is_view());
      const at::Tensor added = Random({kOut}).requires_grad_();
      output.add_(added);
      ExpectAllClose({output}, {expected + added});
      EXPECT_EQ(GradientsOf(output, {added}).size(), 1);
    }
  }
}

TEST(LoraMatmulTest, AnOutputCanBeChangedInPlaceBeforeBackward) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{kFewRows, kIn}, {2, 3, kIn}}) {
    const at::Tensor input = Random(shape).requires_grad_();
    const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
    at::Tensor output = LoraMatmul(input, term);
    output.mul_(3);
    const at::Tensor expected = 3 * Composed(input, term);
    ExpectAllClose(GradientsOf(output, TensorsOf(input, term)),
                   GradientsOf(expected, TensorsOf(input, term)));
  }
}

TEST(LoraMatmulTest, SharedInputIsWhatEachLayerGivesByItself) {
  for (const int64_t rows : {int64_t{0}, kFewRows, kManyRows}) {
    const at::Tensor input = Random({2, rows, kIn}).requires_grad_();
    const std::vector<LoraMatmulTerm> terms = {RandomTerm(kIn, kOut, kRank),
                                               RandomTerm(kIn, 2, 1),
                                               RandomTerm(kIn, 3, 3)};
    Tensors leaves = {input};
    Tensors expected;
    for (const LoraMatmulTerm& term : terms) {
      expected.push_back(Composed(input, term));
      leaves.insert(leaves.end(), {term.lora_A, term.lora_B});
    }
    const Tensors outputs = LoraMatmul(input, terms);
    ExpectAllClose(outputs, expected);
    ExpectAllClose(GradientsOf(at::cat(outputs, -1), leaves),
                   GradientsOf(at::cat(expected, -1), leaves));
  }
  EXPECT_TRUE(
      LoraMatmul(Random({1, kIn}), absl::Span<const LoraMatmulTerm>()).empty());
}

TEST(LoraMatmulTest, SharedInputHasRightDerivativesWithUnusedOutputs) {
  for (const int64_t rows : {kFewRows, kManyRows}) {
    for (const double dropout : {0.0, 0.4}) {
      std::vector<LoraMatmulTerm> terms = {RandomTerm(kIn, 3, kRank),
                                           RandomTerm(kIn, 2, 1)};
      Tensors tensors = {Random({rows, kIn}).requires_grad_()};
      for (LoraMatmulTerm& term : terms) {
        term.dropout = dropout;
        tensors.insert(tensors.end(), {term.lora_A, term.lora_B});
      }
      for (const size_t used : {1, 2}) {
        const TensorFunction function = [&](const Tensors& inputs) {
          at::manual_seed(5);
          std::vector<LoraMatmulTerm> moved = terms;
          for (size_t i = 0; i < moved.size(); ++i) {
            moved[i].lora_A = inputs[1 + 2 * i];
            moved[i].lora_B = inputs[2 + 2 * i];
          }
          Tensors outputs = LoraMatmul(inputs[0], moved);
          outputs.resize(used);
          return outputs;
        };
        EXPECT_TRUE(GradCheck(function, tensors));
        EXPECT_TRUE(GradGradCheck(function, tensors));
      }
    }
  }
}

// --- LoraAdd -----------------------------------------------------------------

TEST(LoraAddTest, AddsToABaseOutputThatItDoesNotChange) {
  for (const std::vector<int64_t>& rows :
       std::vector<std::vector<int64_t>>{{}, {0}, {kFewRows}, {2, kManyRows}}) {
    std::vector<int64_t> in_shape = rows, out_shape = rows;
    in_shape.push_back(kIn);
    out_shape.push_back(kOut);
    const at::Tensor input = Random(in_shape);
    const at::Tensor base = Random(out_shape);
    const at::Tensor before = base.clone();
    const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
    const at::Tensor output =
        LoraAdd(base, input, term.lora_A, term.lora_B, /*scale=*/-0.5);
    EXPECT_TRUE(at::equal(base, before));
    ExpectAllClose({output},
                   {base - 0.5 * at::matmul(at::matmul(input, term.lora_A.t()),
                                            term.lora_B.t())});
  }
}

TEST(LoraAddTest, FirstAndSecondDerivativesAreRight) {
  for (const double dropout : {0.0, 0.4}) {
    for (unsigned requires_grad = 1; requires_grad < 16; ++requires_grad) {
      const Tensors tensors = {Random({kManyRows, kOut}),
                               Random({kManyRows, kIn}), Random({kRank, kIn}),
                               Random({kOut, kRank})};
      for (size_t i = 0; i < tensors.size(); ++i) {
        tensors[i].requires_grad_((requires_grad >> i) & 1);
      }
      const TensorFunction function = [&](const Tensors& inputs) -> Tensors {
        at::manual_seed(5);
        return {
            LoraAdd(inputs[0], inputs[1], inputs[2], inputs[3], 1.5, dropout)};
      };
      EXPECT_TRUE(GradCheck(function, tensors)) << requires_grad;
      EXPECT_TRUE(GradGradCheck(function, tensors)) << requires_grad;
    }
  }
}

TEST(LoraAddTest, KeepsTheDtypeOfTheBaseOutput) {
  const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank, at::kFloat);
  for (const auto& [base_dtype, input_dtype] :
       std::vector<std::pair<at::ScalarType, at::ScalarType>>{
           {at::kBFloat16, at::kBFloat16},
           {at::kBFloat16, at::kFloat},
           {at::kFloat, at::kBFloat16}}) {
    const at::Tensor base = Random({kFewRows, kOut}, base_dtype);
    const at::Tensor input = Random({kFewRows, kIn}, input_dtype);
    const at::Tensor output = LoraAdd(base, input, term.lora_A, term.lora_B, 1);
    const at::Tensor expected =
        base.to(at::kFloat) +
        at::linear(at::linear(input.to(at::kFloat), term.lora_A), term.lora_B);
    ExpectAllClose({output}, {expected.to(base_dtype)}, kBfloat16Tolerance);
    output.sum().backward();
    EXPECT_EQ(term.lora_A.grad().scalar_type(), at::kFloat);
  }
}

// --- Cost --------------------------------------------------------------------

TEST(LoraMatmulTest, ProfilersSeeItsPasses) {
  const OperatorLog log;
  const at::Tensor output =
      LoraMatmul(Random({kFewRows, kIn}), RandomTerm(kIn, kOut, kRank));
  EXPECT_EQ(log.Count("trainer_lora::lora_matmul"), 1);
  output.sum().backward();
  EXPECT_EQ(log.Count("trainer_lora::lora_matmul_backward"), 1);
}

TEST(LoraMatmulTest, ForwardIsGemmsAlone) {
  const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
  for (const int64_t rows : {kFewRows, kManyRows}) {
    const at::Tensor input = Random({rows, kIn});
    const OperatorLog log;
    LoraMatmul(input, term);
    EXPECT_EQ(Gemms(log), rows == kFewRows ? 3 : 2);
    EXPECT_EQ(log.Count("aten::add") + log.Count("aten::mul") +
                  log.Count("aten::add_") + log.Count("aten::mul_") +
                  log.Count("aten::cat"),
              0);
  }
  const OperatorLog log;
  LoraMatmul(Random({kFewRows, kIn}), {term, term, term});
  EXPECT_EQ(Gemms(log), 1 + 3 * 2);
}

TEST(LoraMatmulTest, BackwardComputesWhatIsNeededAlone) {
  struct Case {
    const char* description;
    std::vector<int> wanted;  // of input, weight, bias, lora_A and lora_B
    int few_rows;             // GEMMs
    int many_rows;
  };
  const std::vector<Case> cases = {
      {"dB", {4}, 1, 2},         // many rows: x A^T again
      {"dA", {3}, 2, 2},         //
      {"dA, dB", {3, 4}, 3, 4},  //
      {"dx", {0}, 3, 2},         // many rows: the sum, dy (W + B A)
      {"all", {0, 3, 4}, 5, 6},  //
      {"dW", {1}, 1, 1},         //
      {"dbias", {2}, 0, 0},      //
      {"dW, dB", {1, 4}, 2, 3},  //
  };
  for (const Case& test : cases) {
    for (const int64_t rows : {kFewRows, kManyRows}) {
      // All require grad: what is computed is what the pass asks for.
      const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
      const Tensors tensors = TensorsOf(Random({rows, kIn}), term);
      Tensors wanted;
      for (const at::Tensor& tensor : tensors) tensor.requires_grad_();
      for (const int i : test.wanted) wanted.push_back(tensors[i]);
      const at::Tensor output = LoraMatmul(tensors[0], term);
      const at::Tensor grad = at::ones_like(output);
      const OperatorLog log;
      torch::autograd::grad({output}, wanted, {grad});
      EXPECT_EQ(Gemms(log), rows == kFewRows ? test.few_rows : test.many_rows)
          << test.description << " of " << rows << " rows";
    }
  }
}

TEST(LoraMatmulTest, KeepsTheInputOnceAndTheHiddenVectors) {
  const LoraMatmulTerm q = RandomTerm(128, 128, 2, at::kFloat);
  const LoraMatmulTerm k = RandomTerm(128, 128, 2, at::kFloat);
  for (const int64_t rows : {64, 256}) {
    const at::Tensor input = Random({rows, 128}, at::kFloat).requires_grad_();
    const size_t handles = input.storage().use_count();
    const TensorMemory memory;
    const Tensors outputs = LoraMatmul(input, {q, k});
    EXPECT_EQ(input.storage().use_count(), handles + 1);
    const int64_t hidden_bytes = rows == 64 ? rows * 4 * sizeof(float) : 0;
    EXPECT_EQ(memory.bytes(), 2 * outputs[0].nbytes() + hidden_bytes);
    EXPECT_LE(memory.peak_bytes(), 3 * outputs[0].nbytes());
  }
}

TEST(LoraMatmulTest, DoesNotKeepAnInputThatOnlyFrozenTensorsRead) {
  LoraMatmulTerm term = RandomTerm(64, 64, 2, at::kFloat);
  term.lora_A.requires_grad_(false);
  for (const double dropout : {0.0, 0.5}) {
    term.dropout = dropout;
    const at::Tensor input = Random({32, 64}, at::kFloat).requires_grad_();
    const size_t handles = input.storage().use_count();
    const TensorMemory memory;
    const at::Tensor output = LoraMatmul(input, term);
    EXPECT_EQ(input.storage().use_count(), handles);
    EXPECT_EQ(memory.bytes(), output.nbytes() + 32 * 2 * sizeof(float));
  }
}

TEST(LoraMatmulTest, KeepsNoMask) {
  LoraMatmulTerm term = RandomTerm(64, 64, 2, at::kFloat);
  term.dropout = 0.5;
  const at::Tensor input = Random({32, 64}, at::kFloat).requires_grad_();
  const TensorMemory memory;
  const at::Tensor output = LoraMatmul(input, term);
  EXPECT_EQ(memory.bytes(), output.nbytes() + 32 * 2 * sizeof(float));
}

// --- Dtypes ------------------------------------------------------------------

TEST(LoraMatmulTest, Float32FactorsOnABfloat16BaseKeepTheirDtype) {
  LoraMatmulTerm term = RandomTerm(64, 64, 4, at::kFloat);
  term.weight = term.weight.to(at::kBFloat16);
  term.bias = term.bias.to(at::kBFloat16);
  const at::Tensor input = Random({32, 64}, at::kBFloat16).requires_grad_();
  const size_t handles = input.storage().use_count();
  const TensorMemory memory;
  const at::Tensor output = LoraMatmul(input, term);
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  EXPECT_EQ(input.storage().use_count(), handles + 1);
  // The output, the factors' and the hidden vectors: no copy of the input.
  EXPECT_LE(memory.bytes(), output.nbytes() + 2 * (2 * 64 * 4 + 32 * 4));
  const Tensors gradients = GradientsOf(output, TensorsOf(input, term));
  const Tensors expected =
      GradientsOf(Composed(input, term), TensorsOf(input, term));
  ExpectAllClose({output}, {Composed(input, term)}, kBfloat16Tolerance);
  ExpectAllClose(gradients, expected, kBfloat16Tolerance);
}

TEST(LoraMatmulTest, HalfPrecisionKeepsAdaptersThatASumWouldRoundAway) {
  // W x = 0 of large parts; B A x = 1/8, less than a step of W.
  LoraMatmulTerm term;
  term.weight = at::full({1, 2}, 256, at::kBFloat16);
  term.lora_A = at::eye(1, 2, at::kBFloat16);
  term.lora_B = at::full({1, 1}, 0.125, at::kBFloat16);
  const at::Tensor input =
      at::tensor({1.0, -1.0}).to(at::kBFloat16).expand({8, 2});
  EXPECT_TRUE(at::equal(LoraMatmul(input, term),
                        at::full({8, 1}, 0.125, at::kBFloat16)));
}

TEST(LoraMatmulTest, UnderAutocastIsThePlainCompositionUnderAutocast) {
  for (const int64_t rows : {16, 100}) {
    for (const at::ScalarType input_dtype : {at::kFloat, at::kBFloat16}) {
      const LoraMatmulTerm term = RandomTerm(64, 48, 4, at::kFloat);
      term.weight.requires_grad_();
      const at::Tensor input = Random({rows, 64}, input_dtype).requires_grad_();
      at::Tensor output, expected, added;
      {
        const AutocastScope autocast;
        output = LoraMatmul(input, term);
        expected = Composed(input, term);
        added = LoraAdd(at::linear(input, term.weight, term.bias), input,
                        term.lora_A, term.lora_B, term.scale);
        // A backward pass may be under autocast or not.
        ExpectAllClose(GradientsOf(output, TensorsOf(input, term)),
                       GradientsOf(expected, TensorsOf(input, term)),
                       kBfloat16Tolerance);
        output = LoraMatmul(input, term);
        expected = Composed(input, term);
      }
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      ExpectAllClose({output, added}, {expected, expected}, kBfloat16Tolerance);
      ExpectAllClose(GradientsOf(output, TensorsOf(input, term)),
                     GradientsOf(expected, TensorsOf(input, term)),
                     kBfloat16Tolerance);
    }
  }
}

// --- Dropout -----------------------------------------------------------------

// A term whose output is the input after dropout.
LoraMatmulTerm IdentityTerm(int64_t size, LoraDropout dropout) {
  LoraMatmulTerm term;
  term.weight = at::zeros({size, size}, at::kDouble);
  term.lora_A = at::eye(size, at::kDouble);
  term.lora_B = at::eye(size, at::kDouble);
  term.dropout = dropout;
  return term;
}

TEST(LoraDropoutTest, DropsAndScales) {
  at::manual_seed(1);
  const at::Tensor output =
      LoraMatmul(at::ones({200, 50}, at::kDouble), IdentityTerm(50, 0.2));
  const at::Tensor dropped = output == 0;
  EXPECT_TRUE(
      at::allclose(output, at::where(dropped, 0.0, 1 / 0.8).to(at::kDouble)));
  // Five standard deviations of the mean of 10,000 trials.
  EXPECT_NEAR(dropped.to(at::kDouble).mean().item<double>(), 0.2, 0.02);
}

TEST(LoraDropoutTest, AloneItIsThatOfTheOperations) {
  const at::Tensor input = at::randn({5, 3, 4}, at::kDouble);
  const LoraDropout dropout(0.5, /*input_offset=*/2, /*input_size=*/8);
  at::manual_seed(3);
  const at::Tensor expected = LoraMatmul(input, IdentityTerm(4, dropout));
  at::manual_seed(3);
  EXPECT_TRUE(at::equal(ApplyDropout(input, dropout), expected));
  EXPECT_TRUE(ApplyDropout(input, 0).is_same(input));
}

TEST(LoraDropoutTest, BackwardDropsTheSame) {
  const at::Tensor input = at::ones({20, 10}, at::kDouble).requires_grad_();
  const at::Tensor output = LoraMatmul(input, IdentityTerm(10, 0.5));
  // Does not depend on the generator's state.
  at::manual_seed(7);
  const Tensors gradients = torch::autograd::grad({output.sum()}, {input});
  EXPECT_TRUE(at::equal(gradients[0], output.detach()));
}

TEST(LoraDropoutTest, TheDefaultGeneratorDeterminesIt) {
  const at::Tensor input = at::ones({20, 10}, at::kDouble);
  const LoraMatmulTerm term = IdentityTerm(10, 0.5);
  at::manual_seed(3);
  const at::Tensor first = LoraMatmul(input, term);
  const at::Tensor second = LoraMatmul(input, term);
  at::manual_seed(3);
  EXPECT_TRUE(at::equal(LoraMatmul(input, term), first));
  EXPECT_FALSE(at::equal(second, first));
}

TEST(LoraDropoutTest, WithoutDropoutDrawsNothing) {
  const at::Tensor input = Random({2, kIn});
  const LoraMatmulTerm term = RandomTerm(kIn, kOut, kRank);
  at::manual_seed(3);
  const at::Tensor expected = at::rand({1});
  at::manual_seed(3);
  LoraMatmul(input, term);
  EXPECT_TRUE(at::equal(at::rand({1}), expected));
}

TEST(LoraDropoutTest, ColumnsOfASplitInputAreDroppedAsInTheWhole) {
  const at::Tensor input = at::ones({20, 10}, at::kDouble);
  at::manual_seed(3);
  const at::Tensor whole = LoraMatmul(input, IdentityTerm(10, 0.5));
  Tensors parts;
  for (const int64_t offset : {0, 4}) {
    const int64_t size = offset == 0 ? 4 : 6;
    at::manual_seed(3);
    parts.push_back(
        LoraMatmul(input.narrow(1, offset, size),
                   IdentityTerm(size, {0.5, offset, /*input_size=*/10})));
  }
  EXPECT_TRUE(at::equal(at::cat(parts, 1), whole));
}

// --- Errors ------------------------------------------------------------------

TEST(LoraMatmulTest, RefusesWhatDoesNotFit) {
  const at::Tensor input = Random({kFewRows, kIn});
  const LoraMatmulTerm good = RandomTerm(kIn, kOut, kRank);
  const auto expect_error = [&](const LoraMatmulTerm& term,
                                const std::string& message) {
    EXPECT_THAT([&] { LoraMatmul(input, term); },
                ThrowsMessage<c10::Error>(HasSubstr(message)));
  };
  LoraMatmulTerm term = good;
  term.lora_A = Random({kRank, kIn + 1});
  expect_error(term, "lora_A of shape [2, 4] doesn't fit");
  term = good;
  term.lora_B = Random({kOut, kRank + 1});
  expect_error(term, "lora_B of shape [4, 3] doesn't fit");
  term = good;
  term.weight = Random({kOut + 1, kIn});
  expect_error(term, "a weight of shape [5, 3] doesn't fit");
  term = good;
  term.weight = at::Tensor();
  expect_error(term, "without a weight");
  term = good;
  term.dropout = 1;
  expect_error(term, "dropout must be in [0, 1), not 1");
  term.dropout = {0.1, /*input_offset=*/2, /*input_size=*/4};
  expect_error(term, "3 columns from 2 are not within");
  term = good;
  term.dropout = 0.1;
  EXPECT_THAT(
      [&] {
        LoraMatmul(input, {good, term});
      },
      ThrowsMessage<c10::Error>(HasSubstr("different dropouts")));
  EXPECT_THAT(
      [&] {
        LoraAdd(Random({kFewRows, kOut + 1}), input, good.lora_A, good.lora_B,
                1);
      },
      ThrowsMessage<c10::Error>(HasSubstr("a base output of shape [2, 5]")));
}

}  // namespace
}  // namespace trainer_lora::lora
