// A whole checkpoint in the parts of parallel layers, and back.
#include "lora/tensor_parallel_layouts.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/checkpoint/sharded_saver.h"
#include "distributed/device_mesh.h"
#include "distributed/meta_device.h"
#include "distributed/placement.h"
#include "distributed/state_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/adapter_file.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/parallel_linear.h"
#include "tests/testutil/checkpoint_tensors.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/temporary_folder.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::testutil::Bytes;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::ReadCheckpoint;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::StatusIs;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using Tensors = std::map<std::string, at::Tensor>;

// q has 4 heads, k and v one, of two features.
constexpr int64_t kHidden = 6;
constexpr int64_t kQuery = 8;
constexpr int64_t kKey = 2;

std::shared_ptr<torch::nn::Module> WholeModel() {
  auto model = std::make_shared<torch::nn::Module>();
  model->register_module("qkv", ReplicatedLinear(kHidden, kQuery + 2 * kKey));
  model->register_module("out", ReplicatedLinear(kQuery, kHidden));
  model->register_parameter("norm", at::ones({kHidden}));
  return model;
}

std::shared_ptr<torch::nn::Module> SplitModel(const MeshPtr& mesh) {
  auto model = std::make_shared<torch::nn::Module>();
  model->register_module(
      "qkv", QKVParallelLinear(
                 QKVParallelLinearOptions{kHidden, kKey, kQuery / kKey, 1},
                 mesh, "tensor"));
  model->register_module(
      "out", RowParallelLinear(RowParallelLinearOptions{kQuery, kHidden}, mesh,
                               "tensor"));
  model->register_parameter("norm", at::ones({kHidden}));
  return model;
}

config::LoraConfig Config() {
  config::LoraConfig config;
  config.enable = true;
  config.rank = 3;
  config.target_modules = {"qkv", "out"};
  config.seed = 11;
  return config;
}

// What rank `rank` of `size` has of the whole tensor `name`.
at::Tensor ExpectedPart(const std::string& name, const at::Tensor& whole,
                        int64_t size, int64_t rank) {
  const at::Tensor queries =
      at::arange(rank * kQuery / size, (rank + 1) * kQuery / size, at::kLong);
  if (name == "qkv.lora_A" || name == "out.base_layer.bias" ||
      name == "out.lora_B" || name == "out.lora_magnitude" || name == "norm") {
    return whole;
  }
  if (name == "out.base_layer.weight" || name == "out.lora_A") {
    return whole.index_select(1, queries);
  }
  return whole.index_select(
      0, at::cat({queries, at::arange(kQuery, kQuery + 2 * kKey, at::kLong)}));
}

void ExpectParts(const torch::nn::Module& model, const Tensors& whole,
                 const DeviceMesh& mesh) {
  const auto parameters = model.named_parameters();
  EXPECT_EQ(parameters.size(), whole.size());
  for (const auto& item : parameters) {
    EXPECT_EQ(Bytes(item.value()),
              Bytes(ExpectedPart(item.key(), whole.at(item.key()), mesh.size(1),
                                 mesh.coordinate(1))))
        << item.key();
  }
}

class TensorParallelLayoutsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto model = WholeModel();
    ASSERT_THAT(distributed::SaveCheckpoint(*model, folder_.Path("base"), {}),
                IsOk());
    ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
    for (const auto& item : model->named_parameters()) {
      whole_[item.key()] = item.value().detach();
    }
  }

  testutil::TemporaryFolder folder_;
  // A model of one process with its adapters.
  Tensors whole_;
};

TEST_F(TensorParallelLayoutsTest, NamesWhatTheLayersHaveBeforeAndAfter) {
  RunRanks(2, [](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    const auto model = SplitModel(mesh);
    const auto names = [&] {
      std::vector<std::string> names;
      for (const auto& [name, layout] : TensorParallelLayouts(*model)) {
        EXPECT_THAT(layout.Validate(), IsOk()) << name;
        names.push_back(name);
      }
      return names;
    };
    EXPECT_THAT(names(), UnorderedElementsAre("qkv.weight", "qkv.bias",
                                              "out.weight", "out.bias"));
    ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
    EXPECT_THAT(names(),
                UnorderedElementsAre(
                    "qkv.base_layer.weight", "qkv.base_layer.bias",
                    "qkv.lora_A", "qkv.lora_B", "out.base_layer.weight",
                    "out.base_layer.bias", "out.lora_A", "out.lora_B"));

    const distributed::StateLayout lora_B =
        TensorParallelLayouts(*model).at("qkv.lora_B");
    EXPECT_THAT(lora_B.global_shape, ElementsAre(kQuery + 2 * kKey, 3));
    EXPECT_EQ(lora_B.layout.ToString(),
              "data: Replicate(average), tensor: Shard(0) in parts 8, 2 x 2, "
              "2 x 2");
    const distributed::StateLayout bias =
        TensorParallelLayouts(*model).at("out.base_layer.bias");
    EXPECT_EQ(bias.layout.ToString(),
              "data: Replicate(average), tensor: Replicate(none)");
  });
}

TEST_F(TensorParallelLayoutsTest, AdaptersStartAsTheSlicesOfOneProcess) {
  for (const int64_t tensor : {2, 4}) {
    RunRanks(static_cast<int>(tensor), [&](int, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(
          const MeshPtr mesh,
          DeviceMesh::Create(group, {{"data", 1}, {"tensor", tensor}}));
      const auto model = SplitModel(mesh);
      ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
      const auto parameters = model->named_parameters();
      for (const std::string name :
           {"qkv.lora_A", "qkv.lora_B", "out.lora_A", "out.lora_B"}) {
        EXPECT_EQ(Bytes(parameters[name]),
                  Bytes(ExpectedPart(name, whole_.at(name), tensor,
                                     mesh->coordinate(1))))
            << name;
      }
    });
  }
}

TEST_F(TensorParallelLayoutsTest, LoadsAWholeCheckpointAndSavesItAgain) {
  for (const auto& [data, tensor] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {1, 4}, {2, 2}}) {
    SCOPED_TRACE(data);
    SCOPED_TRACE(tensor);
    const std::string saved =
        folder_.Path("saved" + std::to_string(data * 10 + tensor));
    RunRanks(static_cast<int>(data * tensor), [&, data = data, tensor = tensor](
                                                  int, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(
          const MeshPtr mesh,
          DeviceMesh::Create(group, {{"data", data}, {"tensor", tensor}}));
      std::shared_ptr<torch::nn::Module> model;
      {
        const distributed::MetaDeviceGuard meta_device;
        model = SplitModel(mesh);
      }
      LoraTrainingOptions enable;
      enable.prepare_for_fsdp = true;
      LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                                EnableLoraTraining(*model, Config(), enable));
      distributed::LoadCheckpointOptions load;
      load.mesh = mesh;
      load.layouts = TensorParallelLayouts(*model);
      load.aliases = training.checkpoint_key_aliases;
      load.missing_parameter_initializer =
          training.missing_parameter_initializer;
      ASSERT_THAT(
          distributed::LoadCheckpoint(*model, folder_.Path("base"), load),
          IsOk());
      ASSERT_THAT(FinalizeLoraTraining(*model), IsOk());
      ExpectParts(*model, whole_, *mesh);

      distributed::SaveCheckpointOptions save;
      save.mesh = mesh;
      save.layouts = load.layouts;
      ASSERT_THAT(distributed::SaveCheckpoint(*model, saved, save), IsOk());
    });
    const Tensors read = ReadCheckpoint(saved);
    EXPECT_EQ(read.size(), whole_.size());
    for (const auto& [name, tensor] : read) {
      EXPECT_EQ(Bytes(tensor), Bytes(whole_.at(name))) << name;
    }
  }
}

// --- Adapter folders ---------------------------------------------------------

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void ExpectSameFolder(const std::string& actual, const std::string& expected) {
  for (const std::string name :
       {"/adapter_config.json", "/adapter_model.safetensors"}) {
    EXPECT_FALSE(ReadFile(expected + name).empty());
    EXPECT_EQ(ReadFile(actual + name), ReadFile(expected + name)) << name;
  }
}

// Gives the trainable parameters the parts of `whole`.
void SetAdapters(torch::nn::Module& model, const Tensors& whole,
                 const DeviceMesh& mesh) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& item : TrainableParameters(model)) {
    item.parameter.copy_(ExpectedPart(item.name, whole.at(item.name),
                                      mesh.size(1), mesh.coordinate(1)));
  }
}

// Random adapters of one process, and the folder that it saves.
Tensors SaveWholeAdapters(const config::LoraConfig& config,
                          const std::string& folder) {
  const auto model = WholeModel();
  EXPECT_THAT(EnableLoraTraining(*model, config), IsOk());
  Tensors adapters;
  for (const NamedParameter& item : TrainableParameters(*model)) {
    adapters[item.name] = item.parameter.detach().normal_();
  }
  EXPECT_THAT(SaveAdapter(*model, folder), IsOk());
  return adapters;
}

TEST_F(TensorParallelLayoutsTest,
       SplitAdaptersAreSavedAndLoadedAsOfOneProcess) {
  for (const bool use_dora : {false, true}) {
    config::LoraConfig config = Config();
    config.use_dora = use_dora;
    const std::string name = use_dora ? "dora" : "lora";
    const std::string expected = folder_.Path(name);
    const Tensors whole = SaveWholeAdapters(config, expected);
    for (const auto& [data, tensor] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 2}, {1, 4}, {2, 2}}) {
      const std::string saved = expected + std::to_string(data * 10 + tensor);
      SCOPED_TRACE(saved);
      RunRanks(static_cast<int>(data * tensor), [&, data = data,
                                                 tensor = tensor](
                                                    int, GroupPtr group) {
        LORA_ASSERT_OK_AND_ASSIGN(
            const MeshPtr mesh,
            DeviceMesh::Create(group, {{"data", data}, {"tensor", tensor}}));
        const auto model = SplitModel(mesh);
        ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
        SetAdapters(*model, whole, *mesh);
        SaveAdapterOptions save;
        save.mesh = mesh;
        save.layouts = TensorParallelLayouts(*model);
        ASSERT_THAT(SaveAdapter(*model, saved, save), IsOk());

        const auto loaded = SplitModel(mesh);
        ASSERT_THAT(EnableLoraTraining(*loaded, config), IsOk());
        LoadAdapterOptions load;
        load.mesh = mesh;
        load.layouts = save.layouts;
        ASSERT_THAT(LoadAdapter(*loaded, expected, load), IsOk());
        for (const NamedParameter& item : TrainableParameters(*loaded)) {
          EXPECT_EQ(Bytes(item.parameter),
                    Bytes(ExpectedPart(item.name, whole.at(item.name), tensor,
                                       mesh->coordinate(1))))
              << item.name;
        }
      });
      ExpectSameFolder(saved, expected);
    }
  }
}

TEST_F(TensorParallelLayoutsTest, AdaptersInShardsAreSavedAsOfOneProcess) {
  const std::string expected = folder_.Path("whole");
  const Tensors whole = SaveWholeAdapters(Config(), expected);
  const std::string saved = folder_.Path("sharded");
  RunRanks(3, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    std::shared_ptr<torch::nn::Module> model;
    {
      const distributed::MetaDeviceGuard meta_device;
      model = WholeModel();
    }
    LoraTrainingOptions enable;
    enable.prepare_for_fsdp = true;
    LORA_ASSERT_OK_AND_ASSIGN(const LoraTraining training,
                              EnableLoraTraining(*model, Config(), enable));
    distributed::LoadCheckpointOptions load;
    load.mesh = mesh;
    load.layouts = distributed::ShardedLayouts(
        *model, mesh, {distributed::Placement::Shard(0)});
    load.aliases = training.checkpoint_key_aliases;
    load.missing_parameter_initializer = training.missing_parameter_initializer;
    ASSERT_THAT(distributed::LoadCheckpoint(*model, folder_.Path("base"), load),
                IsOk());
    LoadAdapterOptions load_adapter;
    load_adapter.mesh = mesh;
    load_adapter.layouts = load.layouts;
    ASSERT_THAT(LoadAdapter(*model, expected, load_adapter), IsOk());
    SaveAdapterOptions save;
    save.mesh = mesh;
    save.layouts = load.layouts;
    ASSERT_THAT(SaveAdapter(*model, saved, save), IsOk());
  });
  ExpectSameFolder(saved, expected);
}

// Those that are trained with the adapter of another layer.
TEST_F(TensorParallelLayoutsTest, BiasesOfSplitLayersAreSavedWhole) {
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    config::LoraConfig config = Config();
    config.target_modules = {"head"};
    config.bias = config::BiasTraining::kAll;
    const auto model = SplitModel(mesh);
    model->register_module("head", ReplicatedLinear(kHidden, 2));
    ASSERT_THAT(EnableLoraTraining(*model, config), IsOk());
    const at::Tensor bias = model->named_parameters()["qkv.bias"].detach();
    bias.copy_(
        ExpectedPart("qkv.bias", at::arange(kQuery + 2 * kKey), 2, rank));
    EXPECT_THAT(
        SaveAdapter(*model, folder_.Path("alone" + std::to_string(rank))),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("qkv.bias is split over ranks"),
                       HasSubstr("TensorParallelLayouts"))));
    SaveAdapterOptions save;
    save.mesh = mesh;
    save.layouts = TensorParallelLayouts(*model);
    EXPECT_THAT(SaveAdapter(*model, folder_.Path("adapter"), save), IsOk());

    // That of a layer whose input is split is whole.
    torch::nn::Module rows;
    rows.register_module("out", model->named_children()["out"]);
    rows.register_module("head", ReplicatedLinear(kHidden, 2));
    ASSERT_THAT(EnableLoraTraining(rows, config), IsOk());
    EXPECT_THAT(SaveAdapter(rows, folder_.Path("rows" + std::to_string(rank))),
                IsOk());
  });
  const Tensors saved =
      ReadCheckpoint(folder_.Path("adapter/adapter_model.safetensors"));
  EXPECT_TRUE(at::equal(saved.at("base_model.model.qkv.bias"),
                        at::arange(kQuery + 2 * kKey, at::kFloat)));
}

TEST_F(TensorParallelLayoutsTest, ErrorsOfAdapterFoldersAreThoseOfAllRanks) {
  const std::string taken = folder_.Path("taken");
  SaveWholeAdapters(Config(), taken);
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"data", 1}, {"tensor", 2}}));
    const auto model = SplitModel(mesh);
    ASSERT_THAT(EnableLoraTraining(*model, Config()), IsOk());
    EXPECT_THAT(SaveAdapter(*model, folder_.Path("alone")),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("TensorParallelLayouts")));
    SaveAdapterOptions save;
    save.mesh = mesh;
    save.layouts = TensorParallelLayouts(*model);
    EXPECT_THAT(SaveAdapter(*model, taken, save),
                StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(taken)));
    EXPECT_THAT(
        SaveAdapter(*model, folder_.Path(rank == 0 ? "here" : "there"), save),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("there")));

    // One rank's model has other adapters.
    LoadAdapterOptions load;
    load.mesh = mesh;
    load.layouts = save.layouts;
    const auto other = SplitModel(mesh);
    config::LoraConfig config = Config();
    if (rank == 1) config.alpha = 5;
    ASSERT_THAT(EnableLoraTraining(*other, config), IsOk());
    EXPECT_THAT(
        LoadAdapter(*other, taken, load),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("rank 1: ")));
    const auto parameters = other->named_parameters();
    EXPECT_TRUE(at::equal(parameters["qkv.lora_B"],
                          at::zeros_like(parameters["qkv.lora_B"])));
  });
}

}  // namespace
}  // namespace trainer_lora::lora
