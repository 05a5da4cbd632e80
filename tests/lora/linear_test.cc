// The base of adaptable layers and ReplicatedLinear.
#include "lora/linear.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "c10/core/InferenceMode.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/status_matchers.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/cloneable.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

LoraAdapterOptions Options(int64_t rank, double alpha) {
  LoraAdapterOptions options;
  options.rank = rank;
  options.alpha = alpha;
  return options;
}

// Gives `layer` an adapter with random factors, so that both count.
void Adopt(LoraLayer& layer, int64_t rank = 2, double alpha = 3) {
  auto adapter = layer.EmptyAdapter(Options(rank, alpha));
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.uniform_(-1, 1);
  ASSERT_THAT(layer.AdoptAdapter(*adapter), IsOk());
}

std::vector<std::string> Keys(
    const torch::OrderedDict<std::string, at::Tensor>& dict) {
  return dict.keys();
}

TEST(ReplicatedLinearTest, IsADropInForTorchLinear) {
  for (const bool with_bias : {true, false}) {
    const auto options = torch::nn::LinearOptions(5, 7).bias(with_bias);
    at::manual_seed(3);
    torch::nn::Linear stock(options);
    at::manual_seed(3);
    ReplicatedLinear ours(options);
    EXPECT_EQ(Keys(ours->named_parameters()), Keys(stock->named_parameters()));
    EXPECT_TRUE(at::equal(ours->weight(), stock->weight));
    EXPECT_EQ(ours->bias().defined(), with_bias);
    const at::Tensor input = at::randn({2, 3, 5});
    EXPECT_TRUE(at::equal(ours(input), stock(input)));
  }
}

TEST(LoraLayerTest, AdoptionRenamesTheStateAndKeepsTheModule) {
  ReplicatedLinear layer(5, 7);
  const at::Tensor weight = layer->weight();
  LoraLayer* const before = layer.get();
  Adopt(*layer);
  EXPECT_EQ(layer.get(), before);
  EXPECT_THAT(
      Keys(layer->named_parameters()),
      ElementsAre("lora_A", "lora_B", "base_layer.weight", "base_layer.bias"));
  EXPECT_TRUE(layer->weight().is_same(weight));
  EXPECT_THAT(layer->lora_A().sizes(), ElementsAre(2, 5));
  EXPECT_THAT(layer->lora_B().sizes(), ElementsAre(7, 2));
  EXPECT_TRUE(layer->lora_A().requires_grad());
  EXPECT_TRUE(layer->lora_B().requires_grad());
  EXPECT_EQ(layer->adapter().options.rank, 2);
  EXPECT_EQ(layer->adapter().options.alpha, 3);
}

TEST(LoraLayerTest, ForwardAddsTheScaledProductOfTheFactors) {
  torch::nn::Sequential model(ReplicatedLinear(5, 7));
  auto& layer = model->at<ReplicatedLinearImpl>(0);
  layer.to(at::kDouble);
  Adopt(layer, /*rank=*/2, /*alpha=*/3);
  const at::Tensor input = at::randn({4, 2, 5}, at::kDouble);
  const at::Tensor merged =
      layer.weight() + 1.5 * at::matmul(layer.lora_B(), layer.lora_A());
  const at::Tensor expected =
      at::matmul(input, merged.transpose(0, 1)) + layer.bias();
  EXPECT_TRUE(at::allclose(model->forward(input), expected, 1e-12, 1e-12));
}

TEST(LoraLayerTest, GradientsReachTheFactorsAndTheInput) {
  ReplicatedLinear layer(5, 7);
  layer->to(at::kDouble);
  Adopt(*layer, /*rank=*/2, /*alpha=*/3);
  layer->weight().requires_grad_(false);
  layer->bias().requires_grad_(false);
  const at::Tensor input = at::randn({4, 5}, at::kDouble).requires_grad_();
  const at::Tensor seed = at::randn({4, 7}, at::kDouble);
  layer(input).backward(seed);
  const double scale = 1.5;
  const at::Tensor a = layer->lora_A().detach();
  const at::Tensor b = layer->lora_B().detach();
  const at::Tensor hidden = at::matmul(input, a.t()).detach();
  EXPECT_TRUE(at::allclose(layer->lora_B().grad(),
                           scale * at::matmul(seed.t(), hidden)));
  EXPECT_TRUE(at::allclose(
      layer->lora_A().grad(),
      scale * at::matmul(at::matmul(seed, b).t(), input.detach())));
  EXPECT_TRUE(at::allclose(
      input.grad(),
      at::matmul(seed, layer->weight() + scale * at::matmul(b, a))));
  EXPECT_FALSE(layer->weight().grad().defined());
}

TEST(LoraLayerTest, WithZeroLoraBTheOutputIsBitwiseTheBaseOutput) {
  ReplicatedLinear layer(64, 96);
  const at::Tensor input = at::randn({8, 64});
  const at::Tensor base_output = layer(input);
  auto adapter = layer->EmptyAdapter(Options(4, 4));
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.zero_();
  ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
  EXPECT_TRUE(at::equal(layer(input), base_output));
}

// Forward of each by itself is the oracle.
TEST(LoraLayerTest, LayersOfOneInputComputeTogetherWhatEachDoes) {
  for (const bool all_adapted : {true, false}) {
    SCOPED_TRACE(all_adapted);
    std::vector<ReplicatedLinear> layers;
    layers.emplace_back(5, 7);
    layers.emplace_back(5, 4);
    layers.emplace_back(torch::nn::LinearOptions(5, 7).bias(false));
    std::vector<ReplicatedLinearImpl*> pointers;
    for (ReplicatedLinear& layer : layers) {
      layer->to(at::kDouble);
      pointers.push_back(layer.get());
      if (all_adapted || pointers.size() == 2) Adopt(*layer);
    }
    const at::Tensor input = at::randn({3, 2, 5}, at::kDouble).requires_grad_();
    const auto gradients_of = [&](const std::vector<at::Tensor>& outputs) {
      at::Tensor loss = at::zeros({}, at::kDouble);
      for (const at::Tensor& output : outputs)
        loss = loss + output.square().sum();
      std::vector<at::Tensor> leaves = {input};
      for (ReplicatedLinear& layer : layers) {
        if (!layer->is_adapted()) continue;
        leaves.push_back(layer->lora_A());
        leaves.push_back(layer->lora_B());
      }
      return torch::autograd::grad({loss}, leaves);
    };
    std::vector<at::Tensor> expected;
    for (ReplicatedLinear& layer : layers) expected.push_back(layer(input));
    const std::vector<at::Tensor> outputs =
        ReplicatedLinearImpl::ForwardTogether(input, pointers);
    ASSERT_EQ(outputs.size(), expected.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      EXPECT_TRUE(at::allclose(outputs[i], expected[i], 1e-12, 1e-12)) << i;
      // One node of the graph has the outputs of all.
      const bool is_one = outputs[i].grad_fn()->next_edge(0).function ==
                          outputs[0].grad_fn()->next_edge(0).function;
      EXPECT_EQ(is_one, all_adapted || i == 0) << i;
    }
    const auto expected_gradients = gradients_of(expected);
    const auto gradients = gradients_of(outputs);
    for (size_t i = 0; i < gradients.size(); ++i) {
      EXPECT_TRUE(
          at::allclose(gradients[i], expected_gradients[i], 1e-12, 1e-12))
          << i;
    }
  }
}

TEST(LoraLayerTest, LayersOfDifferentDropoutComputeByThemselves) {
  ReplicatedLinear q(5, 7), k(5, 7);
  Adopt(*q);
  LoraAdapterOptions options = Options(2, 4);
  options.dropout = 0.5;
  auto adapter = k->EmptyAdapter(options);
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.uniform_(-1, 1);
  ASSERT_THAT(k->AdoptAdapter(*adapter), IsOk());
  const at::Tensor input = at::randn({3, 5});
  at::manual_seed(1);
  const at::Tensor expected = k(input);
  at::manual_seed(1);
  const auto outputs =
      ReplicatedLinearImpl::ForwardTogether(input, {q.get(), k.get()});
  EXPECT_TRUE(at::equal(outputs[0], q(input)));
  EXPECT_TRUE(at::equal(outputs[1], expected));
}

TEST(LoraLayerTest, TheAdapterIsWhereItsBaseIs) {
  ReplicatedLinear layer(5, 7);
  layer->to(at::kBFloat16);
  Adopt(*layer);
  EXPECT_EQ(layer->lora_A().scalar_type(), at::kBFloat16);
  layer->to(at::kDouble);
  EXPECT_EQ(layer->lora_A().scalar_type(), at::kDouble);
  EXPECT_EQ(layer->weight().scalar_type(), at::kDouble);
  EXPECT_EQ(layer(at::randn({1, 5}, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(LoraLayerTest, AFloat32AdapterOnABfloat16BaseGivesBfloat16) {
  ReplicatedLinear layer(5, 7);
  Adopt(*layer);
  layer->weight().set_data(layer->weight().to(at::kBFloat16));
  layer->bias().set_data(layer->bias().to(at::kBFloat16));
  const at::Tensor output = layer(at::randn({3, 5}).to(at::kBFloat16));
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(layer->lora_A().grad().scalar_type(), at::kFloat);
}

// A model whose holders are typed and whose parts are in containers.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    to_q = register_module("to_q", ReplicatedLinear(5, 5));
    layers = register_module("layers",
                             torch::nn::ModuleList(ReplicatedLinear(5, 5)));
  }
  at::Tensor forward(at::Tensor x) {
    return layers->at<ReplicatedLinearImpl>(0).forward(to_q(x));
  }
  ReplicatedLinear to_q{nullptr};
  torch::nn::ModuleList layers{nullptr};
};

TEST(LoraLayerTest, ACloneHasItsOwnEqualState) {
  BlockImpl model;
  Adopt(*model.to_q);
  Adopt(model.layers->at<ReplicatedLinearImpl>(0));
  model.to_q->weight().requires_grad_(false);
  model.eval();
  const at::Tensor input = at::randn({2, 5});
  const at::Tensor output = model.forward(input);

  const auto copy = std::dynamic_pointer_cast<BlockImpl>(model.clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_EQ(Keys(copy->named_parameters()), Keys(model.named_parameters()));
  for (const auto& item : model.named_parameters()) {
    const at::Tensor copied = copy->named_parameters()[item.key()];
    EXPECT_TRUE(at::equal(copied, item.value())) << item.key();
    EXPECT_FALSE(copied.is_same(item.value())) << item.key();
    EXPECT_NE(copied.data_ptr(), item.value().data_ptr()) << item.key();
    EXPECT_EQ(copied.requires_grad(), item.value().requires_grad())
        << item.key();
  }
  EXPECT_FALSE(copy->to_q->is_training());
  EXPECT_TRUE(at::equal(copy->forward(input), output));

  // The copy's typed holders compute with the copy's tensors.
  for (at::Tensor parameter : copy->parameters()) parameter.detach().zero_();
  EXPECT_TRUE(at::equal(copy->forward(input), at::zeros({2, 5})));
  EXPECT_TRUE(at::equal(model.forward(input), output));
}

TEST(LoraLayerTest, ACloneOfALayerWithoutAdapterCanTakeOne) {
  ReplicatedLinear layer(5, 7);
  auto copy = std::dynamic_pointer_cast<ReplicatedLinearImpl>(layer->clone());
  ASSERT_NE(copy, nullptr);
  Adopt(*copy);
  EXPECT_FALSE(layer->is_adapted());
  EXPECT_TRUE(copy->is_adapted());
}

TEST(LoraLayerTest, PrintsWhatItIs) {
  ReplicatedLinear layer(torch::nn::LinearOptions(5, 7).bias(false));
  Adopt(*layer, /*rank=*/2, /*alpha=*/0.5);
  std::ostringstream stream;
  stream << *layer;
  EXPECT_THAT(stream.str(), HasSubstr("ReplicatedLinear(in_features=5, "
                                      "out_features=7, bias=false, "
                                      "lora_rank=2, lora_alpha=0.5)"));
}

TEST(LoraLayerTest, RefusesAnAdapterOutOfRange) {
  ReplicatedLinear layer(5, 7);
  for (const int64_t rank : {int64_t{0}, int64_t{-1}}) {
    EXPECT_THAT(layer->EmptyAdapter(Options(rank, 1)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("rank must be > 0")));
  }
  for (const double alpha :
       {0.0, -8.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(layer->EmptyAdapter(Options(1, alpha)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("alpha must be finite and > 0")));
  }
}

TEST(LoraLayerTest, RefusesASecondAdapterAndForeignFactors) {
  ReplicatedLinear layer(5, 7);
  auto foreign = ReplicatedLinear(7, 5)->EmptyAdapter(Options(2, 2));
  ASSERT_THAT(foreign, IsOk());
  EXPECT_THAT(layer->AdoptAdapter(*foreign),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("lora_A of shape [2, 5]")));
  EXPECT_FALSE(layer->is_adapted());
  Adopt(*layer);
  const auto keys = Keys(layer->named_parameters());
  auto second = layer->EmptyAdapter(Options(2, 2));
  ASSERT_THAT(second, IsOk());
  EXPECT_THAT(layer->AdoptAdapter(*second),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has a LoRA adapter already")));
  for (const char* name : {"", "a.b"}) {
    EXPECT_THAT(layer->AdoptAdapter(*second, name),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("is not empty and has no dot")));
  }
  EXPECT_EQ(Keys(layer->named_parameters()), keys);
}

// A layer that is made of more than a weight: a buffer and a child module.
class ComposedLinearImpl : public CloneableLoraLayer<ComposedLinearImpl> {
 public:
  ComposedLinearImpl() {
    register_parameter("weight", at::randn({7, 5}));
    register_buffer("scale", at::rand({7}));
    register_module("inner", std::make_shared<torch::nn::LinearImpl>(1, 1));
  }
  int64_t in_features() const override { return 5; }
  int64_t out_features() const override { return 7; }
};

TEST(LoraLayerTest, AdoptionMovesBuffersAndChildrenToo) {
  ComposedLinearImpl layer;
  Adopt(layer);
  EXPECT_THAT(Keys(layer.named_parameters()),
              ElementsAre("lora_A", "lora_B", "base_layer.weight",
                          "base_layer.inner.weight", "base_layer.inner.bias"));
  EXPECT_THAT(Keys(layer.named_buffers()), ElementsAre("base_layer.scale"));
  EXPECT_EQ(Keys(layer.clone()->named_parameters()),
            Keys(layer.named_parameters()));
}

// Such as a norm that is frozen in eval mode.
TEST(LoraLayerTest, AdoptionAndClonesKeepTheModeOfEachModule) {
  for (const bool training : {true, false}) {
    for (const char* name : {kDefaultAdapter, "style"}) {
      ComposedLinearImpl layer;
      layer.train(training);
      layer.children()[0]->train(!training);
      auto adapter = layer.EmptyAdapter(Options(2, 3));
      ASSERT_THAT(adapter, IsOk());
      ASSERT_THAT(layer.AdoptAdapter(*adapter, name), IsOk());
      const auto copy = layer.clone();
      for (const torch::nn::Module* module :
           {static_cast<const torch::nn::Module*>(&layer),
            static_cast<const torch::nn::Module*>(copy.get())}) {
        EXPECT_EQ(module->is_training(), training);
        for (const auto& item : module->named_modules("", false)) {
          EXPECT_EQ(item.value()->is_training(),
                    (item.key() == "base_layer.inner") != training)
              << item.key();
        }
      }
    }
  }
}

// Without adapter_options(), an int8 weight leaves no dtype for the factors.
class PlainInt8LinearImpl : public CloneableLoraLayer<PlainInt8LinearImpl> {
 public:
  PlainInt8LinearImpl() {
    register_parameter("weight", at::zeros({3, 2}, at::kChar), false);
  }
  int64_t in_features() const override { return 2; }
  int64_t out_features() const override { return 3; }
};

TEST(LoraLayerTest, TheFactorsAreOfATypeThatTrains) {
  ReplicatedLinear layer(5, 7);
  LoraAdapterOptions options = Options(2, 2);
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    options.dtype = dtype;
    EXPECT_THAT(layer->EmptyAdapter(options), IsOk()) << dtype;
  }
  for (const at::ScalarType dtype :
       {at::kFloat8_e4m3fn, at::kInt, at::kComplexFloat}) {
    options.dtype = dtype;
    EXPECT_THAT(layer->EmptyAdapter(options),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("choose another dtype")))
        << dtype;
  }
}

// Each as the first could be, but for one thing.
TEST(LoraLayerTest, AnAdapterThatCantBeAdoptedLeavesTheLayerAsItWas) {
  ReplicatedLinear layer(5, 7);
  auto good = layer->EmptyAdapter(Options(2, 2));
  ASSERT_THAT(good, IsOk());
  std::vector<std::pair<LoraAdapter, std::string>> bad;
  const auto add = [&](const std::string& message) -> LoraAdapter& {
    bad.emplace_back(*good, message);
    return bad.back().first;
  };
  LoraAdapter& empty = add("rank must be > 0, got 0");
  empty.options.rank = 0;
  empty.lora_A = at::zeros({0, 5});
  empty.lora_B = at::zeros({7, 0});
  add("alpha must be finite").options.alpha = std::nan("");
  add("alpha must be finite").options.alpha = 0;
  add("dropout must be").options.dropout = 1;
  add("type Int").lora_A = at::zeros({2, 5}, at::kInt);
  add("type Int").lora_B = at::zeros({7, 2}, at::kInt);
  add("type Float8_e4m3fn").lora_B = at::empty({7, 2}, at::kFloat8_e4m3fn);
  {
    const c10::InferenceMode inference_mode;
    add("inference mode").lora_B = at::zeros({7, 2});
  }
  for (const auto& [adapter, message] : bad) {
    for (const char* name : {kDefaultAdapter, "style"}) {
      EXPECT_THAT(
          layer->AdoptAdapter(adapter, name),
          StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
      EXPECT_FALSE(layer->is_adapted());
      EXPECT_THAT(Keys(layer->named_parameters()),
                  ElementsAre("weight", "bias"));
    }
  }
  EXPECT_THAT(layer->AdoptAdapter(*good), IsOk());
}

// More than an address can say.
constexpr int64_t kImpossibleSize = int64_t{1} << 52;

// A layer whose matrix does not fit into memory.
class ImpossibleLinearImpl : public CloneableLoraLayer<ImpossibleLinearImpl> {
 public:
  ImpossibleLinearImpl() { register_parameter("weight", at::zeros({3, 2})); }
  int64_t in_features() const override { return 2; }
  int64_t out_features() const override { return 3; }
  at::Tensor WeightMatrix() const override {
    return at::empty({kImpossibleSize});
  }
};

// The CPU's allocator throws no error of its own type.
TEST(LoraLayerTest, SaysThatMemoryRanOut) {
  const auto says_so = StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("can't allocate memory"));
  EXPECT_THAT(ReplicatedLinear(5, 7)->EmptyAdapter(Options(kImpossibleSize, 1)),
              says_so);
  ImpossibleLinearImpl layer;
  Adopt(layer);
  EXPECT_THAT(layer.Merge(), says_so);
  EXPECT_FALSE(layer.is_merged());
  LoraAdapter pissa = layer.adapter();
  pissa.options.initialization = config::AdapterInitialization::kPissa;
  EXPECT_THAT(layer.FactorsFromBase(pissa), says_so);
}

TEST(LoraLayerTest, AnIntegerWeightNeedsAdapterOptions) {
  EXPECT_THAT(PlainInt8LinearImpl().EmptyAdapter(Options(1, 1)),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("override adapter_options()")));
}

}  // namespace
}  // namespace trainer_lora::lora
