// Convolutions against torch::nn's, and their adapters against plain operators.
#include "lora/conv.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "lora/lora_matmul.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "torch/enum.h"
#include "torch/nn/modules/conv.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

using torch::nn::Conv1dOptions;
using torch::nn::Conv2dOptions;
using torch::nn::Conv3dOptions;

LoraAdapterOptions Options(int64_t rank, double alpha = 3,
                           bool use_dora = false) {
  LoraAdapterOptions options;
  options.rank = rank;
  options.alpha = alpha;
  options.use_dora = use_dora;
  return options;
}

// Gives `layer` an adapter with random parameters, so that all count.
void Adopt(LoraLayer& layer, const LoraAdapterOptions& options,
           const std::string& name = kDefaultAdapter) {
  auto adapter = layer.EmptyAdapter(options);
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.uniform_(-1, 1);
  if (options.use_dora) adapter->lora_magnitude.uniform_(1, 2);
  ASSERT_THAT(layer.AdoptAdapter(*adapter, name), IsOk());
}

// s B A as a weight of the convolution, for one group.
at::Tensor Delta(const LoraAdapter& adapter) {
  return adapter.options.Scale() *
         at::einsum("or,r...->o...",
                    {adapter.lora_B.flatten(1), adapter.lora_A});
}

at::Tensor Along(const at::Tensor& values, int64_t dims) {
  std::vector<int64_t> shape(dims, 1);
  shape[0] = -1;
  return values.view(shape);
}

// W + s B A with DoRA: its rows scaled to the magnitudes.
at::Tensor DoraWeight(const at::Tensor& weight, const LoraAdapter& adapter) {
  const at::Tensor sum = weight + Delta(adapter);
  const at::Tensor norms = at::linalg_vector_norm(sum.flatten(1), 2, {1});
  return Along(adapter.lora_magnitude / norms.detach(), weight.dim()) * sum;
}

bool Close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, 1e-10, 1e-10);
}

// --- Drop-ins ----------------------------------------------------------------

template <typename Ours, typename Stock, typename Options>
void ExpectIsDropIn(const std::string& name, const Options& options,
                    const at::Tensor& input) {
  SCOPED_TRACE(name);
  at::manual_seed(3);
  Stock stock(options);
  at::manual_seed(3);
  Ours ours(options);
  const auto expected = stock->named_parameters();
  EXPECT_EQ(ours->named_parameters().keys(), expected.keys());
  for (const auto& item : ours->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
    EXPECT_TRUE(item.value().requires_grad()) << item.key();
  }
  EXPECT_TRUE(at::equal(ours(input), stock(input)));
  EXPECT_TRUE(at::equal(ours(input[0]), stock(input[0])));

  at::manual_seed(4);
  stock->reset_parameters();
  at::manual_seed(4);
  ours->reset_parameters();
  EXPECT_TRUE(at::equal(ours(input), stock(input)));
}

TEST(ConvTest, Conv1dIsADropIn) {
  const std::pair<const char*, Conv1dOptions> cases[] = {
      {"defaults", Conv1dOptions(4, 6, 3)},
      {"stride", Conv1dOptions(4, 6, 3).stride(2).padding(1)},
      {"dilation, groups, no bias",
       Conv1dOptions(4, 6, 3).dilation(2).groups(2).bias(false)},
      {"valid", Conv1dOptions(4, 6, 3).padding(torch::kValid)},
      {"same", Conv1dOptions(4, 6, 4).padding(torch::kSame)},
      {"reflect",
       Conv1dOptions(4, 6, 3).padding(2).padding_mode(torch::kReflect)},
      {"replicate",
       Conv1dOptions(4, 6, 3).padding(2).padding_mode(torch::kReplicate)},
      {"circular, same", Conv1dOptions(4, 6, 4)
                             .padding(torch::kSame)
                             .padding_mode(torch::kCircular)},
  };
  for (const auto& [name, options] : cases) {
    ExpectIsDropIn<Conv1d, torch::nn::Conv1d>(name, options,
                                              at::randn({2, 4, 9}));
  }
}

TEST(ConvTest, Conv2dIsADropIn) {
  const std::pair<const char*, Conv2dOptions> cases[] = {
      {"defaults", Conv2dOptions(4, 6, {3, 2})},
      {"stride", Conv2dOptions(4, 6, 3).stride({2, 1}).padding({1, 2})},
      {"dilation, groups, no bias",
       Conv2dOptions(4, 6, 3).dilation({1, 2}).groups(2).bias(false)},
      {"valid", Conv2dOptions(4, 6, 3).padding(torch::kValid)},
      {"same", Conv2dOptions(4, 6, {3, 4}).padding(torch::kSame)},
      {"reflect",
       Conv2dOptions(4, 6, 3).padding({1, 2}).padding_mode(torch::kReflect)},
      {"replicate",
       Conv2dOptions(4, 6, 3).padding({1, 2}).padding_mode(torch::kReplicate)},
      {"circular, stride",
       Conv2dOptions(4, 6, 3).stride(2).padding({2, 1}).padding_mode(
           torch::kCircular)},
      {"circular, same", Conv2dOptions(4, 6, {3, 4})
                             .padding(torch::kSame)
                             .padding_mode(torch::kCircular)},
  };
  for (const auto& [name, options] : cases) {
    ExpectIsDropIn<Conv2d, torch::nn::Conv2d>(name, options,
                                              at::randn({2, 4, 7, 9}));
  }
}

TEST(ConvTest, Conv3dIsADropIn) {
  const std::pair<const char*, Conv3dOptions> cases[] = {
      {"defaults", Conv3dOptions(4, 6, {1, 2, 3})},
      {"stride, padding, groups",
       Conv3dOptions(4, 6, 3).stride({1, 2, 1}).padding({2, 1, 0}).groups(2)},
      {"same, dilation",
       Conv3dOptions(4, 6, 3).padding(torch::kSame).dilation({1, 2, 1})},
      {"replicate", Conv3dOptions(4, 6, 3).padding({1, 2, 1}).padding_mode(
                        torch::kReplicate)},
  };
  for (const auto& [name, options] : cases) {
    ExpectIsDropIn<Conv3d, torch::nn::Conv3d>(name, options,
                                              at::randn({2, 4, 5, 6, 7}));
  }
}

TEST(ConvTest, RefusesTheOptionsThatTorchRefuses) {
  EXPECT_THROW(Conv2d(Conv2dOptions(4, 6, 3).groups(3)), c10::Error);
  EXPECT_THROW(Conv2d(Conv2dOptions(4, 6, 3).stride(2).padding(torch::kSame)),
               c10::Error);
}

// --- What an adapter adds ----------------------------------------------------

// An adaptable layer, and the same convolution of any weight and bias in plain
// operators.
struct Case {
  std::string name;
  std::shared_ptr<LoraLayer> layer;
  std::function<at::Tensor(const at::Tensor&)> forward;
  std::function<at::Tensor(const at::Tensor&, const at::Tensor&,
                           const at::Tensor&)>
      reference;
  at::Tensor input;
};

template <typename Layer, typename Reference>
Case MakeCase(std::string name, Layer layer, at::IntArrayRef input_shape,
              Reference reference) {
  layer->to(at::kDouble);
  return {std::move(name), layer.ptr(),
          [layer](const at::Tensor& x) mutable { return layer(x); }, reference,
          at::randn(input_shape, at::kDouble)};
}

std::vector<Case> OneGroupCases() {
  using at::Tensor;
  return {
      MakeCase("Conv1d", Conv1d(Conv1dOptions(4, 6, 3).stride(2).padding(1)),
               {2, 4, 9},
               [](const Tensor& x, const Tensor& w, const Tensor& b) {
                 return at::conv1d(x, w, b, /*stride=*/2, /*padding=*/1);
               }),
      MakeCase(
          "Conv2d",
          Conv2d(Conv2dOptions(4, 6, {3, 2}).padding({1, 0}).dilation({1, 2})),
          {2, 4, 7, 9},
          [](const Tensor& x, const Tensor& w, const Tensor& b) {
            return at::conv2d(x, w, b, /*stride=*/1, /*padding=*/{1, 0},
                              /*dilation=*/{1, 2});
          }),
      MakeCase("Conv2d, circular, no bias, unbatched",
               Conv2d(Conv2dOptions(4, 6, 3)
                          .padding({1, 2})
                          .padding_mode(torch::kCircular)
                          .bias(false)),
               {4, 7, 9},
               [](const Tensor& x, const Tensor& w, const Tensor& b) {
                 return at::conv2d(at::pad(x, {2, 2, 1, 1}, "circular"), w, b);
               }),
      MakeCase("Conv2d, same",
               Conv2d(Conv2dOptions(4, 6, 3).padding(torch::kSame)),
               {2, 4, 7, 9},
               [](const Tensor& x, const Tensor& w, const Tensor& b) {
                 return at::conv2d(x, w, b, /*stride=*/1, /*padding=*/1);
               }),
      MakeCase("Conv3d", Conv3d(4, 6, 2), {2, 4, 3, 4, 5},
               [](const Tensor& x, const Tensor& w, const Tensor& b) {
                 return at::conv3d(x, w, b);
               }),
  };
}

TEST(ConvTest, AnAdapterAddsTheScaledProductToTheWeight) {
  for (const Case& test : OneGroupCases()) {
    SCOPED_TRACE(test.name);
    Adopt(*test.layer, Options(2));
    Adopt(*test.layer, Options(3, 1), "style");
    ASSERT_THAT(
        test.layer->SetActiveAdapters({{kDefaultAdapter}, {"style", -0.5}}),
        IsOk());
    const at::Tensor weight = test.layer->state("weight") +
                              Delta(test.layer->adapter()) -
                              0.5 * Delta(test.layer->adapter("style"));
    EXPECT_TRUE(
        Close(test.forward(test.input),
              test.reference(test.input, weight, test.layer->state("bias"))));
  }
}

TEST(ConvTest, GradientsAreThoseOfPlainOperators) {
  for (const bool use_dora : {false, true}) {
    for (const Case& test : OneGroupCases()) {
      SCOPED_TRACE(test.name);
      Adopt(*test.layer, Options(2, 3, use_dora));
      LoraAdapter plain = test.layer->adapter();
      const std::vector<at::Tensor> parameters = {plain.lora_A, plain.lora_B,
                                                  plain.lora_magnitude};
      plain.lora_A = plain.lora_A.detach().clone().requires_grad_();
      plain.lora_B = plain.lora_B.detach().clone().requires_grad_();
      if (use_dora) {
        plain.lora_magnitude =
            plain.lora_magnitude.detach().clone().requires_grad_();
      }
      const at::Tensor weight = test.layer->state("weight").detach();
      const at::Tensor plain_input = test.input.clone().requires_grad_();
      const at::Tensor expected = test.reference(
          plain_input,
          use_dora ? DoraWeight(weight, plain) : weight + Delta(plain),
          test.layer->state("bias"));
      const at::Tensor seed = at::randn_like(expected);
      expected.backward(seed);

      const at::Tensor input = test.input.clone().requires_grad_();
      test.forward(input).backward(seed);
      EXPECT_TRUE(Close(input.grad(), plain_input.grad()));
      EXPECT_TRUE(Close(parameters[0].grad(), plain.lora_A.grad()));
      EXPECT_TRUE(Close(parameters[1].grad(), plain.lora_B.grad()));
      if (use_dora) {
        EXPECT_TRUE(Close(parameters[2].grad(), plain.lora_magnitude.grad()));
      }
    }
  }
}

TEST(ConvTest, WithGroupsLoraAReadsAllChannels) {
  Conv2d layer(Conv2dOptions(4, 6, 3).groups(2).stride(2).padding(1));
  layer->to(at::kDouble);
  Adopt(*layer, Options(4));
  const at::Tensor a = layer->lora_A();
  const at::Tensor b = layer->lora_B();
  EXPECT_THAT(a.sizes(), ElementsAre(4, 4, 3, 3));
  EXPECT_THAT(b.sizes(), ElementsAre(6, 2, 1, 1));
  const at::Tensor input = at::randn({2, 4, 7, 9}, at::kDouble);
  // The first half of the hidden channels leads to the first half of the
  // output, as a convolution of one group for each.
  const at::Tensor delta =
      at::cat({at::einsum("or,rihw->oihw",
                          {b.narrow(0, 0, 3).flatten(1), a.narrow(0, 0, 2)}),
               at::einsum("or,rihw->oihw",
                          {b.narrow(0, 3, 3).flatten(1), a.narrow(0, 2, 2)})});
  const at::Tensor expected =
      at::conv2d(input, layer->weight(), layer->bias(), /*stride=*/2,
                 /*padding=*/1, /*dilation=*/1, /*groups=*/2) +
      0.75 * at::conv2d(input, delta, {}, /*stride=*/2, /*padding=*/1);
  EXPECT_TRUE(Close(layer(input), expected));
}

TEST(ConvTest, GroupsRefuseWhatNeedsAWeightMatrix) {
  Conv2d layer(Conv2dOptions(4, 6, 3).groups(2));
  EXPECT_THAT(layer->EmptyAdapter(Options(3)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("2 groups must be divisible by them, got 3")));
  EXPECT_THAT(
      layer->EmptyAdapter(Options(2, 2, /*use_dora=*/true)),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("DoRA needs")));
  LoraAdapterOptions pissa = Options(2);
  pissa.initialization = config::AdapterInitialization::kPissa;
  EXPECT_THAT(layer->EmptyAdapter(pissa),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("PiSSA and OLoRA need")));
  LoraAdapter odd{Options(3), at::zeros({3, 4, 3, 3}), at::zeros({6, 1, 1, 1}),
                  at::Tensor()};
  EXPECT_THAT(
      layer->AdoptAdapter(odd),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("divisible")));
  EXPECT_FALSE(layer->is_adapted());
  Adopt(*layer, Options(2));
  EXPECT_THAT(layer->Merge(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                       HasSubstr("no matrix")));
  EXPECT_FALSE(layer->is_merged());
}

TEST(ConvTest, DropoutIsThatOfTheAdaptersInput) {
  for (const bool use_dora : {false, true}) {
    Conv1d layer(Conv1dOptions(4, 6, 3).padding(1));
    layer->to(at::kDouble);
    LoraAdapterOptions options = Options(2, 3, use_dora);
    options.dropout = 0.5;
    Adopt(*layer, options);
    const at::Tensor input = at::randn({2, 4, 9}, at::kDouble);
    at::manual_seed(5);
    const at::Tensor dropped = ApplyDropout(input, 0.5);
    at::manual_seed(5);
    const at::Tensor output = layer(input);

    const auto conv = [&](const at::Tensor& x, const at::Tensor& weight) {
      return at::conv1d(x, weight, {}, /*stride=*/1, /*padding=*/1);
    };
    const at::Tensor weight = layer->weight();
    const LoraAdapter adapter = layer->adapter();
    const at::Tensor change =
        use_dora ? DoraWeight(weight, adapter) - weight : Delta(adapter);
    const at::Tensor expected =
        conv(input, weight) + Along(layer->bias(), 2) + conv(dropped, change);
    EXPECT_TRUE(Close(output, expected));
    layer->eval();
    EXPECT_TRUE(Close(layer(input),
                      conv(input, weight + change) + Along(layer->bias(), 2)));
  }
}

TEST(ConvTest, ABfloat16BaseWithAFloat32AdapterGivesBfloat16) {
  Conv2d layer(4, 6, 3);
  layer->to(at::kBFloat16);
  LoraAdapterOptions options = Options(2);
  options.dtype = at::kFloat;
  Adopt(*layer, options);
  const at::Tensor output = layer(at::randn({2, 4, 7, 9}).to(at::kBFloat16));
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(layer->lora_A().grad().scalar_type(), at::kFloat);
}

// --- What needs the values of the base weight --------------------------------

TEST(ConvTest, MergingIsTheSameAndUnmergingRestoresTheBits) {
  for (const bool use_dora : {false, true}) {
    for (const Case& test : OneGroupCases()) {
      SCOPED_TRACE(test.name);
      Adopt(*test.layer, Options(2, 3, use_dora));
      test.layer->eval();
      const at::Tensor weight = test.layer->state("weight");
      const at::Tensor before = weight.detach().clone();
      const at::Tensor expected = test.forward(test.input);
      const at::Tensor merged = use_dora
                                    ? DoraWeight(before, test.layer->adapter())
                                    : before + Delta(test.layer->adapter());
      EXPECT_TRUE(Close(test.layer->MergedWeightMatrix(), merged.flatten(1)));
      ASSERT_THAT(test.layer->Merge(), IsOk());
      EXPECT_TRUE(Close(weight, merged));
      EXPECT_TRUE(Close(test.forward(test.input), expected));
      ASSERT_THAT(test.layer->Unmerge(), IsOk());
      EXPECT_TRUE(at::equal(weight, before));
      EXPECT_TRUE(at::equal(test.forward(test.input), expected));
    }
  }
}

TEST(ConvTest, AChannelsLastWeightStaysSo) {
  Conv2d layer(Conv2dOptions(4, 6, 3));
  layer->weight().set_data(
      layer->weight().detach().contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor before = layer->weight().detach().clone();
  Adopt(*layer, Options(2));
  layer->eval();
  const at::Tensor input = at::randn({2, 4, 7, 9});
  const at::Tensor expected = layer(input);
  ASSERT_THAT(layer->Merge(), IsOk());
  EXPECT_FALSE(at::equal(layer->weight(), before));
  EXPECT_TRUE(at::allclose(layer(input), expected, 1e-4, 1e-4));
  ASSERT_THAT(layer->Unmerge(), IsOk());
  EXPECT_TRUE(at::equal(layer->weight(), before));
  EXPECT_TRUE(layer->weight().is_contiguous(at::MemoryFormat::ChannelsLast));
}

TEST(ConvTest, PissaAndOloraMoveAPartOfTheWeightIntoTheAdapter) {
  for (const auto initialization : {config::AdapterInitialization::kPissa,
                                    config::AdapterInitialization::kOlora}) {
    Conv2d layer(4, 6, 3);
    layer->to(at::kDouble);
    const at::Tensor weight = layer->weight().detach().clone();
    const at::Tensor input = at::randn({2, 4, 7, 9}, at::kDouble);
    const at::Tensor expected = layer(input);
    LoraAdapterOptions options = Options(2);
    options.initialization = initialization;
    auto adapter = layer->EmptyAdapter(options);
    ASSERT_THAT(adapter, IsOk());
    adapter->lora_A.uniform_(-1, 1);
    adapter->lora_B.zero_();
    ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
    ASSERT_THAT(layer->InitializeFromBase(), IsOk());
    EXPECT_TRUE(Close(layer->weight() + Delta(layer->adapter()), weight));
    EXPECT_FALSE(at::allclose(layer->weight(), weight));
    EXPECT_TRUE(Close(layer(input), expected));
  }
}

TEST(ConvTest, DoraStartsWithTheNormsOfTheWeight) {
  Conv2d layer(4, 6, 3);
  layer->to(at::kDouble);
  const at::Tensor norms =
      at::linalg_vector_norm(layer->weight().detach().flatten(1), 2, {1});
  auto adapter = layer->EmptyAdapter(Options(2, 3, /*use_dora=*/true));
  ASSERT_THAT(adapter, IsOk());
  adapter->lora_A.uniform_(-1, 1);
  adapter->lora_B.zero_();
  adapter->lora_magnitude.zero_();
  ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
  ASSERT_THAT(layer->InitializeFromBase(), IsOk());
  EXPECT_TRUE(Close(layer->adapter().lora_magnitude, norms));
}

TEST(ConvTest, ACloneHasItsOwnEqualState) {
  Conv2d layer(
      Conv2dOptions(4, 6, 3).padding(2).padding_mode(torch::kCircular));
  Adopt(*layer, Options(2, 3, /*use_dora=*/true));
  const at::Tensor input = at::randn({2, 4, 7, 9});
  const at::Tensor output = layer(input);
  const auto copy = std::dynamic_pointer_cast<Conv2dImpl>(layer->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(at::equal(copy->forward(input), output));
  for (at::Tensor parameter : copy->parameters()) parameter.detach().fill_(1);
  EXPECT_FALSE(at::equal(copy->forward(input), output));
  EXPECT_TRUE(at::equal(layer(input), output));
}

// --- In a model --------------------------------------------------------------

struct Model : torch::nn::Module {
  Model() {
    register_module("conv_in", conv_in);
    register_module("conv_out", conv_out);
  }
  at::Tensor forward(const at::Tensor& x) { return conv_out(conv_in(x)); }
  Conv2d conv_in{Conv2dOptions(16, 8, {3, 2}).padding(1)};
  Conv2d conv_out{Conv2dOptions(8, 6, 1).bias(false)};
};

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 4;
  config.alpha = 8;
  config.target_modules = {"conv_"};
  return config;
}

TEST(ConvTest, EnablesInAModel) {
  Model model;
  const at::Tensor input = at::randn({2, 16, 7, 9});
  const at::Tensor base_output = model.forward(input);
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config()));
  EXPECT_THAT(training.layer_names, ElementsAre("conv_in", "conv_out"));
  EXPECT_THAT(model.named_parameters().keys(),
              ElementsAre("conv_in.lora_A", "conv_in.lora_B",
                          "conv_in.base_layer.weight",
                          "conv_in.base_layer.bias", "conv_out.lora_A",
                          "conv_out.lora_B", "conv_out.base_layer.weight"));
  EXPECT_EQ(training.checkpoint_key_aliases.Resolve("conv_in.bias"),
            "conv_in.base_layer.bias");
  EXPECT_TRUE(at::equal(model.forward(input), base_output));

  // kaiming_uniform(a = sqrt(5)): below 1 / sqrt(16 * 3 * 2), and near it.
  const double bound = 1 / std::sqrt(96.0);
  const double largest = model.conv_in->lora_A().abs().max().item<double>();
  EXPECT_LE(largest, bound);
  EXPECT_GT(largest, 0.95 * bound);
  EXPECT_FALSE(model.conv_in->lora_B().any().item<bool>());
}

TEST(ConvTest, IsSavedWithTheKeysAndShapesOfPeft) {
  config::LoraConfig config = Config();
  config.use_dora = true;
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  for (const NamedParameter& item : TrainableParameters(model)) {
    item.parameter.detach().uniform_(1, 2);
  }
  const testutil::TemporaryFolder parent;
  const std::string folder = parent.Path("adapter");
  ASSERT_THAT(SaveAdapter(model, folder), IsOk());

  LORA_ASSERT_OK_AND_ASSIGN(const auto file,
                            distributed::SafetensorsFile::Open(
                                folder + "/adapter_model.safetensors"));
  std::vector<std::pair<std::string, std::vector<int64_t>>> found;
  for (const distributed::TensorInfo& tensor : file.tensors()) {
    found.emplace_back(tensor.name, tensor.shape);
  }
  const std::string prefix = "base_model.model.";
  EXPECT_THAT(
      found,
      UnorderedElementsAre(
          Pair(prefix + "conv_in.lora_A.weight", ElementsAre(4, 16, 3, 2)),
          Pair(prefix + "conv_in.lora_B.weight", ElementsAre(8, 4, 1, 1)),
          Pair(prefix + "conv_in.lora_magnitude_vector",
               ElementsAre(1, 8, 1, 1)),
          Pair(prefix + "conv_out.lora_A.weight", ElementsAre(4, 8, 1, 1)),
          Pair(prefix + "conv_out.lora_B.weight", ElementsAre(6, 4, 1, 1)),
          Pair(prefix + "conv_out.lora_magnitude_vector",
               ElementsAre(1, 6, 1, 1))));

  Model loaded;
  ASSERT_THAT(EnableLoraTraining(loaded, config), IsOk());
  ASSERT_THAT(LoadAdapter(loaded, folder), IsOk());
  const auto expected = model.named_parameters();
  for (const NamedParameter& item : TrainableParameters(loaded)) {
    EXPECT_TRUE(at::equal(item.parameter, expected[item.name])) << item.name;
  }
}

}  // namespace
}  // namespace trainer_lora::lora
