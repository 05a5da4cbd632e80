// A base checkpoint that diffusers wrote, straight into the shards of a model
// with adapters, over several meshes, and back to files.
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "c10/util/intrusive_ptr.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/checkpoint/sharded_saver.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/device_mesh.h"
#include "distributed/meta_device.h"
#include "distributed/placement.h"
#include "distributed/state_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_adapter.h"
#include "tests/testutil/checkpoint_tensors.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/state_module.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace trainer_lora {
namespace {

using ::testing::SizeIs;
using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::distributed::LoadCheckpointOptions;
using ::trainer_lora::distributed::LoadCheckpointReport;
using ::trainer_lora::distributed::MeshDim;
using ::trainer_lora::distributed::Placement;
using ::trainer_lora::distributed::SaveCheckpointOptions;
using ::trainer_lora::testutil::Bytes;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::ReadCheckpoint;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::ShardOf;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using ModulePtr = std::shared_ptr<torch::nn::Module>;
using Tensors = std::map<std::string, at::Tensor>;

constexpr double kAlpha = 6;
constexpr int64_t kRank = 4;
// Two blocks of two attentions with four projections each.
constexpr int64_t kAdaptedLayers = 16;

std::string CheckpointPath() {
  return RunfilePath(
      "trainer_lora/tests/testdata/wan_checkpoint/"
      "diffusion_pytorch_model.safetensors.index.json");
}

// The model has diffusers' `to_out.0` as `to_out`.
std::string NativeName(const std::string& key) {
  return absl::StrReplaceAll(key, {{".to_out.0.", ".to_out."}});
}

bool IsProjection(const std::string& name) {
  return absl::StrContains(name, ".to_");
}

// A model on meta for the keys of `whole`, with ReplicatedLinear layers for
// the projections of its attentions.
ModulePtr MetaModel(const Tensors& whole) {
  const distributed::MetaDeviceGuard meta_device;
  std::vector<testutil::ParameterSpec> specs;
  for (const auto& [key, tensor] : whole) {
    if (!IsProjection(key)) specs.push_back({key, tensor.sizes().vec()});
  }
  ModulePtr model = testutil::ModuleWith(specs);
  const auto modules = model->named_modules();
  for (const auto& [key, tensor] : whole) {
    if (!IsProjection(key) || !absl::EndsWith(key, ".weight")) continue;
    const std::string layer =
        std::string(absl::StripSuffix(NativeName(key), ".weight"));
    const size_t dot = layer.rfind('.');
    modules[layer.substr(0, dot)]->register_module(
        layer.substr(dot + 1),
        lora::ReplicatedLinear(tensor.size(1), tensor.size(0)));
  }
  return model;
}

struct LoadedModel {
  ModulePtr model;
  LoadCheckpointReport report;
  distributed::StateLayouts layouts;
};

// Enables, loads and finalizes; without a mesh, all in this process.
LoadedModel Load(const Tensors& whole, MeshPtr mesh,
                 const std::vector<Placement>& placements,
                 at::ScalarType base_dtype = at::kFloat) {
  LoadedModel loaded;
  loaded.model = MetaModel(whole);
  loaded.model->to(base_dtype);

  config::LoraConfig config;
  config.enable = true;
  config.rank = kRank;
  config.alpha = kAlpha;
  config.target_modules = {"to_q", "to_k", "to_v", "to_out"};
  config.adapter_dtype = config::AdapterDtype::kFloat32;
  config.seed = 7;
  lora::LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  absl::StatusOr<lora::LoraTraining> training =
      lora::EnableLoraTraining(*loaded.model, config, options);
  EXPECT_THAT(training, IsOk());
  if (!training.ok()) return loaded;

  LoadCheckpointOptions load;
  load.mesh = mesh;
  if (mesh != nullptr) {
    load.layouts = distributed::ShardedLayouts(*loaded.model, mesh, placements);
  }
  absl::StatusOr<distributed::StateDictMapping> mapping =
      distributed::StateDictMapping::Create(
          {{R"((.*)\.to_out\.0\.(.*))", R"(\1.to_out.\2)"}});
  EXPECT_THAT(mapping, IsOk());
  load.mapping = *mapping;
  load.aliases = training->checkpoint_key_aliases;
  load.missing_parameter_initializer = training->missing_parameter_initializer;
  absl::StatusOr<LoadCheckpointReport> report =
      distributed::LoadCheckpoint(*loaded.model, CheckpointPath(), load);
  EXPECT_THAT(report, IsOk());
  if (!report.ok()) return loaded;
  loaded.report = *std::move(report);
  loaded.layouts = load.layouts;
  const absl::StatusOr<int64_t> layers =
      lora::FinalizeLoraTraining(*loaded.model);
  EXPECT_THAT(layers, IsOk());
  EXPECT_EQ(layers.value_or(0), kAdaptedLayers);
  return loaded;
}

struct MeshCase {
  std::vector<MeshDim> dims;
  std::vector<Placement> placements;
};

std::vector<MeshCase> MeshCases() {
  std::vector<MeshCase> cases;
  for (const int64_t size : {1, 2, 3, 4, 8}) {
    cases.push_back({{{"shard", size}}, {Placement::Shard(0)}});
  }
  cases.push_back({{{"shard", 3}}, {Placement::Shard(1)}});
  for (const int64_t size : {2, 4}) {
    cases.push_back({{{"replicate", 2}, {"shard", size}},
                     {Placement::Replicate(), Placement::Shard(0)}});
    cases.push_back({{{"shard", 2}, {"tensor", size}},
                     {Placement::Shard(0), Placement::Shard(1)}});
  }
  return cases;
}

int64_t WorldSize(const MeshCase& mesh_case) {
  int64_t size = 1;
  for (const MeshDim& dim : mesh_case.dims) size *= dim.size;
  return size;
}

std::string ToString(const MeshCase& mesh_case) {
  std::string text;
  for (size_t i = 0; i < mesh_case.dims.size(); ++i) {
    absl::StrAppend(&text, mesh_case.dims[i].size, " ",
                    mesh_case.placements[i].ToString(), " ");
  }
  return text;
}

bool IsAdapter(const std::string& name) {
  return absl::EndsWith(name, ".lora_A") || absl::EndsWith(name, ".lora_B");
}

// Mapping first, aliases second; all values those of the file.
TEST(ShardedLoraTest, LoadsTheBaseUnderItsNewNames) {
  const Tensors whole = ReadCheckpoint(CheckpointPath());
  const LoadedModel loaded = Load(whole, nullptr, {});
  const auto parameters = loaded.model->named_parameters();
  const auto origin =
      loaded.report.origins.at("blocks.0.attn1.to_out.base_layer.weight");
  ASSERT_THAT(origin, SizeIs(1));
  EXPECT_EQ(origin[0].key, "blocks.0.attn1.to_out.0.weight");
  EXPECT_EQ(loaded.report.loaded.size(), whole.size());
  EXPECT_EQ(loaded.report.initialized.size(), 2 * kAdaptedLayers);
  for (const auto& [key, tensor] : whole) {
    std::string name = NativeName(key);
    if (IsProjection(key)) {
      const size_t dot = name.rfind('.');
      name.insert(dot, ".base_layer");
    }
    const at::Tensor* parameter = parameters.find(name);
    ASSERT_NE(parameter, nullptr) << name;
    EXPECT_EQ(Bytes(*parameter), Bytes(tensor)) << name;
  }
}

TEST(ShardedLoraTest, TrainsTheAdaptersAlone) {
  const Tensors whole = ReadCheckpoint(CheckpointPath());
  const LoadedModel loaded = Load(whole, nullptr, {}, at::kBFloat16);
  EXPECT_EQ(lora::TrainableParameters(*loaded.model).size(),
            2 * kAdaptedLayers);
  for (const auto& item : loaded.model->named_parameters()) {
    SCOPED_TRACE(item.key());
    const at::Tensor& parameter = item.value();
    EXPECT_FALSE(parameter.is_meta());
    EXPECT_EQ(parameter.requires_grad(), IsAdapter(item.key()));
    EXPECT_EQ(parameter.scalar_type(),
              IsAdapter(item.key()) ? at::kFloat : at::kBFloat16);
    if (absl::EndsWith(item.key(), ".lora_B")) {
      EXPECT_EQ(parameter.count_nonzero().item<int64_t>(), 0);
    }
    if (absl::EndsWith(item.key(), ".lora_A")) {
      EXPECT_TRUE(parameter.isfinite().all().item<bool>());
      EXPECT_GT(parameter.std().item<double>(), 0.01);
    }
  }
  EXPECT_EQ(Bytes(loaded.model->named_parameters()["proj_out.weight"]),
            Bytes(whole.at("proj_out.weight").to(at::kBFloat16)));
}

// Every shard on every mesh is a chunk of what one process has, whatever the
// global generator does.
TEST(ShardedLoraTest, GivesEveryMeshTheValuesOfOneProcess) {
  const Tensors whole = ReadCheckpoint(CheckpointPath());
  for (const at::ScalarType base_dtype : {at::kFloat, at::kBFloat16}) {
    const LoadedModel alone = Load(whole, nullptr, {}, base_dtype);
    const auto expected = alone.model->named_parameters();
    for (const MeshCase& mesh_case : MeshCases()) {
      SCOPED_TRACE(ToString(mesh_case));
      RunRanks(WorldSize(mesh_case), [&](int rank, GroupPtr group) {
        at::manual_seed(rank);
        LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                  DeviceMesh::Create(group, mesh_case.dims));
        const LoadedModel loaded =
            Load(whole, mesh, mesh_case.placements, base_dtype);
        for (const auto& item : loaded.model->named_parameters()) {
          const at::Tensor shard =
              ShardOf(expected[item.key()], *mesh, mesh_case.placements);
          EXPECT_EQ(item.value().sizes(), shard.sizes()) << item.key();
          EXPECT_EQ(Bytes(item.value()), Bytes(shard)) << item.key();
        }
      });
    }
  }
}

class ExportTest : public ::testing::Test {
 protected:
  ExportTest()
      : folder_(absl::StrCat(
            ::testing::TempDir(), "ExportTest.",
            ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
  }
  ~ExportTest() override { std::filesystem::remove_all(folder_); }

  const std::string folder_;
};

TEST_F(ExportTest, WritesTheBaseBackAsItWas) {
  const Tensors whole = ReadCheckpoint(CheckpointPath());
  RunRanks(3, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const LoadedModel loaded = Load(whole, mesh, {Placement::Shard(0)});
    SaveCheckpointOptions save;
    save.mesh = mesh;
    save.layouts = loaded.layouts;
    save.origins = loaded.report.origins;
    for (const std::string& name : loaded.report.initialized) {
      save.left_out.insert(name);
    }
    save.file_stem = "diffusion_pytorch_model";
    save.max_file_bytes = 30'000;
    EXPECT_THAT(SaveCheckpoint(*loaded.model, folder_, save), IsOk());
  });
  EXPECT_TRUE(std::filesystem::exists(
      folder_ + "/diffusion_pytorch_model.safetensors.index.json"));
  const Tensors saved = ReadCheckpoint(folder_);
  ASSERT_EQ(saved.size(), whole.size());
  for (const auto& [key, tensor] : whole) {
    ASSERT_EQ(saved.count(key), 1) << key;
    EXPECT_EQ(Bytes(saved.at(key)), Bytes(tensor)) << key;
  }
}

// W + (alpha / rank) B A, from shards, under the checkpoint's names.
TEST_F(ExportTest, MergesWithATransform) {
  const Tensors whole = ReadCheckpoint(CheckpointPath());
  // What each lora_B is as a whole, so that the test can do the sum as well.
  const auto lora_b = [](const std::string& layer, at::IntArrayRef shape) {
    const int64_t count = shape[0] * shape[1];
    return at::arange(count, at::kFloat)
               .remainder(17)
               .sub(8)
               .div(64)
               .view(shape) *
           static_cast<double>(layer.size());
  };
  RunRanks(4, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"replicate", 2}, {"shard", 2}}));
    const std::vector<Placement> placements = {Placement::Replicate(),
                                               Placement::Shard(0)};
    const LoadedModel loaded = Load(whole, mesh, placements);
    SaveCheckpointOptions save;
    save.mesh = mesh;
    save.layouts = loaded.layouts;
    save.origins = loaded.report.origins;
    for (const lora::NamedLoraLayer& layer : lora::LoraLayers(*loaded.model)) {
      const std::string b_name = layer.name + ".lora_B";
      const at::NoGradGuard no_grad;
      layer.layer->lora_B().copy_(
          ShardOf(lora_b(layer.name, loaded.layouts.at(b_name).global_shape),
                  *mesh, placements));
      save.left_out.insert({layer.name + ".lora_A", b_name});
      save.transforms[layer.name + ".base_layer.weight"] = {
          {layer.name + ".lora_A", b_name},
          [](const at::Tensor& weight, const std::vector<at::Tensor>& factors) {
            return weight + factors[1].matmul(factors[0]) * (kAlpha / kRank);
          }};
    }
    EXPECT_THAT(SaveCheckpoint(*loaded.model, folder_, save), IsOk());
  });

  const LoadedModel alone = Load(whole, nullptr, {});
  const auto parameters = alone.model->named_parameters();
  const Tensors saved = ReadCheckpoint(folder_);
  ASSERT_EQ(saved.size(), whole.size());
  int64_t merged_count = 0;
  for (const auto& [key, tensor] : whole) {
    SCOPED_TRACE(key);
    if (!IsProjection(key) || !absl::EndsWith(key, ".weight")) {
      EXPECT_EQ(Bytes(saved.at(key)), Bytes(tensor));
      continue;
    }
    ++merged_count;
    const std::string layer(absl::StripSuffix(NativeName(key), ".weight"));
    const at::Tensor a = parameters[layer + ".lora_A"].detach();
    const at::Tensor b = lora_b(layer, {tensor.size(0), kRank});
    const at::Tensor expected =
        tensor.to(at::kDouble) +
        b.to(at::kDouble).matmul(a.to(at::kDouble)) * (kAlpha / kRank);
    EXPECT_TRUE(at::allclose(saved.at(key).to(at::kDouble), expected,
                             /*rtol=*/1e-6, /*atol=*/1e-6));
    EXPECT_FALSE(at::equal(saved.at(key), tensor));
  }
  EXPECT_EQ(merged_count, kAdaptedLayers);
}

}  // namespace
}  // namespace trainer_lora
