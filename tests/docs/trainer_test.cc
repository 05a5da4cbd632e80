// Compiles and runs the code of docs/add_lora_to_your_trainer.md.
#include "tests/docs/trainer.inc"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/sharded_saver.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace {

using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunRanks;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

absl::StatusOr<Mesh> MeshOf(const GroupPtr& group, int64_t data,
                            int64_t tensor) {
  return distributed::DeviceMesh::Create(group,
                                         {{"data", data}, {"tensor", tensor}});
}

// The same in every call.
at::Tensor Batch(int64_t index) {
  return at::sin(at::arange(8 * 16, at::kFloat) + index).view({8, 16});
}

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 4;
  config.target_modules = {"up", "down"};
  return config;
}

void SaveBase(const std::string& path) {
  RunRanks(1, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const Mesh mesh, MeshOf(group, 1, 1));
    ASSERT_THAT(distributed::SaveCheckpoint(*Transformer(mesh), path, {}),
                IsOk());
  });
}

TEST(TrainerGuideTest, RanksTrainSaveAndResumeOnAnotherMesh) {
  testutil::TemporaryFolder folder;
  SaveBase(folder.Path("base"));
  double trained_loss = 0;
  RunRanks(4, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const Mesh mesh, MeshOf(group, 2, 2));
    LORA_ASSERT_OK_AND_ASSIGN(Transformer model,
                              LoadModel(Config(), folder.Path("base"), mesh));
    LORA_ASSERT_OK_AND_ASSIGN(const double before, Validate(model, Batch(0)));
    std::vector<at::Tensor> batches;
    for (int64_t i = 0; i < 10; ++i) {
      batches.push_back(Batch(2 * i + mesh->coordinate(0)));
    }
    ASSERT_THAT(Train(model, mesh, /*lora_plus_ratio=*/2, batches), IsOk());
    LORA_ASSERT_OK_AND_ASSIGN(const double after, Validate(model, Batch(0)));
    EXPECT_LT(after, 0.9 * before);
    ASSERT_THAT(Save(model, mesh, folder.Path("adapter")), IsOk());
    if (rank == 0) trained_loss = after;
  });
  RunRanks(2, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const Mesh mesh, MeshOf(group, 1, 2));
    LORA_ASSERT_OK_AND_ASSIGN(Transformer model,
                              LoadModel(Config(), folder.Path("base"), mesh));
    ASSERT_THAT(Resume(model, mesh, folder.Path("adapter")), IsOk());
    LORA_ASSERT_OK_AND_ASSIGN(const double resumed, Validate(model, Batch(0)));
    EXPECT_NEAR(resumed, trained_loss, 1e-5);
  });
}

// As the guide's loop says: they skip the step together, and nothing is left of
// it.
TEST(TrainerGuideTest, AllRanksSkipAStepWhoseGradientIsNotFiniteOnOne) {
  testutil::TemporaryFolder folder;
  SaveBase(folder.Path("base"));
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const Mesh mesh, MeshOf(group, 2, 1));
    // The adapters that these batches train.
    const auto trained = [&](const std::vector<at::Tensor>& batches) {
      const Transformer model =
          LoadModel(Config(), folder.Path("base"), mesh).value();
      EXPECT_THAT(Train(model, mesh, /*lora_plus_ratio=*/2, batches), IsOk());
      std::vector<at::Tensor> values;
      for (const auto& item : lora::LoraParameters(*model)) {
        values.push_back(item.parameter.detach().flatten());
      }
      return at::cat(values);
    };
    const at::Tensor first = Batch(rank);
    const at::Tensor last = Batch(2 + rank);
    for (const double bad : {INFINITY, NAN}) {
      const at::Tensor broken =
          rank == 1 ? at::full_like(first, bad) : Batch(4);
      EXPECT_TRUE(
          at::equal(trained({first, broken, last}), trained({first, last})));
    }
  });
}

}  // namespace
