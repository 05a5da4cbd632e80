// The embedding against torch::nn's, and its adapters against plain operators.
#include "lora/embedding.h"

#include <cstdint>
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
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "torch/nn/modules/embedding.h"

namespace trainer_lora::lora {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;
using ::torch::nn::EmbeddingOptions;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

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

Embedding DoubleEmbedding(const EmbeddingOptions& options) {
  Embedding layer(options);
  layer->to(at::kDouble);
  return layer;
}

at::Tensor Indices() { return at::tensor({1, 4, 4, 0, 8, 3}).view({2, 3}); }

// s (B A)^T, of the weight's shape.
at::Tensor Delta(const LoraAdapter& adapter) {
  return adapter.options.Scale() *
         at::matmul(adapter.lora_B, adapter.lora_A).t();
}

// W + s (B A)^T with DoRA: its columns scaled to the magnitudes.
at::Tensor DoraWeight(const at::Tensor& weight, const LoraAdapter& adapter) {
  const at::Tensor sum = weight + Delta(adapter);
  const at::Tensor norms = at::linalg_vector_norm(sum, 2, {0});
  return adapter.lora_magnitude / norms.detach() * sum;
}

at::Tensor AdaptedWeight(const at::Tensor& weight, const LoraAdapter& adapter) {
  return adapter.options.use_dora ? DoraWeight(weight, adapter)
                                  : weight + Delta(adapter);
}

// Rows of `weight`, by an operator other than the layer's.
at::Tensor Rows(const at::Tensor& weight, const at::Tensor& indices) {
  return weight.index({indices});
}

bool Close(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a, b, 1e-10, 1e-10);
}

// --- Drop-in -----------------------------------------------------------------

TEST(EmbeddingTest, IsADropInForTorchEmbedding) {
  const std::pair<const char*, EmbeddingOptions> cases[] = {
      {"defaults", EmbeddingOptions(9, 5)},
      {"padding_idx", EmbeddingOptions(9, 5).padding_idx(4)},
      {"padding_idx from the end", EmbeddingOptions(9, 5).padding_idx(-5)},
      {"max_norm", EmbeddingOptions(9, 5).max_norm(0.5).norm_type(1.5)},
      {"scale_grad_by_freq", EmbeddingOptions(9, 5).scale_grad_by_freq(true)},
      {"sparse", EmbeddingOptions(9, 5).sparse(true)},
      {"weight", EmbeddingOptions(9, 5)._weight(at::ones({9, 5}))},
  };
  for (const auto& [name, options] : cases) {
    SCOPED_TRACE(name);
    auto stock_options = options;
    if (options._weight().defined()) {
      stock_options._weight(options._weight().clone());
    }
    at::manual_seed(3);
    torch::nn::Embedding stock(stock_options);
    at::manual_seed(3);
    Embedding ours(options);
    EXPECT_EQ(ours->named_parameters().keys(),
              stock->named_parameters().keys());
    EXPECT_TRUE(at::equal(ours->weight(), stock->weight));
    const at::Tensor output = ours(Indices());
    const at::Tensor expected = stock(Indices());
    EXPECT_TRUE(at::equal(output, expected));
    EXPECT_TRUE(at::equal(ours->weight(), stock->weight));
    const at::Tensor seed = at::randn_like(expected);
    output.backward(seed);
    expected.backward(seed);
    EXPECT_EQ(ours->weight().grad().is_sparse(),
              stock->weight.grad().is_sparse());
    EXPECT_TRUE(at::equal(ours->weight().grad().to_dense(),
                          stock->weight.grad().to_dense()));

    at::manual_seed(4);
    stock->reset_parameters();
    at::manual_seed(4);
    ours->reset_parameters();
    EXPECT_TRUE(at::equal(ours->weight(), stock->weight));
  }
}

TEST(EmbeddingTest, RefusesTheOptionsThatTorchRefuses) {
  EXPECT_THROW(Embedding(EmbeddingOptions(9, 5).padding_idx(9)), c10::Error);
  EXPECT_THROW(Embedding(EmbeddingOptions(9, 5)._weight(at::ones({5, 9}))),
               c10::Error);
}

// --- What an adapter adds ----------------------------------------------------

TEST(EmbeddingTest, AnAdapterAddsTheScaledProductToTheWeight) {
  Embedding layer = DoubleEmbedding(EmbeddingOptions(9, 5));
  Adopt(*layer, Options(2));
  Adopt(*layer, Options(3, 1), "style");
  EXPECT_THAT(
      layer->named_parameters().keys(),
      ElementsAre("lora_embedding_A", "lora_embedding_B", "base_layer.weight",
                  "adapters.style.lora_embedding_A",
                  "adapters.style.lora_embedding_B"));
  EXPECT_THAT(layer->lora_A().sizes(), ElementsAre(2, 9));
  EXPECT_THAT(layer->lora_B().sizes(), ElementsAre(5, 2));
  ASSERT_THAT(layer->SetActiveAdapters({{kDefaultAdapter}, {"style", -0.5}}),
              IsOk());
  const at::Tensor weight = layer->weight() + Delta(layer->adapter()) -
                            0.5 * Delta(layer->adapter("style"));
  EXPECT_TRUE(Close(layer(Indices()), Rows(weight, Indices())));
  EXPECT_TRUE(Close(layer(Indices().to(at::kInt)), Rows(weight, Indices())));
}

TEST(EmbeddingTest, GradientsAreThoseOfPlainOperators) {
  for (const bool use_dora : {false, true}) {
    Embedding layer = DoubleEmbedding(EmbeddingOptions(9, 5));
    layer->weight().requires_grad_(false);
    Adopt(*layer, Options(2, 3, use_dora));
    LoraAdapter plain = layer->adapter();
    plain.lora_A = plain.lora_A.detach().clone().requires_grad_();
    plain.lora_B = plain.lora_B.detach().clone().requires_grad_();
    if (use_dora) {
      plain.lora_magnitude =
          plain.lora_magnitude.detach().clone().requires_grad_();
    }
    const at::Tensor expected =
        Rows(AdaptedWeight(layer->weight(), plain), Indices());
    const at::Tensor seed = at::randn_like(expected);
    expected.backward(seed);

    layer(Indices()).backward(seed);
    EXPECT_TRUE(Close(layer->lora_A().grad(), plain.lora_A.grad()));
    EXPECT_TRUE(Close(layer->lora_B().grad(), plain.lora_B.grad()));
    if (use_dora) {
      EXPECT_TRUE(Close(layer->adapter().lora_magnitude.grad(),
                        plain.lora_magnitude.grad()));
    }
    EXPECT_FALSE(layer->weight().grad().defined());
  }
}

// The gradient of lora_embedding_A for the rows of Indices(), with a one for
// each element of the output: s B^T 1 in the column of each lookup.
TEST(EmbeddingTest, TheOptionsHoldForTheGradientOfTheAdapter) {
  struct Case {
    const char* name;
    EmbeddingOptions options;
    std::vector<double> lookups;  // What each row counts for.
  };
  const Case cases[] = {
      {"defaults", EmbeddingOptions(9, 5), {1, 1, 0, 1, 2, 0, 0, 0, 1}},
      {"padding_idx",
       EmbeddingOptions(9, 5).padding_idx(-5),
       {1, 1, 0, 1, 0, 0, 0, 0, 1}},
      {"scale_grad_by_freq",
       EmbeddingOptions(9, 5).scale_grad_by_freq(true),
       {1, 1, 0, 1, 1, 0, 0, 0, 1}},
      {"sparse",
       EmbeddingOptions(9, 5).sparse(true),
       {1, 1, 0, 1, 2, 0, 0, 0, 1}},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE(test.name);
    Embedding layer = DoubleEmbedding(test.options);
    layer->weight().requires_grad_(false);
    Adopt(*layer, Options(2));
    layer(Indices()).sum().backward();
    const at::Tensor gradient = layer->lora_A().grad();
    EXPECT_FALSE(gradient.is_sparse());
    EXPECT_TRUE(Close(gradient, at::outer(1.5 * layer->lora_B().sum(0),
                                          at::tensor(test.lookups))));
  }
}

TEST(EmbeddingTest, DropoutHasNoEffect) {
  for (const bool use_dora : {false, true}) {
    Embedding layer = DoubleEmbedding(EmbeddingOptions(9, 5));
    LoraAdapterOptions options = Options(2, 3, use_dora);
    options.dropout = 0.5;
    Adopt(*layer, options);
    const at::Tensor weight = AdaptedWeight(layer->weight(), layer->adapter());
    EXPECT_TRUE(layer->is_training());
    EXPECT_TRUE(Close(layer(Indices()), Rows(weight, Indices())));
  }
}

TEST(EmbeddingTest, RefusesAnAdapterWithMaxNorm) {
  Embedding layer(EmbeddingOptions(9, 5).max_norm(1));
  EXPECT_THAT(layer->EmptyAdapter(Options(2)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("leave max_norm away")));
}

TEST(EmbeddingTest, ABfloat16BaseWithAFloat32AdapterGivesBfloat16) {
  Embedding layer(9, 5);
  layer->to(at::kBFloat16);
  LoraAdapterOptions options = Options(2);
  options.dtype = at::kFloat;
  Adopt(*layer, options);
  const at::Tensor output = layer(Indices());
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  output.sum().backward();
  EXPECT_EQ(layer->lora_A().grad().scalar_type(), at::kFloat);
}

// --- What needs the values of the base weight --------------------------------

TEST(EmbeddingTest, MergingIsTheSameAndUnmergingRestoresTheBits) {
  for (const bool use_dora : {false, true}) {
    Embedding layer = DoubleEmbedding(EmbeddingOptions(9, 5).padding_idx(4));
    Adopt(*layer, Options(2, 3, use_dora));
    layer->eval();
    const at::Tensor before = layer->weight().detach().clone();
    const at::Tensor expected = layer(Indices());
    const at::Tensor merged = AdaptedWeight(before, layer->adapter());
    EXPECT_TRUE(Close(layer->MergedWeightMatrix(), merged.t()));
    ASSERT_THAT(layer->Merge(), IsOk());
    EXPECT_TRUE(Close(layer->weight(), merged));
    EXPECT_TRUE(layer->weight().is_contiguous());
    EXPECT_TRUE(Close(layer(Indices()), expected));
    ASSERT_THAT(layer->Unmerge(), IsOk());
    EXPECT_TRUE(at::equal(layer->weight(), before));
    EXPECT_TRUE(at::equal(layer(Indices()), expected));
  }
}

// As EnableLoraTraining() starts it: A is zero, and B is not.
TEST(EmbeddingTest, PissaAndOloraMoveAPartOfTheWeightIntoTheAdapter) {
  for (const auto initialization : {config::AdapterInitialization::kPissa,
                                    config::AdapterInitialization::kOlora}) {
    Embedding layer = DoubleEmbedding(EmbeddingOptions(9, 5));
    const at::Tensor weight = layer->weight().detach().clone();
    LoraAdapterOptions options = Options(2);
    options.initialization = initialization;
    auto adapter = layer->EmptyAdapter(options);
    ASSERT_THAT(adapter, IsOk());
    adapter->lora_A.zero_();
    adapter->lora_B.normal_();
    ASSERT_THAT(layer->AdoptAdapter(*adapter), IsOk());
    ASSERT_THAT(layer->InitializeFromBase(), IsOk());
    EXPECT_TRUE(Close(layer->weight() + Delta(layer->adapter()), weight));
    EXPECT_FALSE(at::allclose(layer->weight(), weight));
    EXPECT_TRUE(Close(layer(Indices()), Rows(weight, Indices())));
    // Once more changes nothing.
    const at::Tensor residual = layer->weight().detach().clone();
    ASSERT_THAT(layer->InitializeFromBase(), IsOk());
    EXPECT_TRUE(at::equal(layer->weight(), residual));
  }
}

TEST(EmbeddingTest, ACloneHasItsOwnEqualState) {
  Embedding layer(9, 5);
  Adopt(*layer, Options(2, 3, /*use_dora=*/true));
  const at::Tensor output = layer(Indices());
  const auto copy = std::dynamic_pointer_cast<EmbeddingImpl>(layer->clone());
  ASSERT_NE(copy, nullptr);
  EXPECT_TRUE(at::equal(copy->forward(Indices()), output));
  for (at::Tensor parameter : copy->parameters()) parameter.detach().fill_(1);
  EXPECT_FALSE(at::equal(copy->forward(Indices()), output));
  EXPECT_TRUE(at::equal(layer(Indices()), output));
}

// --- In a model --------------------------------------------------------------

struct Model : torch::nn::Module {
  Model() { register_module("tokens", tokens); }
  Embedding tokens{500, 64};
};

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 4;
  config.alpha = 8;
  config.target_modules = {"tokens"};
  return config;
}

TEST(EmbeddingTest, EnablesInAModel) {
  Model model;
  const at::Tensor base_output = model.tokens(Indices());
  LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                            EnableLoraTraining(model, Config()));
  EXPECT_THAT(model.named_parameters().keys(),
              ElementsAre("tokens.lora_embedding_A", "tokens.lora_embedding_B",
                          "tokens.base_layer.weight"));
  EXPECT_EQ(training.checkpoint_key_aliases.Resolve("tokens.weight"),
            "tokens.base_layer.weight");
  EXPECT_TRUE(at::equal(model.tokens(Indices()), base_output));

  // A is zero, B is normal with the standard deviation 1.
  EXPECT_FALSE(model.tokens->lora_A().any().item<bool>());
  const at::Tensor b = model.tokens->lora_B().detach();
  EXPECT_NEAR(b.mean().item<double>(), 0, 0.2);
  EXPECT_NEAR(b.std().item<double>(), 1, 0.15);
}

TEST(EmbeddingTest, IsSavedWithTheKeysAndShapesOfPeft) {
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
  const std::string prefix = "base_model.model.tokens.";
  EXPECT_THAT(found,
              UnorderedElementsAre(
                  Pair(prefix + "lora_embedding_A", ElementsAre(4, 500)),
                  Pair(prefix + "lora_embedding_B", ElementsAre(64, 4)),
                  Pair(prefix + "lora_magnitude_vector", ElementsAre(64))));

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
