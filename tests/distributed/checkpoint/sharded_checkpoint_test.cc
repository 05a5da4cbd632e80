// Loading into shards and saving from them, over meshes of several ranks.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/fnv1a.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/checkpoint/sharded_saver.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/meta_device.h"
#include "distributed/placement.h"
#include "distributed/state_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/checkpoint_tensors.h"
#include "tests/testutil/runfiles.h"
#include "tests/testutil/state_module.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::trainer_lora::testutil::Bytes;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::ModuleWith;
using ::trainer_lora::testutil::ParameterSpec;
using ::trainer_lora::testutil::ReadCheckpoint;
using ::trainer_lora::testutil::RunfilePath;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::ShardOf;
using ::trainer_lora::testutil::StatusIs;

namespace fs = std::filesystem;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

// A model on meta for the tensors of a checkpoint, under their own names.
ModulePtr MetaModelOf(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<ParameterSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    specs.push_back({name, tensor.sizes().vec(), tensor.scalar_type()});
  }
  const MetaDeviceGuard meta_device;
  return ModuleWith(specs);
}

struct MeshCase {
  std::string name;
  std::vector<MeshDim> dims;
  std::vector<Placement> placements;
};

int64_t WorldSize(const MeshCase& mesh_case) {
  int64_t size = 1;
  for (const MeshDim& dim : mesh_case.dims) size *= dim.size;
  return size;
}

std::vector<MeshCase> MeshCases() {
  const Placement replicate = Placement::Replicate();
  std::vector<MeshCase> cases;
  for (const int64_t size : {1, 2, 3, 4, 8}) {
    for (const int64_t dim : {0, 1}) {
      cases.push_back({absl::StrCat("world ", size, ", Shard(", dim, ")"),
                       {{"shard", size}},
                       {Placement::Shard(dim)}});
    }
  }
  cases.push_back({"replicated", {{"replicate", 3}}, {replicate}});
  cases.push_back({"hybrid 2x2",
                   {{"replicate", 2}, {"shard", 2}},
                   {replicate, Placement::Shard(0)}});
  cases.push_back({"hybrid 2x4",
                   {{"replicate", 2}, {"shard", 4}},
                   {replicate, Placement::Shard(0)}});
  cases.push_back({"hybrid of columns 2x2",
                   {{"replicate", 2}, {"shard", 2}},
                   {replicate, Placement::Shard(1)}});
  cases.push_back({"rows and columns 2x4",
                   {{"shard", 2}, {"tensor", 4}},
                   {Placement::Shard(0), Placement::Shard(1)}});
  cases.push_back({"rows twice 2x2",
                   {{"tensor", 2}, {"shard", 2}},
                   {Placement::Shard(0), Placement::Shard(0)}});
  return cases;
}

class ShardedCheckpointTest : public ::testing::Test {
 protected:
  ShardedCheckpointTest()
      : folder_(absl::StrCat(
            ::testing::TempDir(), "ShardedCheckpointTest.",
            ::testing::UnitTest::GetInstance()->current_test_info()->name())) {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  ~ShardedCheckpointTest() override { fs::remove_all(folder_); }

  std::string Path(absl::string_view name) const {
    return absl::StrCat(folder_, "/", name);
  }

  // Two files and an index: shapes that divide into chunks evenly, unevenly and
  // not at all, of several types; element i is some function of i.
  void WriteCheckpoint(const std::string& folder) const {
    fs::create_directories(folder);
    const std::vector<std::vector<TensorSpecOf>> files = {
        {{"embed.weight", TensorDtype::kBF16, {37, 5}},
         {"blocks.0.norm", TensorDtype::kF32, {3}},
         {"blocks.0.attn.weight", TensorDtype::kF32, {16, 12}},
         {"steps", TensorDtype::kI64, {}}},
        {{"blocks.1.conv", TensorDtype::kF16, {6, 9, 2, 1}},
         {"blocks.1.wide", TensorDtype::kF32, {5, 40'000}},
         {"blocks.1.none", TensorDtype::kF32, {0, 4}},
         {"blocks.1.ids", TensorDtype::kI64, {2, 2}}}};
    nlohmann::json weight_map;
    for (size_t i = 0; i < files.size(); ++i) {
      const std::string file =
          absl::StrFormat("model-%05d-of-00002.safetensors", i + 1);
      std::vector<std::string> bytes;
      std::vector<TensorView> views;
      for (const TensorSpecOf& spec : files[i]) {
        int64_t size = TensorDtypeBits(spec.dtype) / 8;
        for (const int64_t extent : spec.shape) size *= extent;
        std::string& content = bytes.emplace_back();
        for (int64_t byte = 0; byte < size; ++byte) {
          content.push_back(static_cast<char>(
              config::Fnv1a32(absl::StrCat(spec.name, byte))));
        }
        weight_map[spec.name] = file;
      }
      for (size_t j = 0; j < files[i].size(); ++j) {
        views.push_back({files[i][j].name, files[i][j].dtype, files[i][j].shape,
                         bytes[j].data()});
      }
      ASSERT_THAT(WriteSafetensors(absl::StrCat(folder, "/", file), views, {}),
                  IsOk());
    }
    std::ofstream(absl::StrCat(folder, "/model.safetensors.index.json"))
        << nlohmann::json{{"weight_map", weight_map}};
  }

  struct TensorSpecOf {
    std::string name;
    TensorDtype dtype;
    std::vector<int64_t> shape;
  };

  const std::string folder_;
};

// Loads on every rank, compares with chunks of the whole tensors, saves, and
// compares with the file. With each rank reading for itself, with each byte
// read once in the world, and once for the ranks along the last dimension: a
// node.
TEST_F(ShardedCheckpointTest, RoundTripsOverAllMeshes) {
  WriteCheckpoint(Path("in"));
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
  ASSERT_EQ(whole.size(), 8);
  int64_t whole_bytes = 0;
  for (const auto& [name, tensor] : whole) whole_bytes += tensor.nbytes();

  for (const MeshCase& mesh_case : MeshCases()) {
    for (const std::string reads : {"each", "world", "node"}) {
      SCOPED_TRACE(absl::StrCat(mesh_case.name, ", ", reads));
      const std::string out = Path(absl::StrCat(mesh_case.name, reads));
      std::mutex mutex;
      int64_t bytes_read = 0;
      RunRanks(WorldSize(mesh_case), [&](int, GroupPtr group) {
        LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                  DeviceMesh::Create(group, mesh_case.dims));
        const ModulePtr model = MetaModelOf(whole);
        LoadCheckpointOptions load;
        load.mesh = mesh;
        load.layouts = ShardedLayouts(*model, mesh, mesh_case.placements);
        for (int64_t dim = reads == "node" ? mesh->ndim() - 1 : 0;
             reads != "each" && dim < mesh->ndim(); ++dim) {
          load.read_once_dims.push_back(dim);
        }
        LoadProgress last;
        load.progress = [&](const LoadProgress& progress) { last = progress; };
        LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                                  LoadCheckpoint(*model, Path("in"), load));
        EXPECT_EQ(last.bytes_done, last.bytes_total);
        for (const auto& item : model->named_parameters()) {
          SCOPED_TRACE(item.key());
          const at::Tensor expected =
              ShardOf(whole.at(item.key()), *mesh, mesh_case.placements);
          EXPECT_EQ(item.value().sizes(), expected.sizes());
          EXPECT_EQ(Bytes(item.value()), Bytes(expected));
          EXPECT_EQ(item.value().requires_grad(),
                    at::isFloatingType(item.value().scalar_type()));
        }
        {
          const std::lock_guard<std::mutex> lock(mutex);
          bytes_read += report.bytes_read;
        }
        SaveCheckpointOptions save;
        save.mesh = mesh;
        save.layouts = load.layouts;
        save.origins = report.origins;
        save.max_file_bytes = 10'000;
        EXPECT_THAT(SaveCheckpoint(*model, out, save), IsOk());
      });
      if (reads == "world") {
        EXPECT_EQ(bytes_read, whole_bytes);
      }
      const std::map<std::string, at::Tensor> saved = ReadCheckpoint(out);
      ASSERT_EQ(saved.size(), whole.size());
      for (const auto& [name, tensor] : saved) {
        EXPECT_EQ(Bytes(tensor), Bytes(whole.at(name))) << name;
        EXPECT_EQ(tensor.scalar_type(), whole.at(name).scalar_type());
        EXPECT_EQ(tensor.sizes(), whole.at(name).sizes());
      }
    }
  }
}

// Only the rows that a rank holds are read.
TEST_F(ShardedCheckpointTest, ReadsLittleMoreThanItsRows) {
  WriteCheckpoint(Path("in"));
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
  RunRanks(4, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ModulePtr model = MetaModelOf(whole);
    LoadCheckpointOptions options;
    options.mesh = mesh;
    options.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                              LoadCheckpoint(*model, Path("in"), options));
    int64_t shard_bytes = 0;
    for (const at::Tensor& tensor : model->parameters()) {
      shard_bytes += tensor.nbytes();
    }
    EXPECT_EQ(report.bytes_read, shard_bytes);
  });
}

// A checkpoint of 90 MB that many use.
TEST_F(ShardedCheckpointTest, LoadsAndSavesMiniLm) {
  const std::string path = RunfilePath("minilm/model.safetensors");
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(path);
  ASSERT_EQ(whole.size(), 104);
  RunRanks(3, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ModulePtr model = MetaModelOf(whole);
    LoadCheckpointOptions load;
    load.mesh = mesh;
    load.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                              LoadCheckpoint(*model, path, load));
    SaveCheckpointOptions save;
    save.mesh = mesh;
    save.layouts = load.layouts;
    save.origins = report.origins;
    EXPECT_THAT(SaveCheckpoint(*model, Path("out"), save), IsOk());
  });
  const std::map<std::string, at::Tensor> saved = ReadCheckpoint(Path("out"));
  ASSERT_EQ(saved.size(), whole.size());
  for (const auto& [key, tensor] : whole) {
    EXPECT_TRUE(at::equal(saved.at(key), tensor)) << key;
  }
}

// The local shards that PyTorch's fully_shard and distribute_tensor make of
// checkpoints that diffusers and transformers wrote; tests/parity makes both.
class PyTorchShardsTest : public ::testing::TestWithParam<std::string> {};

TEST_P(PyTorchShardsTest, AreThoseThatAreLoaded) {
  const std::string testdata = "trainer_lora/tests/testdata/";
  std::ifstream json_file(
      RunfilePath(absl::StrCat(testdata, GetParam(), "_shards.json")));
  const nlohmann::json expected = nlohmann::json::parse(json_file);
  const std::string index =
      GetParam() == "wan" ? "diffusion_pytorch_model" : "model";
  const std::string path = RunfilePath(absl::StrCat(
      testdata, GetParam(), "_checkpoint/", index, ".safetensors.index.json"));
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(path);

  const Placement replicate = Placement::Replicate();
  const std::vector<MeshCase> cases = {
      {"fully_shard_4", {{"shard", 4}}, {Placement::Shard(0)}},
      {"fully_shard_2x2",
       {{"replicate", 2}, {"shard", 2}},
       {replicate, Placement::Shard(0)}},
      {"shard0_shard0_2x2",
       {{"outer", 2}, {"inner", 2}},
       {Placement::Shard(0), Placement::Shard(0)}},
      {"shard1_4", {{"shard", 4}}, {Placement::Shard(1)}}};
  ASSERT_EQ(expected.size(), cases.size());
  for (const MeshCase& mesh_case : cases) {
    SCOPED_TRACE(mesh_case.name);
    RunRanks(4, [&](int rank, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh,
                                DeviceMesh::Create(group, mesh_case.dims));
      const ModulePtr model = MetaModelOf(whole);
      LoadCheckpointOptions options;
      options.mesh = mesh;
      options.layouts = ShardedLayouts(*model, mesh, mesh_case.placements);
      ASSERT_THAT(LoadCheckpoint(*model, path, options), IsOk());
      const auto parameters = model->named_parameters();
      const nlohmann::json& shards =
          expected.at(mesh_case.name).at(absl::StrCat(rank));
      EXPECT_GT(shards.size(), 10);
      for (const auto& [key, shard] : shards.items()) {
        SCOPED_TRACE(key);
        const at::Tensor& tensor = parameters[key];
        EXPECT_EQ(tensor.sizes().vec(),
                  shard.at("shape").get<std::vector<int64_t>>());
        EXPECT_EQ(TensorDtypeName(ToTensorDtype(tensor.scalar_type()).value()),
                  shard.at("dtype").get<std::string>());
        EXPECT_EQ(absl::StrFormat("%016x", config::Fnv1a64(Bytes(tensor))),
                  shard.at("fnv1a").get<std::string>());
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, PyTorchShardsTest,
                         ::testing::Values("wan", "llama"),
                         [](const auto& info) { return info.param; });

// Three projections of the file are one parameter of the model, each of whose
// parts is sharded by itself, and wears a wrapper's name.
TEST_F(ShardedCheckpointTest, FusesShardsAndSplitsProjections) {
  fs::create_directories(Path("in"));
  std::vector<float> values(8 * 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = i;
  ASSERT_THAT(WriteSafetensors(Path("in/model.safetensors"),
                               {{"module.attn.to_q.weight",
                                 TensorDtype::kF32,
                                 {4, 3},
                                 values.data()},
                                {"module.attn.to_k.weight",
                                 TensorDtype::kF32,
                                 {2, 3},
                                 values.data() + 12},
                                {"module.attn.to_v.weight",
                                 TensorDtype::kF32,
                                 {2, 3},
                                 values.data() + 18}},
                               {}),
              IsOk());
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    ModulePtr model;
    {
      const MetaDeviceGuard meta_device;
      model = ModuleWith({{"attn.to_qkv.base_layer.weight", {8, 3}}});
    }
    LoadCheckpointOptions load;
    load.mesh = mesh;
    load.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    load.layouts.at("attn.to_qkv.base_layer.weight").layout.parts = {
        {4}, {2}, {2}};
    LORA_ASSERT_OK_AND_ASSIGN(
        load.mapping, StateDictMapping::Create(
                          {{R"((.*)to_q\.(.*))", R"(\1to_qkv.\2)", 0, 3},
                           {R"((.*)to_k\.(.*))", R"(\1to_qkv.\2)", 1, 3},
                           {R"((.*)to_v\.(.*))", R"(\1to_qkv.\2)", 2, 3}}));
    ASSERT_THAT(
        load.aliases.Add("attn.to_qkv.weight", "attn.to_qkv.base_layer.weight"),
        IsOk());
    LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                              LoadCheckpoint(*model, Path("in"), load));
    const at::Tensor local = model->parameters()[0].detach();
    ASSERT_EQ(local.sizes(), at::IntArrayRef({4, 3}));
    // Rows of q, k and v: 0, 1, 4 and 6 here, 2, 3, 5 and 7 there.
    const std::vector<float> first_column =
        rank == 0 ? std::vector<float>{0, 3, 12, 18}
                  : std::vector<float>{6, 9, 15, 21};
    for (int64_t row = 0; row < 4; ++row) {
      EXPECT_EQ(local[row][0].item<float>(), first_column[row]);
    }

    SaveCheckpointOptions save;
    save.mesh = mesh;
    save.layouts = load.layouts;
    save.origins = report.origins;
    ASSERT_THAT(SaveCheckpoint(*model, Path("out"), save), IsOk());
  });
  const std::map<std::string, at::Tensor> before = ReadCheckpoint(Path("in"));
  const std::map<std::string, at::Tensor> after = ReadCheckpoint(Path("out"));
  ASSERT_EQ(after.size(), 3);
  for (const auto& [key, tensor] : after) {
    EXPECT_EQ(Bytes(tensor), Bytes(before.at(key))) << key;
  }
}

// As k and v of fewer heads than tensor parallel ranks. Of the megabyte that
// one of these ranks reads for all, it sends them more than that, in pieces.
TEST_F(ShardedCheckpointTest, ReplicasReadTheirRowsAndAreSavedOnce) {
  fs::create_directories(Path("in"));
  constexpr int64_t kColumns = 1 << 15;
  const at::Tensor whole = at::arange(8 * kColumns, at::kFloat).view({8, -1});
  ASSERT_THAT(
      WriteSafetensors(
          Path("in/model.safetensors"),
          {{"qkv", TensorDtype::kF32, {8, kColumns}, whole.const_data_ptr()}},
          {}),
      IsOk());
  RunRanks(4, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    ModulePtr model;
    {
      const MetaDeviceGuard meta_device;
      model = ModuleWith({{"qkv", {8, kColumns}}});
    }
    LoadCheckpointOptions load;
    load.mesh = mesh;
    load.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    load.layouts.at("qkv").layout.parts = {{4}, {2, 2}, {2, 4}};
    const at::Tensor rows =
        whole.index_select(0, at::tensor({rank, 4 + rank / 2, 6, 7}));
    ASSERT_THAT(LoadCheckpoint(*model, Path("in"), load), IsOk());
    const at::Tensor local = model->parameters()[0].detach();
    EXPECT_TRUE(at::equal(local, rows));
    local.zero_();
    load.read_once_dims = {0};
    ASSERT_THAT(LoadCheckpoint(*model, Path("in"), load), IsOk());
    EXPECT_TRUE(at::equal(local, rows));

    // The first rank that holds a row is the one that is asked for it.
    if (rank % 2 == 1) local[1] = -1;
    if (rank != 0) local.narrow(0, 2, 2).fill_(-1);
    SaveCheckpointOptions save;
    save.mesh = mesh;
    save.layouts = load.layouts;
    ASSERT_THAT(SaveCheckpoint(*model, Path("out"), save), IsOk());
  });
  EXPECT_EQ(Bytes(ReadCheckpoint(Path("out")).at("qkv")), Bytes(whole));
}

// Values that tell which element of the whole tensor they are.
std::optional<at::Tensor> CountingInitializer(absl::string_view name,
                                              at::IntArrayRef global_shape,
                                              at::ScalarType dtype,
                                              const TensorSlice& slice) {
  if (name != "adapter") return std::nullopt;
  at::Tensor value = at::empty(slice.sizes, dtype);
  for (int64_t row = 0; row < slice.sizes[0]; ++row) {
    for (int64_t column = 0; column < slice.sizes[1]; ++column) {
      value[row][column] = (slice.offsets[0] + row) * global_shape[1] +
                           slice.offsets[1] + column;
    }
  }
  return value;
}

TEST_F(ShardedCheckpointTest, MakesWhatIsMissingSliceBySlice) {
  ASSERT_THAT(WriteSafetensors(Path("model.safetensors"), {}, {}), IsOk());
  RunRanks(4, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(
        const MeshPtr mesh,
        DeviceMesh::Create(group, {{"shard", 2}, {"tensor", 2}}));
    const std::vector<Placement> placements = {Placement::Shard(0),
                                               Placement::Shard(1)};
    ModulePtr model;
    {
      const MetaDeviceGuard meta_device;
      model = ModuleWith({{"adapter", {5, 3}}, {"gate_compress.w", {3, 2}}});
    }
    LoadCheckpointOptions options;
    options.mesh = mesh;
    options.layouts = ShardedLayouts(*model, mesh, placements);
    options.missing_parameter_initializer = CountingInitializer;
    options.zero_patterns = {R"(.*gate_compress.*)"};
    LORA_ASSERT_OK_AND_ASSIGN(
        const LoadCheckpointReport report,
        LoadCheckpoint(*model, Path("model.safetensors"), options));
    EXPECT_THAT(report.initialized, ElementsAre("adapter"));
    EXPECT_THAT(report.zeroed, ElementsAre("gate_compress.w"));
    const auto parameters = model->named_parameters();
    const at::Tensor whole = *CountingInitializer("adapter", {5, 3}, at::kFloat,
                                                  TensorSlice::Whole({5, 3}));
    EXPECT_EQ(Bytes(parameters["adapter"]),
              Bytes(ShardOf(whole, *mesh, placements)));
    EXPECT_EQ(parameters["gate_compress.w"].count_nonzero().item<int64_t>(), 0);
    EXPECT_FALSE(parameters["gate_compress.w"].is_meta());
  });
}

// A second load goes into the shards that are there.
TEST_F(ShardedCheckpointTest, LoadsAgainIntoTheSameMemory) {
  WriteCheckpoint(Path("in"));
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
  RunRanks(2, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ModulePtr model = MetaModelOf(whole);
    LoadCheckpointOptions options;
    options.mesh = mesh;
    options.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    ASSERT_THAT(LoadCheckpoint(*model, Path("in"), options), IsOk());
    const at::Tensor weight = model->named_parameters()["blocks.0.attn.weight"];
    const void* const memory = weight.data_ptr();
    weight.detach().zero_();
    ASSERT_THAT(LoadCheckpoint(*model, Path("in"), options), IsOk());
    EXPECT_EQ(weight.data_ptr(), memory);
    EXPECT_EQ(Bytes(weight), Bytes(ShardOf(whole.at("blocks.0.attn.weight"),
                                           *mesh, {Placement::Shard(0)})));
  });
}

// What goes wrong on one rank is the same error on all, and nothing is loaded.
class FailingRankTest : public ShardedCheckpointTest {
 protected:
  // What `run` returns on each of three ranks, which must be the same.
  static absl::Status StatusOfAllRanks(
      const std::function<absl::Status(int rank, const MeshPtr& mesh)>& run) {
    std::mutex mutex;
    std::vector<absl::Status> statuses;
    RunRanks(3, [&](int rank, GroupPtr group) {
      LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
      const absl::Status status = run(rank, mesh);
      const std::lock_guard<std::mutex> lock(mutex);
      statuses.push_back(status);
    });
    EXPECT_EQ(statuses.size(), 3);
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status, statuses.front());
    }
    return statuses.empty() ? absl::UnknownError("no rank") : statuses.front();
  }

  // The options of a load into shards of `model`.
  static LoadCheckpointOptions OptionsFor(const torch::nn::Module& model,
                                          const MeshPtr& mesh, bool read_once) {
    LoadCheckpointOptions options;
    options.mesh = mesh;
    options.layouts = ShardedLayouts(model, mesh, {Placement::Shard(0)});
    if (read_once) options.read_once_dims = {0};
    return options;
  }

  // Rank 1 loads from "other", the others from "in".
  void ExpectErrorOnAllRanks(absl::StatusCode code,
                             const std::vector<std::string>& substrings,
                             bool read_once = false) {
    const std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
    const absl::Status status =
        StatusOfAllRanks([&](int rank, const MeshPtr& mesh) {
          const ModulePtr model = MetaModelOf(whole);
          absl::Status of_rank =
              LoadCheckpoint(*model, Path(rank == 1 ? "other" : "in"),
                             OptionsFor(*model, mesh, read_once))
                  .status();
          for (const at::Tensor& tensor : model->parameters()) {
            EXPECT_TRUE(tensor.is_meta());
          }
          return of_rank;
        });
    EXPECT_EQ(status.code(), code);
    for (const std::string& substring : substrings) {
      EXPECT_THAT(status.message(), HasSubstr(substring));
    }
  }
};

TEST_F(FailingRankTest, HasNoFile) {
  WriteCheckpoint(Path("in"));
  ExpectErrorOnAllRanks(absl::StatusCode::kNotFound,
                        {"rank 1: ", Path("other")});
}

TEST_F(FailingRankTest, HasAnotherCheckpoint) {
  WriteCheckpoint(Path("in"));
  WriteCheckpoint(Path("other"));
  const std::string file = Path("other/model-00001-of-00002.safetensors");
  // Of the same names, but one of another type.
  std::vector<char> zeros(4096);
  ASSERT_THAT(
      WriteSafetensors(
          file,
          {{"embed.weight", TensorDtype::kF16, {37, 5}, zeros.data()},
           {"blocks.0.norm", TensorDtype::kF32, {3}, zeros.data() + 1000},
           {"blocks.0.attn.weight",
            TensorDtype::kF32,
            {16, 12},
            zeros.data() + 2000},
           {"steps", TensorDtype::kI64, {}, zeros.data() + 3000}},
          {}),
      IsOk());
  ExpectErrorOnAllRanks(absl::StatusCode::kFailedPrecondition,
                        {"only on rank 1", "embed.weight F16 [37, 5]"});
}

// Cut after the headers were read: by the initializer of a further tensor.
TEST_F(FailingRankTest, CannotReadItsData) {
  for (const bool read_once : {false, true}) {
    SCOPED_TRACE(read_once);
    WriteCheckpoint(Path("in"));
    WriteCheckpoint(Path("other"));
    std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
    whole["zz"] = at::empty({3});
    const auto load = [&](int rank, const MeshPtr& mesh) {
      const ModulePtr model = MetaModelOf(whole);
      LoadCheckpointOptions options = OptionsFor(*model, mesh, read_once);
      const std::string path = Path(rank == 1 ? "other" : "in");
      options.missing_parameter_initializer =
          [&](absl::string_view, at::IntArrayRef, at::ScalarType dtype,
              const TensorSlice& slice) {
            for (int i = 1; rank == 1 && i <= 2; ++i) {
              // Just after the header.
              fs::resize_file(
                  absl::StrCat(path, "/model-0000", i, "-of-00002.safetensors"),
                  600);
            }
            return std::make_optional(at::empty(slice.sizes, dtype));
          };
      absl::Status status = LoadCheckpoint(*model, path, options).status();
      for (const at::Tensor& tensor : model->parameters()) {
        EXPECT_TRUE(tensor.is_meta());
      }
      return status;
    };
    EXPECT_THAT(StatusOfAllRanks(load),
                StatusIs(absl::StatusCode::kDataLoss,
                         AllOf(HasSubstr("rank 1: "), HasSubstr(Path("other")),
                               HasSubstr("the file ends at byte"))));
  }
}

// The callback throws while others wait for what the rank read.
TEST_F(FailingRankTest, HasACallbackThatThrows) {
  for (const bool read_once : {false, true}) {
    SCOPED_TRACE(read_once);
    WriteCheckpoint(Path("in"));
    std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
    whole["zz"] = at::empty({3});
    const absl::Time start = absl::Now();
    const auto load = [&](int rank, const MeshPtr& mesh) {
      const ModulePtr model = MetaModelOf(whole);
      LoadCheckpointOptions options = OptionsFor(*model, mesh, read_once);
      options.missing_parameter_initializer =
          [&](absl::string_view, at::IntArrayRef, at::ScalarType dtype,
              const TensorSlice& slice) {
            // Until a callback is due.
            if (slice.numel() > 0) absl::SleepFor(absl::Milliseconds(200));
            return std::make_optional(at::empty(slice.sizes, dtype));
          };
      options.progress = [&](const LoadProgress&) {
        if (rank == 1) throw std::runtime_error("no terminal");
      };
      return LoadCheckpoint(*model, Path("in"), options).status();
    };
    EXPECT_THAT(
        StatusOfAllRanks(load),
        StatusIs(absl::StatusCode::kInternal,
                 AllOf(HasSubstr("rank 1: "), HasSubstr("no terminal"))));
    // Not after the timeout of a collective.
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  }
}

// As where its memory runs out. A sparse tensor has no rows to take.
TEST_F(FailingRankTest, CannotGiveItsRows) {
  const absl::Time start = absl::Now();
  const auto save = [&](int rank, const MeshPtr& mesh) {
    torch::nn::Module model;
    const at::Tensor rows = at::ones({2, 4});
    model.register_buffer("rows", rank == 1 ? rows.to_sparse() : rows);
    SaveCheckpointOptions options;
    options.mesh = mesh;
    StateLayout& layout = options.layouts["rows"];
    layout.global_shape = {6, 4};
    layout.layout = {mesh, {Placement::Shard(0)}};
    return SaveCheckpoint(model, Path("out"), options);
  };
  EXPECT_THAT(StatusOfAllRanks(save), StatusIs(absl::StatusCode::kInternal,
                                               HasSubstr("rank 1: saving ")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  EXPECT_FALSE(fs::exists(Path("out")));
}

TEST_F(ShardedCheckpointTest, RefusesLayoutsThatDoNotFit) {
  WriteCheckpoint(Path("in"));
  const std::map<std::string, at::Tensor> whole = ReadCheckpoint(Path("in"));
  RunRanks(2, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ModulePtr model = MetaModelOf(whole);
    const StateLayouts layouts =
        ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    LoadCheckpointOptions options;
    options.layouts = layouts;
    EXPECT_THAT(LoadCheckpoint(*model, Path("in"), options),
                StatusIs(kInvalid, HasSubstr("layouts need a mesh")));
    options.mesh = mesh;
    options.layouts["no.such"] = layouts.at("embed.weight");
    EXPECT_THAT(LoadCheckpoint(*model, Path("in"), options),
                StatusIs(kInvalid, HasSubstr("a layout for no.such")));
    options.layouts = layouts;
    options.layouts.at("embed.weight").global_shape = {37, 6};
    EXPECT_THAT(LoadCheckpoint(*model, Path("in"), options),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("embed.weight has [37, 5] in the model")));
    options.layouts = layouts;
    options.read_once_dims = {1};
    EXPECT_THAT(LoadCheckpoint(*model, Path("in"), options),
                StatusIs(kInvalid, HasSubstr("rank 0: ")));
    options.read_once_dims = {};
    options.num_threads = 0;
    EXPECT_THAT(LoadCheckpoint(*model, Path("in"), options),
                StatusIs(kInvalid, HasSubstr("num_threads")));
  });
}

TEST_F(ShardedCheckpointTest, DescribesALoad) {
  WriteCheckpoint(Path("in"));
  const ModulePtr model = MetaModelOf(ReadCheckpoint(Path("in")));
  LORA_ASSERT_OK_AND_ASSIGN(const std::string text,
                            DescribeLoad(*model, Path("in"), {}));
  EXPECT_THAT(text, AllOf(HasSubstr("8 tensors from 8 in the checkpoint"),
                          HasSubstr("embed.weight BF16 [37, 5]")));
  EXPECT_TRUE(model->parameters()[0].is_meta());
}

}  // namespace
}  // namespace trainer_lora::distributed
