// The oracle for the numbers is transformers' BertModel:
// tests/parity/make_encoder_fixture.py wrote what it makes of real sentences.
#include "examples/sentence_encoder/bert_encoder.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/meta_device.h"
#include "examples/sentence_encoder/sentence_batch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"

namespace trainer_lora::examples {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::distributed::SafetensorsFile;
using ::trainer_lora::distributed::TensorDtype;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::StatusIs;

constexpr double kTolerance = 1e-5;

at::Tensor ReadTensor(const SafetensorsFile& file, const std::string& name) {
  const auto* info = file.Find(name);
  TORCH_CHECK(info != nullptr, "the fixture has no ", name);
  at::Tensor tensor = at::empty(
      info->shape, info->dtype == TensorDtype::kI64 ? at::kLong : at::kFloat);
  const absl::Status status = file.Read(
      *info, 0,
      absl::MakeSpan(static_cast<char*>(tensor.data_ptr()), info->byte_size));
  TORCH_CHECK(status.ok(), status.ToString());
  return tensor;
}

double LargestDifference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max().item<double>();
}

BertConfig TinyConfig() {
  BertConfig config;
  config.vocab_size = 20;
  config.hidden_size = 8;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.intermediate_size = 16;
  config.max_position_embeddings = 10;
  config.type_vocab_size = 2;
  config.layer_norm_eps = 1e-12;
  return config;
}

distributed::LoadCheckpointOptions MiniLmOptions() {
  distributed::LoadCheckpointOptions options;
  options.ignored_patterns = {R"(embeddings\.position_ids)", R"(pooler\..*)"};
  return options;
}

class MiniLmTest : public testing::Test {
 protected:
  // The real weights, loaded once for all tests: none of them changes any.
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    auto config = BertConfig::Load(RunfilePath("minilm/config.json"));
    ASSERT_THAT(config, IsOk());
    {
      const distributed::MetaDeviceGuard guard;
      encoder_ = new BertEncoder(*config);
    }
    auto report = distributed::LoadCheckpoint(
        **encoder_, RunfilePath("minilm/model.safetensors"), MiniLmOptions());
    ASSERT_THAT(report, IsOk());
    report_ = new distributed::LoadCheckpointReport(*std::move(report));
    auto fixture = SafetensorsFile::Open(
        RunfilePath("trainer_lora/tests/testdata/encoder_fixture.safetensors"));
    ASSERT_THAT(fixture, IsOk());
    fixture_ = new SafetensorsFile(*std::move(fixture));
  }
  static void TearDownTestSuite() {
    delete fixture_;
    delete report_;
    delete encoder_;
    fixture_ = nullptr;
    report_ = nullptr;
    encoder_ = nullptr;
  }

  static SentenceBatch FixtureBatch() {
    return {ReadTensor(*fixture_, "input_ids"),
            ReadTensor(*fixture_, "attention_mask")};
  }

  static BertEncoder* encoder_;
  static distributed::LoadCheckpointReport* report_;
  static SafetensorsFile* fixture_;
};

BertEncoder* MiniLmTest::encoder_ = nullptr;
distributed::LoadCheckpointReport* MiniLmTest::report_ = nullptr;
SafetensorsFile* MiniLmTest::fixture_ = nullptr;

TEST_F(MiniLmTest, HasHuggingFacesNames) {
  // The checkpoint's 104 tensors, without position_ids and two of the pooler.
  EXPECT_EQ(report_->loaded.size(), 101);
  EXPECT_THAT(report_->initialized, IsEmpty());
  EXPECT_THAT(report_->ignored,
              UnorderedElementsAre("embeddings.position_ids",
                                   "pooler.dense.bias", "pooler.dense.weight"));
  EXPECT_THAT(report_->loaded,
              Contains("encoder.layer.5.attention.self.query.weight"));
}

TEST_F(MiniLmTest, HidesPaddingAndAgreesWithTransformers) {
  const c10::NoGradGuard no_grad;
  const SentenceBatch batch = FixtureBatch();
  const at::Tensor expected = ReadTensor(*fixture_, "hidden");
  const at::Tensor mask = batch.attention_mask.narrow(0, 0, expected.size(0));
  // The first sentence is mostly padding, so this needs the mask.
  ASSERT_EQ(mask[0].sum().item<int64_t>(), 3);
  const at::Tensor hidden = (*encoder_)->forward(
      batch.input_ids.narrow(0, 0, expected.size(0)), mask);
  EXPECT_LT(LargestDifference(hidden * mask.unsqueeze(-1), expected),
            kTolerance);
}

TEST_F(MiniLmTest, EmbedsRealSentencesAsTransformersDoes) {
  const c10::NoGradGuard no_grad;
  const at::Tensor expected = ReadTensor(*fixture_, "embeddings");
  const at::Tensor embeddings = EmbedBatch(*encoder_, FixtureBatch());
  ASSERT_EQ(embeddings.sizes(), expected.sizes());
  EXPECT_LT(LargestDifference(embeddings, expected), kTolerance);
}

TEST_F(MiniLmTest, GivesTheSameBitsEachTime) {
  const c10::NoGradGuard no_grad;
  const SentenceBatch batch = FixtureBatch();
  EXPECT_TRUE(
      at::equal(EmbedBatch(*encoder_, batch), EmbedBatch(*encoder_, batch)));
}

TEST_F(MiniLmTest, EmbedsManySentencesInTheirOrder) {
  const SentenceBatch batch = FixtureBatch();
  std::vector<std::vector<int64_t>> sentences;
  for (int64_t i = 0; i < batch.input_ids.size(0); ++i) {
    const auto* ids = batch.input_ids[i].data_ptr<int64_t>();
    sentences.emplace_back(ids,
                           ids + batch.attention_mask[i].sum().item<int64_t>());
  }
  // Seven does not divide the number of sentences.
  const at::Tensor embeddings =
      EmbedSentences(*encoder_, sentences, /*pad_id=*/0, /*batch_size=*/7);
  EXPECT_LT(LargestDifference(embeddings, ReadTensor(*fixture_, "embeddings")),
            kTolerance);
  EXPECT_FALSE(embeddings.requires_grad());
}

TEST(PadSentencesTest, FillsUpToTheLongest) {
  const SentenceBatch batch = PadSentences({{5, 6, 7}, {8}}, /*pad_id=*/9);
  EXPECT_TRUE(at::equal(batch.input_ids,
                        at::tensor({5, 6, 7, 8, 9, 9}, at::kLong).view({2, 3})))
      << batch.input_ids;
  EXPECT_TRUE(at::equal(batch.attention_mask,
                        at::tensor({1, 1, 1, 1, 0, 0}, at::kLong).view({2, 3})))
      << batch.attention_mask;
}

TEST(BertEncoderTest, SendsGradientsToEachParameterThatTakesPart) {
  BertEncoder encoder(TinyConfig());
  const SentenceBatch batch = PadSentences({{1, 2, 3}, {4, 5}}, 0);
  encoder->forward(batch.input_ids, batch.attention_mask)
      .sin()
      .sum()
      .backward();
  for (const auto& parameter : encoder->named_parameters()) {
    EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
  }
}

TEST(BertEncoderTest, RefusesAnInputThatDoesNotFit) {
  BertEncoder encoder(TinyConfig());
  const at::Tensor ids = at::zeros({1, 11}, at::kLong);
  EXPECT_THROW(encoder->forward(ids, at::ones_like(ids)), c10::Error);
  const at::Tensor fits = at::zeros({1, 3}, at::kLong);
  EXPECT_THROW(encoder->forward(fits, at::ones({1, 2}, at::kLong)), c10::Error);
}

TEST(MeanPoolAndNormalizeTest, LeavesOutPadding) {
  const at::Tensor hidden =
      at::tensor({1., 0., 5., 8., 70., 90.}, at::kFloat).view({1, 3, 2});
  const at::Tensor mask = at::tensor({1, 1, 0}, at::kLong).view({1, 3});
  // The mean is (3, 4).
  EXPECT_LT(LargestDifference(MeanPoolAndNormalize(hidden, mask),
                              at::tensor({0.6, 0.8}, at::kFloat).view({1, 2})),
            1e-6);
}

nlohmann::json GoodConfig() {
  return {{"model_type", "bert"},
          {"hidden_act", "gelu"},
          {"position_embedding_type", "absolute"},
          {"vocab_size", 20},
          {"hidden_size", 8},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2},
          {"intermediate_size", 16},
          {"max_position_embeddings", 10},
          {"type_vocab_size", 2},
          {"layer_norm_eps", 1e-12}};
}

std::string WriteConfig(const std::string& name, const std::string& content) {
  const std::string path = testing::TempDir() + "/" + name;
  std::ofstream(path) << content;
  return path;
}

TEST(BertConfigTest, ReadsEveryMember) {
  LORA_ASSERT_OK_AND_ASSIGN(
      const BertConfig config,
      BertConfig::Load(WriteConfig("good.json", GoodConfig().dump())));
  EXPECT_EQ(config.vocab_size, 20);
  EXPECT_EQ(config.hidden_size, 8);
  EXPECT_EQ(config.num_hidden_layers, 2);
  EXPECT_EQ(config.num_attention_heads, 2);
  EXPECT_EQ(config.intermediate_size, 16);
  EXPECT_EQ(config.max_position_embeddings, 10);
  EXPECT_EQ(config.type_vocab_size, 2);
  EXPECT_EQ(config.layer_norm_eps, 1e-12);
}

TEST(BertConfigTest, NamesTheKeyThatIsWrong) {
  const struct {
    std::string key;
    nlohmann::json value;
    std::string complaint;
  } kCases[] = {
      {"hidden_size", "8", "positive integer, got \"8\""},
      {"hidden_size", 8.5, "positive integer, got 8.5"},
      {"hidden_size", true, "positive integer, got true"},
      {"hidden_size", UINT64_MAX, "positive integer"},
      {"num_hidden_layers", 0, "positive integer, got 0"},
      {"vocab_size", -1, "positive integer, got -1"},
      {"layer_norm_eps", "tiny", "positive number"},
      {"layer_norm_eps", 0, "positive number"},
      {"hidden_act", "relu", "must be \"gelu\" here, got \"relu\""},
      {"position_embedding_type", "relative_key", "absolute"},
      {"model_type", "roberta", "bert"},
      {"num_attention_heads", 3, "must divide hidden_size, 8, got 3"},
  };
  for (const auto& test_case : kCases) {
    nlohmann::json json = GoodConfig();
    json[test_case.key] = test_case.value;
    EXPECT_THAT(BertConfig::Load(WriteConfig("wrong.json", json.dump())),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("wrong.json: " + test_case.key + " "),
                               HasSubstr(test_case.complaint))));
  }
}

TEST(BertConfigTest, NamesAKeyThatIsMissing) {
  const nlohmann::json good = GoodConfig();
  for (const auto& [key, unused] : good.items()) {
    nlohmann::json json = good;
    json.erase(key);
    EXPECT_THAT(BertConfig::Load(WriteConfig("missing.json", json.dump())),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("missing.json: " + key + " is missing")));
  }
}

TEST(BertConfigTest, TellsAMissingFileFromABrokenOne) {
  EXPECT_THAT(BertConfig::Load("no_such.json"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no_such.json")));
  for (const char* content : {"", "{\"vocab_size\": ", "[1, 2]"}) {
    EXPECT_THAT(
        BertConfig::Load(WriteConfig("broken.json", content)),
        StatusIs(absl::StatusCode::kDataLoss, HasSubstr("broken.json")));
  }
}

}  // namespace
}  // namespace trainer_lora::examples
