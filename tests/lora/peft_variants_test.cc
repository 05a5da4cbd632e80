// What PEFT computed with the adapters of tests/parity/make_variants_fixture.py
// is computed here from the same weights: initial values, outputs, gradients
// and merged weights.
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "c10/core/GradMode.h"
#include "config/lora_config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/active_adapters.h"
#include "lora/conv.h"
#include "lora/embedding.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/checkpoint_tensors.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"
#include "torch/nn/options/conv.h"
#include "torch/nn/options/embedding.h"
#include "torch/nn/options/linear.h"

namespace trainer_lora::lora {
namespace {

using ::testing::_;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

using Tensors = std::map<std::string, at::Tensor>;

// The entries of `tensors` below a prefix, without it.
Tensors Below(const Tensors& tensors, const std::string& prefix) {
  Tensors below;
  for (const auto& [key, tensor] : tensors) {
    if (absl::StartsWith(key, prefix)) {
      below[key.substr(prefix.size())] = tensor;
    }
  }
  return below;
}

std::set<std::string> Keys(const Tensors& tensors) {
  std::set<std::string> keys;
  for (const auto& [key, tensor] : tensors) keys.insert(key);
  return keys;
}

// The file was made on another CPU, whose kernels round otherwise. PiSSA's
// decomposition makes the most of it: 4e-6 was seen.
MATCHER_P(IsCloseTo, expected,
          "is equal but for 1e-5 of the largest value of\n" +
              testing::PrintToString(expected)) {
  if (arg.sizes() != expected.sizes()) {
    *result_listener << "of shape " << arg.sizes() << " instead of "
                     << expected.sizes();
    return false;
  }
  const double difference =
      (arg - expected).abs().max().template item<double>();
  const double largest = expected.abs().max().template item<double>();
  *result_listener << "which differs by " << difference / largest;
  return difference <= 1e-5 * largest;
}

// --- The models and cases of the script --------------------------------------

struct Model : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

struct Linears : Model {
  Linears() {
    register_module("to_q", to_q);
    register_module("to_k", to_k);
  }
  at::Tensor forward(const at::Tensor& x) override {
    return to_k(at::tanh(to_q(x)));
  }
  ReplicatedLinear to_q{12, 20};
  ReplicatedLinear to_k{torch::nn::LinearOptions(20, 7).bias(false)};
};

struct Convolution : Model {
  Convolution() { register_module("conv", conv); }
  at::Tensor forward(const at::Tensor& x) override { return conv(x); }
  Conv2d conv{
      torch::nn::Conv2dOptions(3, 8, {3, 2}).stride({2, 1}).padding({1, 0})};
};

struct GroupedConvolution : Model {
  GroupedConvolution() { register_module("conv", conv); }
  at::Tensor forward(const at::Tensor& x) override { return conv(x); }
  Conv2d conv{torch::nn::Conv2dOptions(4, 6, 3).padding(1).groups(2)};
};

struct Lookup : Model {
  Lookup() { register_module("embed", embed); }
  at::Tensor forward(const at::Tensor& x) override { return embed(x); }
  Embedding embed{torch::nn::EmbeddingOptions(11, 10).padding_idx(3)};
};

template <typename T>
std::unique_ptr<Model> Make() {
  return std::make_unique<T>();
}

struct Adapter {
  // What is said of it beside CommonConfig().
  void (*configure)(config::LoraConfig&) = [](config::LoraConfig&) {};
  std::string name = kDefaultAdapter;
  double weight = 1;
};

struct Case {
  const char* name;
  std::unique_ptr<Model> (*make_model)();
  std::vector<Adapter> adapters;
};

void PrintTo(const Case& test_case, std::ostream* out) {
  *out << test_case.name;
}

config::LoraConfig CommonConfig() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 4;
  config.alpha = 6;
  config.target_modules = {"all-linear"};
  return config;
}

void UseRslora(config::LoraConfig& config) { config.use_rslora = true; }

void UseDora(config::LoraConfig& config) { config.use_dora = true; }

void UseDoraAndRslora(config::LoraConfig& config) {
  config.use_dora = true;
  config.use_rslora = true;
}

void StartAsPissa(config::LoraConfig& config) {
  config.initialization = config::AdapterInitialization::kPissa;
}

void StartAsOlora(config::LoraConfig& config) {
  config.initialization = config::AdapterInitialization::kOlora;
}

void UsePatterns(config::LoraConfig& config) {
  config.rank_pattern = {{"to_k", 2}};
  config.alpha_pattern = {{"to_q", 3}, {"to_k", 8}};
}

void UseRank3(config::LoraConfig& config) {
  config.rank = 3;
  config.alpha = 2;
}

// -----------------------------------------------------------------------------

class PeftVariantsTest : public testing::TestWithParam<Case> {
 protected:
  // The model with its adapters, as it is before they are trained.
  void SetUp() override {
    fixture_ = Below(testutil::ReadCheckpoint(
                         testutil::RunfilePath("trainer_lora/tests/testdata/"
                                               "peft_variants.safetensors")),
                     absl::StrCat(GetParam().name, "/"));
    model_ = GetParam().make_model();
    CopyToModel(Below(fixture_, "base/"));
    std::vector<ActiveAdapter> active;
    for (const Adapter& adapter : GetParam().adapters) {
      config::LoraConfig config = CommonConfig();
      adapter.configure(config);
      LoraTrainingOptions options;
      options.adapter_name = adapter.name;
      ASSERT_THAT(EnableLoraTraining(*model_, config, options), IsOk());
      active.push_back({adapter.name, adapter.weight});
    }
    ASSERT_THAT(SetActiveAdapters(*model_, active), IsOk());
  }

  // Gives all trainable parameters the values that training may have left.
  void SetTrainedValues() {
    const Tensors trained = Below(fixture_, "adapter/");
    ASSERT_EQ(Keys(Parameters()), Keys(trained));
    CopyToModel(trained);
  }

  // The trainable parameters.
  Tensors Parameters() const {
    Tensors parameters;
    for (const NamedParameter& item : TrainableParameters(*model_)) {
      parameters[item.name] = item.parameter;
    }
    return parameters;
  }

  void CopyToModel(const Tensors& tensors) {
    const c10::NoGradGuard no_grad;
    const auto parameters = model_->named_parameters();
    for (const auto& [name, tensor] : tensors) {
      ASSERT_TRUE(parameters.contains(name)) << name;
      ASSERT_EQ(parameters[name].sizes(), tensor.sizes()) << name;
      parameters[name].copy_(tensor);
    }
  }

  Tensors fixture_;
  std::unique_ptr<Model> model_;
};

// The factors of a decomposition that is free to choose the sign of each
// component: here the largest element of each column of `b` is positive.
std::pair<at::Tensor, at::Tensor> WithFixedSigns(const at::Tensor& a,
                                                 const at::Tensor& b) {
  const at::Tensor signs =
      b.gather(0, b.abs().argmax(/*dim=*/0, /*keepdim=*/true)).sign();
  return {a * signs.t(), b * signs};
}

TEST_P(PeftVariantsTest, StartsAsInPeft) {
  Tensors initial;
  for (const auto& [name, layer] : LoraLayers(*model_)) {
    const LoraAdapter adapter = layer->adapter();
    if (adapter.options.use_dora) {
      initial[absl::StrCat(name, ".lora_magnitude")] = adapter.lora_magnitude;
    }
    if (layer->InitialFactors().lora_A.defined()) {
      const auto [a, b] = WithFixedSigns(adapter.lora_A, adapter.lora_B);
      initial[absl::StrCat(name, ".lora_A")] = a;
      initial[absl::StrCat(name, ".lora_B")] = b;
      initial[absl::StrCat(name, ".weight")] = layer->state("weight");
    }
  }
  const Tensors expected = Below(fixture_, "initial/");
  ASSERT_EQ(Keys(initial), Keys(expected));
  for (const auto& [name, tensor] : expected) {
    EXPECT_THAT(initial[name], IsCloseTo(tensor)) << name;
  }
}

TEST_P(PeftVariantsTest, GivesTheOutputAndTheGradientsOfPeft) {
  ASSERT_NO_FATAL_FAILURE(SetTrainedValues());
  at::Tensor input = fixture_.at("input").clone();
  input.set_requires_grad(input.is_floating_point());
  const at::Tensor output = model_->forward(input);
  EXPECT_THAT(output, IsCloseTo(fixture_.at("output")));

  output.backward(fixture_.at("output_gradient"));
  if (input.requires_grad()) {
    EXPECT_THAT(input.grad(), IsCloseTo(fixture_.at("input_gradient")));
  }
  const Tensors parameters = Parameters();
  for (const auto& [name, gradient] : Below(fixture_, "gradient/")) {
    ASSERT_TRUE(parameters.at(name).grad().defined()) << name;
    EXPECT_THAT(parameters.at(name).grad(), IsCloseTo(gradient)) << name;
  }
}

TEST_P(PeftVariantsTest, MergesAsPeft) {
  ASSERT_NO_FATAL_FAILURE(SetTrainedValues());
  const Tensors merged = Below(fixture_, "merged/");
  for (const auto& [name, layer] : LoraLayers(*model_)) {
    const auto found = merged.find(absl::StrCat(name, ".weight"));
    if (found == merged.end()) {
      EXPECT_THAT(layer->Merge(),
                  StatusIs(absl::StatusCode::kFailedPrecondition, _));
      continue;
    }
    ASSERT_THAT(layer->Merge(), IsOk());
    EXPECT_THAT(layer->state("weight"), IsCloseTo(found->second)) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Cases, PeftVariantsTest,
    testing::Values(
        Case{"lora", Make<Linears>, {{}}},
        Case{"rslora", Make<Linears>, {{UseRslora}}},
        Case{"dora", Make<Linears>, {{UseDora}}},
        Case{"dora_rslora", Make<Linears>, {{UseDoraAndRslora}}},
        Case{"pissa", Make<Linears>, {{StartAsPissa}}},
        Case{"olora", Make<Linears>, {{StartAsOlora}}},
        Case{"patterns", Make<Linears>, {{UsePatterns}}},
        Case{"two_adapters", Make<Linears>, {{}, {UseRank3, "second"}}},
        Case{"weighted_adapters",
             Make<Linears>,
             {{[](auto&) {}, kDefaultAdapter, 0.75},
              {UseRank3, "second", -0.5}}},
        Case{"conv2d", Make<Convolution>, {{}}},
        Case{"conv2d_groups", Make<GroupedConvolution>, {{}}},
        Case{"conv2d_dora", Make<Convolution>, {{UseDora}}},
        Case{"embedding", Make<Lookup>, {{}}},
        Case{"embedding_dora", Make<Lookup>, {{UseDora}}}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace trainer_lora::lora
