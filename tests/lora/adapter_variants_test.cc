// What the variants of LoRA compute and how they start, against their formulas.
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "config/lora_config.h"
#include "distributed/meta_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/active_adapters.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "lora/lora_matmul.h"
#include "tests/testutil/autocast_scope.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::config::AdapterInitialization;
using ::trainer_lora::config::BiasTraining;
using ::trainer_lora::testutil::AutocastScope;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;
using ::trainer_lora::testutil::TemporaryFolder;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t in = 6, int64_t out = 9)
      : to_q(in, out), to_k(in, out), norm(std::vector<int64_t>{out}) {
    register_module("to_q", to_q);
    register_module("to_k", to_k);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(to_q(x) + to_k(x)); }
  ReplicatedLinear to_q;
  ReplicatedLinear to_k;
  torch::nn::LayerNorm norm;
};
TORCH_MODULE(Model);

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 3;
  config.alpha = 4.5;
  config.target_modules = {{"to_q"}};
  return config;
}

void Randomize(const at::Tensor& parameter) {
  parameter.detach().uniform_(-1, 1);
}

at::Tensor Merged(const LoraLayer& layer, double scale) {
  return layer.state("weight") +
         scale * at::matmul(layer.lora_B(), layer.lora_A());
}

std::vector<std::string> TrainableNames(const torch::nn::Module& model) {
  std::vector<std::string> names;
  for (const NamedParameter& item : TrainableParameters(model)) {
    names.push_back(item.name);
  }
  return names;
}

TEST(RsLoraTest, ScalesByTheRootOfTheRank) {
  Model model;
  model->to(at::kDouble);
  config::LoraConfig config = Config();
  config.use_rslora = true;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  Randomize(model->to_q->lora_B());
  const at::Tensor x = at::randn({4, 6}, at::kDouble);
  EXPECT_TRUE(
      at::allclose(model->to_q(x),
                   at::linear(x, Merged(*model->to_q, 4.5 / std::sqrt(3.0)),
                              model->to_q->bias()),
                   1e-12, 1e-12));
}

TEST(DoraLayerTest, StartsAsTheBaseLayer) {
  Model model;
  const at::Tensor x = at::randn({4, 6});
  const at::Tensor base = model->to_q(x);
  config::LoraConfig config = Config();
  config.use_dora = true;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  EXPECT_THAT(TrainableNames(*model),
              ElementsAre("to_q.lora_A", "to_q.lora_B", "to_q.lora_magnitude"));
  EXPECT_TRUE(at::allclose(
      model->to_q->adapter().lora_magnitude,
      at::linalg_vector_norm(model->to_q->weight(), 2, at::IntArrayRef({1}))));
  EXPECT_TRUE(at::allclose(model->to_q(x), base, 1e-5, 1e-6));
}

// Output and gradients by the formula as it is written, with the norm detached.
void ExpectDora(bool bias, bool use_rslora) {
  SCOPED_TRACE(bias);
  at::manual_seed(5);
  ReplicatedLinear layer(torch::nn::LinearOptions(6, 9).bias(bias));
  layer->to(at::kDouble);
  LoraAdapterOptions options;
  options.rank = 3;
  options.alpha = 4.5;
  options.use_dora = true;
  options.use_rslora = use_rslora;
  auto adapter = layer->EmptyAdapter(options);
  ASSERT_THAT(adapter, IsOk());
  Randomize(adapter->lora_A);
  Randomize(adapter->lora_B);
  Randomize(adapter->lora_magnitude);
  ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
  const at::Tensor x = at::randn({2, 4, 6}, at::kDouble).requires_grad_();
  const std::vector<at::Tensor> inputs = {x, layer->lora_A(), layer->lora_B(),
                                          layer->adapter().lora_magnitude};

  const at::Tensor sum = Merged(*layer, options.Scale());
  const at::Tensor norm =
      at::linalg_vector_norm(sum.detach(), 2, at::IntArrayRef({1}));
  const at::Tensor weight = (inputs[3] / norm).unsqueeze(1) * sum;
  const at::Tensor expected = at::linear(x, weight, layer->bias());
  const at::Tensor output = layer(x);
  EXPECT_TRUE(at::allclose(output, expected, 1e-12, 1e-12));
  const at::Tensor seed = at::randn_like(output);
  const auto gradients = torch::autograd::grad({output}, inputs, {seed});
  const auto wanted = torch::autograd::grad({expected}, inputs, {seed});
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_TRUE(at::allclose(gradients[i], wanted[i], 1e-11, 1e-12)) << i;
  }
}

TEST(DoraLayerTest, ComputesItsFormula) {
  for (const bool bias : {true, false}) {
    for (const bool use_rslora : {true, false}) ExpectDora(bias, use_rslora);
  }
}

// The dropped input goes through the base weight a second time; without any
// element dropped it is the formula without dropout.
TEST(DoraLayerTest, DropoutMeansWhatItMeansInPeft) {
  ReplicatedLinear layer(6, 9);
  layer->to(at::kDouble);
  LoraAdapterOptions options;
  options.rank = 3;
  options.alpha = 4.5;
  options.use_dora = true;
  options.dropout = 0.5;
  auto adapter = layer->EmptyAdapter(options);
  ASSERT_THAT(adapter, IsOk());
  Randomize(adapter->lora_A);
  Randomize(adapter->lora_B);
  Randomize(adapter->lora_magnitude);
  ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
  const at::Tensor x = at::randn({4, 6}, at::kDouble);
  at::manual_seed(11);
  const at::Tensor output = layer(x);
  at::manual_seed(11);
  const at::Tensor dropped = ApplyDropout(x, 0.5);
  const at::Tensor scale =
      layer->adapter().lora_magnitude /
      at::linalg_vector_norm(Merged(*layer, 1.5), 2, at::IntArrayRef({1}));
  const at::Tensor base = at::linear(dropped, layer->weight());
  const at::Tensor delta =
      at::linear(at::linear(dropped, layer->lora_A()), layer->lora_B());
  EXPECT_TRUE(at::allclose(output,
                           at::linear(x, layer->weight(), layer->bias()) +
                               (scale - 1) * base + scale * 1.5 * delta,
                           1e-12, 1e-12));
  layer->eval();
  EXPECT_TRUE(at::allclose(
      layer(x), scale * at::linear(x, Merged(*layer, 1.5)) + layer->bias(),
      1e-12, 1e-12));
}

TEST(DoraLayerTest, TheMagnitudeStartsWhenTheBaseIsLoaded) {
  std::shared_ptr<ModelImpl> model;
  {
    distributed::MetaDeviceGuard meta;
    model = std::make_shared<ModelImpl>();
  }
  config::LoraConfig config = Config();
  config.use_dora = true;
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(*model, config, options));
  for (const auto& item : model->named_parameters()) {
    const auto initial = training.missing_parameter_initializer(
        item.key(), item.value().sizes(), item.value().scalar_type(),
        distributed::TensorSlice::Whole(item.value().sizes()));
    ASSERT_THAT(
        distributed::MaterializeInPlace(
            item.value(), initial.value_or(at::randn(item.value().sizes()))),
        IsOk());
  }
  EXPECT_FALSE(model->to_q->adapter().lora_magnitude.any().item<bool>());
  ASSERT_THAT(FinalizeLoraTraining(*model), IsOk());
  const at::Tensor norms =
      at::linalg_vector_norm(model->to_q->weight(), 2, at::IntArrayRef({1}));
  EXPECT_TRUE(at::allclose(model->to_q->adapter().lora_magnitude, norms));
  // What was trained since stays.
  model->to_q->adapter().lora_magnitude.detach().add_(1);
  ASSERT_THAT(FinalizeLoraTraining(*model), IsOk());
  EXPECT_TRUE(at::allclose(model->to_q->adapter().lora_magnitude, norms + 1));
}

TEST(DoraLayerTest, AnAdapterThatIsNotActiveStartsWhenTheBaseIsLoaded) {
  Model model;
  config::LoraConfig config = Config();
  config.use_dora = true;
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  ASSERT_THAT(EnableLoraTraining(*model, config, options), IsOk());
  config.target_modules = {{"to_k"}};
  options.adapter_name = "style";
  ASSERT_THAT(EnableLoraTraining(*model, config, options), IsOk());
  ASSERT_THAT(FinalizeLoraTraining(*model), IsOk());
  ASSERT_THAT(SetActiveAdapters(*model, {{kDefaultAdapter}}), IsOk());
  const at::Tensor x = at::randn({4, 6});
  const at::Tensor base =
      at::linear(x, model->to_q->weight(), model->to_q->bias());
  EXPECT_TRUE(at::allclose(model->to_q(x), base, 1e-5, 1e-5));
}

TEST(DoraLayerTest, ARowOfZerosStaysZeroAndTrains) {
  Model model;
  model->to_q->weight().detach()[2].zero_();
  config::LoraConfig config = Config();
  config.use_dora = true;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  const at::Tensor x = at::randn({4, 6});
  const at::Tensor output = model->to_q(x);
  EXPECT_TRUE(
      at::equal(output.select(1, 2), model->to_q->bias()[2].expand({4})));
  output.sum().backward();
  EXPECT_TRUE(at::isfinite(output).all().item<bool>());
  for (const NamedParameter& item : TrainableParameters(*model)) {
    EXPECT_TRUE(at::isfinite(item.parameter.grad()).all().item<bool>())
        << item.name;
  }
}

TEST(DoraLayerTest, ComputesInTheInputsTypeAndRoundsOnce) {
  for (const double dropout : {0.0, 0.5}) {
    for (const bool autocast : {false, true}) {
      SCOPED_TRACE(dropout);
      SCOPED_TRACE(autocast);
      at::manual_seed(7);
      Model model(32, 48);
      if (!autocast) model->to(at::kBFloat16);
      config::LoraConfig config = Config();
      config.use_dora = true;
      config.dropout = dropout;
      config.adapter_dtype = config::AdapterDtype::kFloat32;
      ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
      const at::Tensor magnitude = model->to_q->adapter().lora_magnitude;
      const at::Tensor x =
          at::randn({64, 32}, autocast ? at::kFloat : at::kBFloat16);
      model->eval();
      // In bfloat16 this ratio would be 1.0078. Rounded as products, the many
      // outputs have it in their sum.
      const auto run = [&] {
        std::optional<AutocastScope> scope;
        if (autocast) scope.emplace();
        return model->to_q(x).detach();
      };
      const at::Tensor before = run();
      EXPECT_EQ(before.scalar_type(), at::kBFloat16);
      magnitude.detach().mul_(1.0055);
      const at::Tensor bias = model->to_q->bias().to(at::kDouble);
      const at::Tensor ratio = (run().to(at::kDouble) - bias).abs().sum() /
                               (before.to(at::kDouble) - bias).abs().sum();
      EXPECT_NEAR(ratio.item<double>(), 1.0055, 1e-3);
      model->train();
      EXPECT_EQ(run().scalar_type(), at::kBFloat16);
    }
  }
}

TEST(BaseInitializationTest, PissaTakesThePrincipalPartOutOfTheWeight) {
  at::manual_seed(2);
  Model model;
  model->to(at::kDouble);
  const at::Tensor original = model->to_q->weight().clone();
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kPissa;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  EXPECT_TRUE(at::allclose(Merged(*model->to_q, 1.5), original, 1e-13, 1e-13));
  // The product is the best approximation of this rank (Eckart and Young), and
  // both factors have the same share of each singular value.
  const auto [u, s, vh] = at::linalg_svd(original, /*full_matrices=*/false);
  const at::Tensor best =
      at::matmul(u.narrow(1, 0, 3) * s.narrow(0, 0, 3), vh.narrow(0, 0, 3));
  EXPECT_TRUE(at::allclose(
      1.5 * at::matmul(model->to_q->lora_B(), model->to_q->lora_A()), best,
      1e-12, 1e-12));
  const at::Tensor wanted = s.narrow(0, 0, 3) / 1.5;
  EXPECT_TRUE(at::allclose(model->to_q->lora_A().square().sum(1), wanted));
  EXPECT_TRUE(at::allclose(model->to_q->lora_B().square().sum(0), wanted));
  // Not a second time.
  ASSERT_THAT(FinalizeLoraTraining(*model), IsOk());
  EXPECT_TRUE(at::allclose(Merged(*model->to_q, 1.5), original, 1e-13, 1e-13));
}

TEST(BaseInitializationTest, OloraTakesTheFirstColumnsOfQ) {
  at::manual_seed(2);
  Model model;
  model->to(at::kDouble);
  const at::Tensor original = model->to_q->weight().clone();
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kOlora;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  const at::Tensor a = model->to_q->lora_A();
  const at::Tensor b = model->to_q->lora_B();
  EXPECT_TRUE(at::allclose(Merged(*model->to_q, 1.5), original, 1e-13, 1e-13));
  EXPECT_TRUE(at::allclose(at::matmul(b.t(), b), at::eye(3, at::kDouble), 1e-13,
                           1e-13));
  // The columns of the product are those of the weight until the rank is used
  // up.
  EXPECT_TRUE(at::allclose(at::matmul(b, a).narrow(1, 0, 3),
                           original.narrow(1, 0, 3), 1e-13, 1e-13));
}

TEST(BaseInitializationTest, ABfloat16BaseKeepsTheSumToItsRounding) {
  at::manual_seed(2);
  Model model(32, 48);
  model->to(at::kBFloat16);
  const at::Tensor original = model->to_q->weight().to(at::kDouble);
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kPissa;
  config.adapter_dtype = config::AdapterDtype::kFloat32;
  ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
  const at::Tensor residual = model->to_q->weight().to(at::kDouble);
  const at::Tensor sum =
      residual + 1.5 * at::matmul(model->to_q->lora_B().to(at::kDouble),
                                  model->to_q->lora_A().to(at::kDouble));
  // Half a unit in the last of 8 bits of what stays behind.
  EXPECT_TRUE(((sum - original).abs() <= residual.abs() * 0x1p-8 + 1e-6)
                  .all()
                  .item<bool>());
}

TEST(BaseInitializationTest, ASavedAdapterIsForTheOriginalWeight) {
  for (const bool use_rslora : {false, true}) {
    at::manual_seed(3);
    Model trained;
    at::manual_seed(3);
    Model plain;
    config::LoraConfig config = Config();
    config.use_rslora = use_rslora;
    config.initialization = AdapterInitialization::kPissa;
    ASSERT_THAT(EnableLoraTraining(*trained, config), IsOk());
    Randomize(trained->to_q->lora_A());
    TemporaryFolder folder;
    ASSERT_THAT(SaveAdapter(*trained, folder.Path("adapter")), IsOk());
    EXPECT_THAT(LoadAdapter(*trained, folder.Path("adapter")),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("starts from its base weight")));

    config.initialization = AdapterInitialization::kDefault;
    config.rank = 6;
    config.alpha = 4.5 * (use_rslora ? std::sqrt(2.0) : 2.0);
    ASSERT_THAT(EnableLoraTraining(*plain, config), IsOk());
    ASSERT_THAT(LoadAdapter(*plain, folder.Path("adapter")), IsOk());
    const at::Tensor x = at::randn({4, 6});
    EXPECT_TRUE(at::allclose(plain->to_q(x), trained->to_q(x), 1e-5, 1e-5));
  }
}

// What is left of the base weight is the layer's only together with the adapter
// that took from it.
TEST(BaseInitializationTest, SuchAnAdapterIsTheOnlyOneAndAlwaysActive) {
  at::manual_seed(2);
  Model model;
  config::LoraConfig pissa = Config();
  pissa.initialization = AdapterInitialization::kPissa;
  config::LoraConfig plain = Config();
  plain.target_modules = {{"to_k"}};
  LoraTrainingOptions style;
  style.adapter_name = "style";
  const auto is_refused = [](const char* text) {
    return StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(text));
  };
  ASSERT_THAT(EnableLoraTraining(*model, plain, style), IsOk());
  EXPECT_THAT(EnableLoraTraining(*model, pissa),
              is_refused("there are adapters on to_k"));
  EXPECT_FALSE(model->to_q->is_adapted());

  Model only;
  ASSERT_THAT(EnableLoraTraining(*only, pissa), IsOk());
  const at::Tensor x = at::randn({4, 6});
  const at::Tensor output = only->to_q(x);
  EXPECT_THAT(EnableLoraTraining(*only, plain, style),
              is_refused("there are adapters on to_q"));
  EXPECT_THAT(SetActiveAdapters(*only, {}),
              is_refused("to_q: the adapter 'default' has started from"));
  EXPECT_THAT(SetActiveAdapters(*only, {{kDefaultAdapter, 0.5}}),
              is_refused("weight 1"));
  EXPECT_THAT(ActiveAdaptersScope::Create(*only, {}), is_refused("weight 1"));
  EXPECT_THAT(SetActiveAdapters(*only, {{kDefaultAdapter}}), IsOk());
  LoraAdapterOptions options;
  options.rank = 1;
  options.alpha = 1;
  LORA_ASSERT_OK_AND_ASSIGN(const LoraAdapter second,
                            only->to_q->EmptyAdapter(options));
  EXPECT_THAT(only->to_q->AdoptAdapter(second, "style"),
              is_refused("can't share it"));
  EXPECT_TRUE(at::equal(only->to_q(x), output));
}

TEST(BaseInitializationTest, AResumedAdapterIsNotSavedForAnotherWeight) {
  at::manual_seed(3);
  Model trained;
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kPissa;
  ASSERT_THAT(EnableLoraTraining(*trained, config), IsOk());

  // As from the trainer's own checkpoint: the residual and both factors.
  Model resumed;
  LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  ASSERT_THAT(EnableLoraTraining(*resumed, config, options), IsOk());
  TemporaryFolder folder;
  EXPECT_THAT(LoadAdapter(*resumed, folder.Path("adapter")),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("starts from its base weight")));
  {
    const c10::NoGradGuard no_grad;
    const auto parameters = trained->named_parameters();
    for (const auto& item : resumed->named_parameters()) {
      item.value().copy_(parameters[item.key()]);
    }
  }
  ASSERT_THAT(FinalizeLoraTraining(*resumed), IsOk());
  const at::Tensor x = at::randn({4, 6});
  EXPECT_TRUE(at::equal(resumed->to_q(x), trained->to_q(x)));
  EXPECT_THAT(SaveAdapter(*resumed, folder.Path("adapter")),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_q has its weight and its adapter")));
}

TEST(BaseInitializationTest, AWeightThatIsNotFiniteLeavesTheModelAsItWas) {
  const auto names = [](const torch::nn::Module& model) {
    return model.named_parameters().keys();
  };
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kPissa;
  config.target_modules = {{"to_q", "to_k"}};
  for (const bool prepare_for_fsdp : {false, true}) {
    at::manual_seed(3);
    Model model;
    model->to_k->weight().detach()[1][1] =
        std::numeric_limits<double>::quiet_NaN();
    const at::Tensor q = model->to_q->weight().detach().clone();
    const std::vector<std::string> before = names(*model);
    LoraTrainingOptions options;
    options.prepare_for_fsdp = prepare_for_fsdp;
    absl::Status status = EnableLoraTraining(*model, config, options).status();
    if (prepare_for_fsdp) {
      ASSERT_THAT(status, IsOk());
      status = FinalizeLoraTraining(*model).status();
    } else {
      EXPECT_EQ(names(*model), before);
      EXPECT_TRUE(model->to_q->weight().requires_grad());
    }
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kInternal, HasSubstr("to_k")));
    EXPECT_TRUE(at::equal(model->to_q->weight(), q));
  }
}

TEST(BaseInitializationTest, AWeightThatCantBeWrittenLeavesTheModelAsItWas) {
  ReplicatedLinear expanded(6, 9);
  expanded->weight().set_data(at::rand({1, 6}).expand({9, 6}));
  ReplicatedLinear inference(nullptr);
  {
    const c10::InferenceMode inference_mode;
    inference = ReplicatedLinear(6, 9);
  }
  config::LoraConfig config = Config();
  config.target_modules = {{"all-linear"}};
  for (auto [layer, problem] :
       {std::pair(expanded,
                  "bad.weight can't be written: it has several "
                  "elements in one place"),
        std::pair(inference,
                  "bad.weight can't be written: it was made in "
                  "inference mode")}) {
    for (const AdapterInitialization kind :
         {AdapterInitialization::kPissa, AdapterInitialization::kOlora}) {
      torch::nn::Module model;
      const auto good = model.register_module("good", ReplicatedLinear(6, 9));
      model.register_module("bad", layer);
      const at::Tensor weight = good->weight().detach().clone();
      config.initialization = kind;
      EXPECT_THAT(
          EnableLoraTraining(model, config),
          StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(problem)));
      EXPECT_FALSE(good->is_adapted());
      EXPECT_FALSE(layer->is_adapted());
      EXPECT_TRUE(at::equal(good->weight(), weight));
    }
    config.initialization = AdapterInitialization::kDefault;
    LoraAdapterOptions options;
    options.layer_name = "bad";
    options.rank = 2;
    options.alpha = 2;
    auto adapter = layer->EmptyAdapter(options);
    ASSERT_THAT(adapter, IsOk());
    Randomize(adapter->lora_A);
    Randomize(adapter->lora_B);
    ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
    const at::Tensor weight = layer->weight().clone();
    EXPECT_THAT(layer->Merge(), StatusIs(absl::StatusCode::kFailedPrecondition,
                                         HasSubstr(problem)));
    EXPECT_FALSE(layer->is_merged());
    EXPECT_TRUE(at::equal(layer->weight(), weight));
  }
}

TEST(BaseInitializationTest, RefusesMoreComponentsThanThereAre) {
  Model model(2, 9);
  config::LoraConfig config = Config();
  config.initialization = AdapterInitialization::kOlora;
  EXPECT_THAT(EnableLoraTraining(*model, config),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("to_q: PiSSA and OLoRA find 2 components")));
  EXPECT_FALSE(model->to_q->is_adapted());
}

TEST(BiasTrainingTest, TrainsTheBiasesThatTheConfigurationSays) {
  const std::vector<std::string> factors = {"to_q.lora_A", "to_q.lora_B"};
  for (const auto& [training, biases] :
       {std::make_pair(BiasTraining::kNone, std::vector<std::string>{}),
        std::make_pair(BiasTraining::kLoraOnly,
                       std::vector<std::string>{"to_q.base_layer.bias"}),
        std::make_pair(BiasTraining::kAll,
                       std::vector<std::string>{"to_q.base_layer.bias",
                                                "to_k.bias", "norm.bias"})}) {
    Model model;
    config::LoraConfig config = Config();
    config.bias = training;
    ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
    std::vector<std::string> expected = factors;
    expected.insert(expected.end(), biases.begin(), biases.end());
    EXPECT_THAT(TrainableNames(*model),
                ::testing::UnorderedElementsAreArray(expected));
    // They travel with the adapter.
    at::manual_seed(1);
    for (const NamedParameter& item : TrainableParameters(*model)) {
      Randomize(item.parameter);
    }
    const at::Tensor x = at::randn({4, 6});
    const at::Tensor output = model->forward(x);
    TemporaryFolder folder;
    ASSERT_THAT(SaveAdapter(*model, folder.Path("adapter")), IsOk());
    for (const NamedParameter& item : TrainableParameters(*model)) {
      item.parameter.detach().zero_();
    }
    ASSERT_THAT(LoadAdapter(*model, folder.Path("adapter")), IsOk());
    EXPECT_TRUE(at::equal(model->forward(x), output));
  }
}

}  // namespace
}  // namespace trainer_lora::lora
