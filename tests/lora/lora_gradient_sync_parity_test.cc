// The gradients that tests/parity/gradient_sync_fixture.py synchronized with
// DTensors in Python, synchronized here: the same bits come out.
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_gradient_sync.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::distributed::DistributedParameter;
using ::trainer_lora::distributed::GradientSync;
using ::trainer_lora::distributed::GradientSyncOptions;
using ::trainer_lora::distributed::ParameterLayout;
using ::trainer_lora::distributed::Placement;
using ::trainer_lora::distributed::SafetensorsFile;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::RunRanks;

using MeshPtr = std::shared_ptr<const DeviceMesh>;
using Tensors = std::map<std::string, at::Tensor>;

constexpr int kWorldSize = 2;
constexpr int kSteps = 2;

Tensors ReadFixture(int64_t& synchronized) {
  Tensors tensors;
  auto file = SafetensorsFile::Open(
      RunfilePath("trainer_lora/tests/testdata/gradient_sync.safetensors"));
  EXPECT_THAT(file, IsOk());
  if (!file.ok()) return tensors;
  for (const distributed::TensorInfo& info : file->tensors()) {
    const at::Tensor tensor =
        at::empty(info.shape, distributed::ToScalarType(info.dtype).value());
    EXPECT_THAT(file->Read(info, 0,
                           absl::MakeSpan(static_cast<char*>(tensor.data_ptr()),
                                          info.byte_size)),
                IsOk());
    tensors[info.name] = tensor;
  }
  synchronized = std::stoi(file->metadata().at("synchronized"));
  return tensors;
}

// As LAYERS in the script.
struct Model : torch::nn::Module {
  explicit Model(const MeshPtr& mesh) {
    std::vector<std::pair<std::string, ReplicatedLinear>> layers = {
        {"to_q", ReplicatedLinear(5, 7)},
        {"to_k", ReplicatedLinear(5, 3)},
        {"to_v", ReplicatedLinear(5, 3)},
        {"sharded_once", ReplicatedLinear(5, 3)},
        {"sharded", ReplicatedLinear(5, 3)}};
    for (const auto& [name, layer] : layers) register_module(name, layer);

    config::LoraConfig config;
    config.enable = true;
    config.rank = 2;
    config.target_modules = {"to_q", "to_k", "to_v", "sharded"};
    EXPECT_THAT(EnableLoraTraining(*this, config), IsOk());

    layers[1].second->to(at::kBFloat16);
    layers[2].second->lora_B().set_requires_grad(false);
    const std::map<std::string, std::vector<Placement>> placements = {
        {"sharded_once", {Placement::Replicate(), Placement::Shard(0)}},
        {"sharded", {Placement::Shard(0), Placement::Shard(0)}}};
    for (auto& [name, layer] : layers) {
      ParameterLayout layout = ParameterLayout::Replicated(mesh);
      if (placements.count(name) > 0) layout.placements = placements.at(name);
      layer->set_replicated_layout(layout);
      parameters.push_back(
          {absl::StrCat(name, ".lora_A"), layer->lora_A(), layout});
      parameters.push_back(
          {absl::StrCat(name, ".lora_B"), layer->lora_B(), layout});
    }
  }

  std::vector<DistributedParameter> parameters;
};

void Accumulate(const at::Tensor& parameter, const at::Tensor& gradient) {
  at::Tensor& sum = parameter.mutable_grad();
  sum = sum.defined() ? sum + gradient : gradient.clone();
}

// One of the ways to synchronize the gradients of a model.
using Synchronize = std::function<absl::StatusOr<int64_t>()>;
struct Case {
  const char* name;
  // Called once on each rank, before there are gradients.
  std::function<Synchronize(const Model& model, const MeshPtr& mesh)> prepare;
};

Synchronize Persistent(const Model& model, const MeshPtr& mesh,
                       const GradientSyncOptions& options) {
  auto sync = GradientSync::Create(mesh, model.parameters, options);
  EXPECT_THAT(sync, IsOk());
  return [sync = std::shared_ptr<GradientSync>(*std::move(sync))] {
    return sync->Sync();
  };
}

void PrintTo(const Case& test_case, std::ostream* out) {
  *out << test_case.name;
}

class GradientSyncParityTest : public testing::TestWithParam<Case> {};

TEST_P(GradientSyncParityTest, GivesTheBitsOfTheLoopInPython) {
  int64_t expected_count = 0;
  const Tensors fixture = ReadFixture(expected_count);
  ASSERT_EQ(expected_count, 7);
  const auto find = [&fixture](int rank, const char* kind, int step,
                               const std::string& name) {
    const auto found =
        fixture.find(absl::StrCat("rank", rank, ".", kind, step, ".", name));
    return found == fixture.end() ? at::Tensor() : found->second;
  };

  RunRanks(kWorldSize, [&](int rank, auto group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"replicate", kWorldSize}, {"shard", 1}}));
    const Model model(mesh);
    const Synchronize synchronize = GetParam().prepare(model, mesh);
    for (int step = 0; step < kSteps; ++step) {
      for (const DistributedParameter& parameter : model.parameters) {
        const at::Tensor gradient =
            find(rank, "gradient", step, parameter.name);
        if (gradient.defined()) Accumulate(parameter.parameter, gradient);
      }
      LORA_ASSERT_OK_AND_ASSIGN(const int64_t count, synchronize());
      EXPECT_EQ(count, expected_count);
      for (const DistributedParameter& parameter : model.parameters) {
        const at::Tensor expected = find(rank, "result", step, parameter.name);
        const at::Tensor& actual = parameter.parameter.grad();
        ASSERT_EQ(actual.defined(), expected.defined()) << parameter.name;
        if (!expected.defined()) continue;
        EXPECT_EQ(actual.scalar_type(), expected.scalar_type());
        EXPECT_TRUE(at::equal(actual, expected))
            << parameter.name << " after step " << step << ":\n"
            << actual << "\nexpected:\n"
            << expected;
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Ways, GradientSyncParityTest,
    testing::Values(
        Case{"SyncReplicatedLoraGradients",
             [](const Model& model, const MeshPtr&) -> Synchronize {
               return [&model] { return SyncReplicatedLoraGradients(model); };
             }},
        Case{"ReduceGradients",
             [](const Model& model, const MeshPtr& mesh) -> Synchronize {
               return [&model, mesh] {
                 return distributed::ReduceGradients(*mesh, model.parameters);
               };
             }},
        Case{"GradientSync",
             [](const Model& model, const MeshPtr& mesh) {
               return Persistent(model, mesh, {});
             }},
        Case{"GradientSyncOfSmallBuckets",
             [](const Model& model, const MeshPtr& mesh) {
               GradientSyncOptions options;
               options.bucket_bytes = 1;
               return Persistent(model, mesh, options);
             }}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

}  // namespace
}  // namespace trainer_lora::lora
