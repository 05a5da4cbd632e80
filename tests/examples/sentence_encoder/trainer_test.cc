// The example on the real model and text: one rank against two.
#include "examples/sentence_encoder/trainer.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "absl/status/status.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/device_mesh.h"
#include "distributed/process_group.h"
#include "examples/sentence_encoder/bert_encoder.h"
#include "examples/sentence_encoder/sentence_batch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "tests/testutil/thread_ranks.h"

namespace trainer_lora::examples {
namespace {

using ::testing::ElementsAre;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

TrainingFiles Files() {
  return {RunfilePath("minilm/config.json"),
          RunfilePath("minilm/model.safetensors"),
          RunfilePath("minilm/vocab.txt"),
          RunfilePath("wordnet/wordnet/data.noun")};
}

TrainingConfig SmallConfig() {
  TrainingConfig config;
  config.lora.enable = true;
  config.lora.rank = 4;
  config.lora.target_modules = {"query", "value"};
  config.seed = 42;
  config.held_out = 10;
  config.batch_size = 4;
  return config;
}

std::vector<at::Tensor> AdapterValues(Trainer& trainer) {
  std::vector<at::Tensor> values;
  for (const auto& item : lora::TrainableParameters(*trainer.encoder())) {
    values.push_back(item.parameter.detach().clone());
  }
  return values;
}

void ExpectBitwiseEqual(const std::vector<at::Tensor>& a,
                        const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST(TrainerTest, AtStepZeroTheOutputIsBitwiseTheBaseModels) {
  LORA_ASSERT_OK_AND_ASSIGN(const auto trainer,
                            Trainer::Create(SmallConfig(), Files(), nullptr));
  LORA_ASSERT_OK_AND_ASSIGN(const BertConfig bert_config,
                            BertConfig::Load(Files().model_config));
  BertEncoder base(bert_config);
  distributed::LoadCheckpointOptions options;
  options.ignored_patterns = {"embeddings\\.position_ids", "pooler\\..*"};
  ASSERT_THAT(distributed::LoadCheckpoint(*base, Files().checkpoint, options),
              IsOk());
  const std::vector<std::vector<int64_t>> sentences = {
      {101, 4937, 102}, {101, 1037, 2312, 10768, 8463, 2063, 102}};
  EXPECT_TRUE(at::equal(EmbedSentences(trainer->encoder(), sentences, 0),
                        EmbedSentences(base, sentences, 0)));
}

TEST(TrainerTest, TwoRanksEqualOneRankThatAccumulatesTwoMicroBatchesBitwise) {
  constexpr int kSteps = 2;
  at::set_num_threads(1);
  TrainingConfig accumulating = SmallConfig();
  accumulating.gradient_accumulation_steps = 2;
  LORA_ASSERT_OK_AND_ASSIGN(const auto single,
                            Trainer::Create(accumulating, Files(), nullptr));
  const std::vector<at::Tensor> initial = AdapterValues(*single);
  std::vector<StepResult> expected;
  for (int step = 0; step < kSteps; ++step) {
    LORA_ASSERT_OK_AND_ASSIGN(const StepResult result, single->Step());
    expected.push_back(result);
  }
  const std::vector<at::Tensor> trained = AdapterValues(*single);
  for (size_t i = 0; i < trained.size(); ++i) {
    EXPECT_FALSE(at::equal(trained[i], initial[i])) << "unchanged: " << i;
  }

  std::vector<std::vector<at::Tensor>> adapters(2);
  RunRanks(2, [&](int rank, Group group) {
    at::set_num_threads(1);
    LORA_ASSERT_OK_AND_ASSIGN(
        auto mesh, distributed::DeviceMesh::Create(std::move(group)));
    LORA_ASSERT_OK_AND_ASSIGN(const auto trainer,
                              Trainer::Create(SmallConfig(), Files(), mesh));
    for (const StepResult& step : expected) {
      LORA_ASSERT_OK_AND_ASSIGN(const StepResult result, trainer->Step());
      EXPECT_EQ(result.grad_norm, step.grad_norm);
      EXPECT_EQ(result.pairs, step.pairs);
      EXPECT_NEAR(result.loss, step.loss, 1e-9);
    }
    adapters[rank] = AdapterValues(*trainer);
  });
  ExpectBitwiseEqual(adapters[0], adapters[1]);
  ExpectBitwiseEqual(adapters[0], trained);
}

// Of two nouns one or two can be held out.
TEST(TrainerTest, RefusesWhatLeavesNothingToTrainOrIsLongerThanTheModelTakes) {
  const testutil::TemporaryFolder folder;
  TrainingFiles files = Files();
  files.wordnet_nouns = folder.Path("data.noun");
  testutil::WriteBytes(files.wordnet_nouns,
                       "00000001 03 n 01 cat 0 000 | an animal that purrs  \n"
                       "00000002 03 n 01 dog 0 000 | an animal that barks  \n");
  TrainingConfig config = SmallConfig();
  config.held_out = 2;
  EXPECT_THAT(Trainer::Create(config, files, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "training.held_out must be below the number of "
                       "different nouns in " +
                           files.wordnet_nouns +
                           ", or none is left to train on; got 2"));
  config.held_out = 1;
  config.max_length = 513;
  EXPECT_THAT(Trainer::Create(config, files, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       "training.max_length must be at most 512, the model's "
                       "max_position_embeddings; got 513"));
  config.max_length = 512;
  EXPECT_THAT(Trainer::Create(config, files, nullptr), IsOk());
}

}  // namespace
}  // namespace trainer_lora::examples
