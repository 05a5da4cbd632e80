// The contract of sync_replicated_lora_gradients on adapted models; the numbers
// of the sync itself are in tests/distributed/gradient_sync_test.cc.
#include "lora/lora_gradient_sync.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "absl/status/status.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "lora/parallel_linear.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

struct Model : torch::nn::Module {
  Model() {
    register_module("to_q", to_q);
    register_module("to_v", to_v);
  }
  ReplicatedLinear to_q{5, 7};
  ReplicatedLinear to_v{5, 3};
};

std::unique_ptr<Model> AdaptedModel(int64_t seed = 1,
                                    std::vector<std::string> targets = {
                                        "to_q", "to_v"}) {
  auto model = std::make_unique<Model>();
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = std::move(targets);
  config.seed = seed;
  EXPECT_THAT(EnableLoraTraining(*model, config), IsOk());
  return model;
}

std::shared_ptr<const distributed::DeviceMesh> MeshOf(Group group) {
  auto mesh = distributed::DeviceMesh::Create(std::move(group));
  EXPECT_THAT(mesh, IsOk());
  return *mesh;
}

void SetGradient(at::Tensor parameter, double value) {
  parameter.mutable_grad() = at::full_like(parameter.detach(), value);
}

void ExpectGradient(const at::Tensor& parameter, double value) {
  ASSERT_TRUE(parameter.grad().defined());
  EXPECT_TRUE(
      at::equal(parameter.grad(), at::full_like(parameter.detach(), value)))
      << parameter.grad();
}

TEST(SyncReplicatedLoraGradientsTest,
     WithoutAProcessGroupNothingIsSynchronized) {
  const auto model = AdaptedModel();
  SetGradient(model->to_q->lora_A(), 4);
  LORA_ASSERT_OK_AND_ASSIGN(const int64_t synchronized,
                            SyncReplicatedLoraGradients(*model));
  EXPECT_EQ(synchronized, 0);
  ExpectGradient(model->to_q->lora_A(), 4);
  EXPECT_FALSE(model->to_v->lora_A().grad().defined());
}

TEST(SyncReplicatedLoraGradientsTest, ZeroFillsRanksWithoutGradient) {
  RunRanks(2, [](int rank, Group group) {
    const auto model = AdaptedModel();
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    // Each rank's loss used another layer.
    SetGradient(rank == 0 ? model->to_q->lora_A() : model->to_v->lora_B(), 4);
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t synchronized,
                              SyncReplicatedLoraGradients(*model));
    EXPECT_EQ(synchronized, 4);
    ExpectGradient(model->to_q->lora_A(), 2);
    ExpectGradient(model->to_v->lora_B(), 2);
    ExpectGradient(model->to_q->lora_B(), 0);
    EXPECT_FALSE(model->to_q->weight().grad().defined());
  });
}

TEST(SyncReplicatedLoraGradientsTest, AMicroBatchCanBeAccumulatedOnTop) {
  RunRanks(2, [](int rank, Group group) {
    const auto model = AdaptedModel();
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    const at::Tensor lora_A = model->to_q->lora_A();
    SetGradient(lora_A, rank == 0 ? 1 : 3);
    ASSERT_THAT(SyncReplicatedLoraGradients(*model), IsOk());
    ExpectGradient(lora_A, 2);
    ASSERT_THAT(SyncReplicatedLoraGradients(*model), IsOk());
    ExpectGradient(lora_A, 2);  // a second sync changes nothing
    lora_A.mutable_grad().add_(rank == 0 ? 2 : 4);
    ASSERT_THAT(SyncReplicatedLoraGradients(*model), IsOk());
    ExpectGradient(lora_A, 5);
  });
}

TEST(SyncReplicatedLoraGradientsTest, SkipsParametersThatDoNotRequireGrad) {
  RunRanks(2, [](int, Group group) {
    const auto model = AdaptedModel();
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    model->to_q->lora_A().set_requires_grad(false);
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t synchronized,
                              SyncReplicatedLoraGradients(*model));
    EXPECT_EQ(synchronized, 3);
    EXPECT_FALSE(model->to_q->lora_A().grad().defined());
  });
}

// Data-parallel training equals training on the whole batch in one process.
TEST(SyncReplicatedLoraGradientsTest, EqualsOneProcessOnTheWholeBatch) {
  constexpr int64_t kWorldSize = 4;
  constexpr int64_t kAccumulation = 3;
  const at::Tensor inputs =
      at::randn({kWorldSize * kAccumulation, 5}, at::kDouble);
  const at::Tensor weight = at::randn({7, 5}, at::kDouble);
  const at::Tensor lora_B = at::randn({7, 2}, at::kDouble);
  const auto make_model = [&] {
    auto model = AdaptedModel();
    model->to(at::kDouble);
    model->to_q->weight().detach().copy_(weight);
    model->to_q->bias().detach().zero_();
    model->to_q->lora_B().detach().copy_(lora_B);
    return model;
  };
  const auto whole = make_model();
  whole->to_q(inputs).pow(2).sum(1).mean().backward();

  RunRanks(kWorldSize, [&](int rank, Group group) {
    const auto model = make_model();
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    for (int64_t i = 0; i < kAccumulation; ++i) {
      const at::Tensor input = inputs.narrow(0, rank * kAccumulation + i, 1);
      (model->to_q(input).pow(2).sum(1).mean() / double{kAccumulation})
          .backward();
    }
    ASSERT_THAT(SyncReplicatedLoraGradients(*model), IsOk());
    for (const auto& [ours, expected] :
         {std::make_pair(model->to_q->lora_A(), whole->to_q->lora_A()),
          std::make_pair(model->to_q->lora_B(), whole->to_q->lora_B())}) {
      EXPECT_TRUE(at::allclose(ours.grad(), expected.grad(), 1e-12, 1e-12));
    }
  });
}

TEST(ReplicateLoraParametersTest, EveryRankStartsWithTheValuesOfRankZero) {
  RunRanks(3, [](int rank, Group group) {
    const auto model = AdaptedModel(/*seed=*/rank);
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    const auto expected = AdaptedModel(/*seed=*/0);
    EXPECT_TRUE(at::equal(model->to_q->lora_A(), expected->to_q->lora_A()));
    ASSERT_TRUE(model->to_q->ParameterLayoutOf("lora_A", 1).has_value());
    EXPECT_TRUE(model->to_q->ParameterLayoutOf("lora_B", 1)
                    ->placements[0]
                    .is_replicate());
    EXPECT_TRUE(model->to_q->lora_A().requires_grad());
  });
}

// As where the processors of ranks decompose a weight differently.
TEST(ReplicateLoraParametersTest, WhatPissaTookOutIsThatOfRankZero) {
  RunRanks(3, [](int rank, Group group) {
    Model model;
    for (auto& parameter : model.parameters()) {
      const at::NoGradGuard no_grad;
      parameter.copy_(at::arange(parameter.numel())
                          .view(parameter.sizes())
                          .to(at::kFloat)
                          .sin());
    }
    const at::Tensor original = model.to_q->weight().detach().clone();
    config::LoraConfig config;
    config.enable = true;
    config.rank = 2;
    config.target_modules = {"to_q"};
    config.initialization = config::AdapterInitialization::kPissa;
    ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
    ReplicatedLinear& layer = model.to_q;
    const at::Tensor tensors[] = {
        layer->weight().detach(), layer->lora_A().detach(),
        layer->lora_B().detach(), layer->InitialFactors().lora_A,
        layer->InitialFactors().lora_B};
    std::vector<at::Tensor> of_rank_zero;
    for (const at::Tensor& tensor : tensors) {
      of_rank_zero.push_back(tensor.clone());
      tensor.mul_(1 + rank);
    }
    ASSERT_THAT(ReplicateLoraParameters(model, MeshOf(group)), IsOk());
    for (size_t i = 0; i < of_rank_zero.size(); ++i) {
      EXPECT_TRUE(at::equal(tensors[i], of_rank_zero[i])) << i;
    }
    EXPECT_TRUE(
        at::allclose(layer->MergedWeightMatrix(), original, 1e-5, 1e-5));
    EXPECT_FALSE(at::equal(layer->weight(), original));
  });
}

TEST(ReplicateLoraParametersTest, RanksWithOtherAdaptersAreAnErrorOnEveryRank) {
  RunRanks(2, [](int rank, Group group) {
    const auto model = AdaptedModel(
        /*seed=*/1, rank == 0 ? std::vector<std::string>{"to_q", "to_v"}
                              : std::vector<std::string>{"to_q"});
    EXPECT_THAT(
        ReplicateLoraParameters(*model, MeshOf(group)),
        StatusIs(absl::StatusCode::kFailedPrecondition,
                 AllOf(HasSubstr("to_v.lora_A"), HasSubstr("to_v.lora_B"))));
    EXPECT_FALSE(model->to_q->ParameterLayoutOf("lora_A", 1).has_value());
  });
}

TEST(ReplicateLoraParametersTest, ARankWithoutAdaptersIsAnErrorOnEveryRank) {
  RunRanks(2, [](int rank, Group group) {
    const auto model = rank == 0 ? AdaptedModel() : std::make_unique<Model>();
    EXPECT_THAT(ReplicateLoraParameters(*model, MeshOf(group)),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("to_q.lora_A")));
  });
}

TEST(ReplicateLoraParametersTest, RefusesANullMeshAndAModelWithoutAdapters) {
  EXPECT_THAT(
      ReplicateLoraParameters(*AdaptedModel(), nullptr),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("null mesh")));
  RunRanks(2, [](int, Group group) {
    Model plain;
    EXPECT_THAT(ReplicateLoraParameters(plain, MeshOf(group)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("no LoRA adapter")));
  });
}

// Two roles share one synchronization, in one order on every rank.
TEST(LoraParametersTest, RolesShareAGradientSync) {
  RunRanks(2, [](int rank, Group group) {
    const auto mesh = MeshOf(group);
    const auto student = AdaptedModel(1);
    const auto critic = AdaptedModel(2, {"to_v"});
    EXPECT_TRUE(LoraParameters(*student).empty());
    ASSERT_THAT(ReplicateLoraParameters(*student, mesh), IsOk());
    ASSERT_THAT(ReplicateLoraParameters(*critic, mesh), IsOk());
    std::vector<distributed::DistributedParameter> parameters =
        LoraParameters(*student, "student.");
    for (auto& parameter : LoraParameters(*critic, "critic.")) {
      parameters.push_back(std::move(parameter));
    }
    ASSERT_EQ(parameters.size(), 6);
    EXPECT_EQ(parameters[1].name, "student.to_q.lora_B");
    EXPECT_EQ(parameters[4].name, "critic.to_v.lora_A");
    LORA_ASSERT_OK_AND_ASSIGN(
        const auto sync, distributed::GradientSync::Create(mesh, parameters));
    // Each rank trains another role.
    (rank == 0 ? student->to_q : critic->to_v)(at::ones({1, 5}))
        .sum()
        .backward();
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, sync->Sync());
    EXPECT_EQ(count, 6);
    for (const auto& parameter : parameters) {
      EXPECT_TRUE(parameter.parameter.grad().defined()) << parameter.name;
    }
    EXPECT_EQ(sync->statistics().collectives, 1);
  });
}

// A replicated layer with an adapter, and a split one without.
struct MixedModel : torch::nn::Module {
  explicit MixedModel(
      const std::shared_ptr<const distributed::DeviceMesh>& mesh)
      : up(ColumnParallelLinearOptions{5, 4}, mesh, "tensor") {
    register_module("to_q", to_q);
    register_module("up", up);
  }
  ReplicatedLinear to_q{5, 7};
  ColumnParallelLinear up;
};

config::LoraConfig MixedConfig(config::BiasTraining bias,
                               std::vector<std::string> targets) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.bias = bias;
  config.target_modules = std::move(targets);
  return config;
}

TEST(LoraGradientSyncTest, ABiasOfASplitLayerStaysSplit) {
  RunRanks(2, [](int rank, Group group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::shared_ptr<const distributed::DeviceMesh> mesh,
        distributed::DeviceMesh::Create(group, "tensor"));
    MixedModel model(mesh);
    ASSERT_THAT(EnableLoraTraining(
                    model, MixedConfig(config::BiasTraining::kAll, {"to_q"})),
                IsOk());
    model.up->bias().detach().fill_(rank);
    ASSERT_THAT(ReplicateLoraParameters(model, mesh), IsOk());
    EXPECT_TRUE(
        at::equal(model.up->bias(), at::full({2}, static_cast<double>(rank))));
    for (const auto& item : LoraParameters(model)) {
      EXPECT_NE(item.layout.placements[0].is_replicate(),
                item.name == "up.bias")
          << item.name;
    }
  });
}

TEST(LoraGradientSyncTest, ABiasThatTwoAdaptersTrainIsListedOnce) {
  RunRanks(1, [](int, Group group) {
    Model model;
    LoraTrainingOptions options;
    for (const char* name : {kDefaultAdapter, "style"}) {
      options.adapter_name = name;
      ASSERT_THAT(
          EnableLoraTraining(
              model, MixedConfig(config::BiasTraining::kLoraOnly, {"to_q"}),
              options),
          IsOk());
    }
    ASSERT_THAT(ReplicateLoraParameters(model, MeshOf(group)), IsOk());
    std::vector<std::string> names;
    for (const auto& item : LoraParameters(model)) names.push_back(item.name);
    EXPECT_THAT(names, UnorderedElementsAre("to_q.lora_A", "to_q.lora_B",
                                            "to_q.adapters.style.lora_A",
                                            "to_q.adapters.style.lora_B",
                                            "to_q.base_layer.bias"));
  });
}

TEST(LoraGradientSyncTest, SaysWhatWouldBeTrainedApart) {
  RunRanks(1, [](int, Group group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const std::shared_ptr<const distributed::DeviceMesh> mesh,
        distributed::DeviceMesh::Create(group, "tensor"));
    MixedModel model(mesh);
    ASSERT_THAT(
        EnableLoraTraining(
            model, MixedConfig(config::BiasTraining::kNone, {"to_q", "up"})),
        IsOk());
    const auto problem =
        AllOf(HasSubstr("to_q.lora_A"), HasSubstr("ReplicateLoraParameters"));
    EXPECT_THAT(SyncReplicatedLoraGradients(model),
                StatusIs(absl::StatusCode::kFailedPrecondition, problem));
    {
      const LogCapture logs;
      EXPECT_EQ(LoraParameters(model).size(), 2);
      EXPECT_THAT(logs.Messages(config::LogLevel::kWarning),
                  ElementsAre(problem));
    }
    ASSERT_THAT(ReplicateLoraParameters(model, mesh), IsOk());
    EXPECT_EQ(LoraParameters(model).size(), 4);
    EXPECT_THAT(SyncReplicatedLoraGradients(model), IsOk());
  });
}

TEST(LoraGradientSyncTest, ACloneKeepsTheLayoutsOfItsAdapters) {
  RunRanks(2, [](int rank, Group group) {
    const auto model = AdaptedModel();
    ASSERT_THAT(ReplicateLoraParameters(*model, MeshOf(group)), IsOk());
    torch::nn::Module root;
    const auto copy =
        std::dynamic_pointer_cast<ReplicatedLinearImpl>(model->to_q->clone());
    root.register_module("copy", copy);
    SetGradient(copy->lora_A(), rank);
    LORA_ASSERT_OK_AND_ASSIGN(const int64_t synchronized,
                              SyncReplicatedLoraGradients(root));
    EXPECT_EQ(synchronized, 2);
    ExpectGradient(copy->lora_A(), 0.5);
  });
}

}  // namespace
}  // namespace trainer_lora::lora
