#include "trainer.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "ATen/Functions.h"
#include "absl/base/config.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "model.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"

// The language and the dependencies are this team's: trainer_lora is compiled
// as C++17 and with other releases by itself.
static_assert(__cplusplus >= 202002L);
static_assert(ABSL_LTS_RELEASE_VERSION == 20260107);
static_assert(std::is_same_v<absl::string_view, std::string_view>);
#ifndef TEAM_GOOGLETEST
#error "com_google_googletest is not the one in WORKSPACE"
#endif

namespace trainer_team {
namespace {

namespace distributed = ::trainer_lora::distributed;
using ::testing::UnorderedElementsAre;

using State = std::map<std::string, at::Tensor>;

State StateOf(const torch::nn::Module& model) {
  State state;
  for (const auto& item : model.named_parameters()) {
    state[item.key()] = item.value().detach();
  }
  for (const auto& item : model.named_buffers()) {
    state[item.key()] = item.value();
  }
  return state;
}

class TrainerTest : public testing::Test {
 protected:
  TrainerTest() {
    std::ofstream(yaml_) << "models:\n"
                            "  student:\n"
                            "    trainable: true\n"
                            "    lora: {enable: true, rank: 2}\n";
    std::vector<distributed::TensorView> tensors;
    for (const auto& [name, tensor] : base_) {
      tensors.push_back({name, distributed::TensorDtype::kF32,
                         tensor.sizes().vec(), tensor.const_data_ptr()});
    }
    const absl::Status written =
        distributed::WriteSafetensors(checkpoint_, tensors, {});
    EXPECT_TRUE(written.ok()) << written;
  }

  // One rank a thread, each with an equal part of the data.
  std::vector<TrainingResult> TrainOnRanks(int world_size) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::vector<TrainingResult> results(world_size);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.emplace_back([&, rank] {
        auto group = distributed::CreateGlooProcessGroup(
            store, rank, world_size, {.bind_address = "127.0.0.1"});
        ASSERT_TRUE(group.ok()) << group.status();
        auto result =
            Train(yaml_, checkpoint_, *group, input_.chunk(world_size)[rank],
                  target_.chunk(world_size)[rank]);
        ASSERT_TRUE(result.ok()) << result.status();
        results[rank] = *result;
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return results;
  }

  const std::string yaml_ = testing::TempDir() + "train.yaml";
  const std::string checkpoint_ = testing::TempDir() + "model.safetensors";
  const State base_ = StateOf(*Denoiser());
  const at::Tensor input_ = at::randn({16, 8});
  const at::Tensor target_ = at::randn({16, 4});
};

TEST_F(TrainerTest, TwoRanksTrainAsOneDoesOnAllOfTheData) {
  const std::vector<TrainingResult> one = TrainOnRanks(1);
  const std::vector<TrainingResult> two = TrainOnRanks(2);
  ASSERT_FALSE(HasFailure());
  const State expected = StateOf(*one[0].model);
  const State first = StateOf(*two[0].model);
  const State second = StateOf(*two[1].model);
  for (const auto& [name, tensor] : expected) {
    EXPECT_TRUE(at::allclose(first.at(name), tensor, 1e-4, 1e-6)) << name;
    EXPECT_TRUE(at::equal(first.at(name), second.at(name))) << name;
  }
  EXPECT_LT(one[0].losses[1], one[0].losses[0]);
}

TEST_F(TrainerTest, OnlyAdaptersChange) {
  const std::vector<TrainingResult> results = TrainOnRanks(2);
  ASSERT_FALSE(HasFailure());
  State state = StateOf(*results[0].model);
  const State loaded = {
      {"to_q.base_layer.weight", base_.at("to_q.weight")},
      {"to_q.base_layer.scale", base_.at("to_q.scale")},
      {"to_out.base_layer.weight", base_.at("to_out.weight")},
      {"to_out.base_layer.bias", base_.at("to_out.bias")},
      {"head.weight", base_.at("head.weight")},
      {"head.bias", base_.at("head.bias")},
  };
  for (const auto& [name, tensor] : loaded) {
    EXPECT_TRUE(at::equal(state.at(name), tensor)) << name;
    state.erase(name);
  }
  // lora_B starts with zeros.
  EXPECT_NE(state.at("to_q.lora_B").count_nonzero().item<int64_t>(), 0);
  EXPECT_NE(state.at("to_out.lora_B").count_nonzero().item<int64_t>(), 0);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : state) names.push_back(name);
  EXPECT_THAT(names, UnorderedElementsAre("to_q.lora_A", "to_q.lora_B",
                                          "to_out.lora_A", "to_out.lora_B"));
}

}  // namespace
}  // namespace trainer_team
