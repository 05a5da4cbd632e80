#include "distributed/checkpoint/sharded_saver.h"

#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "config/launch_environment.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/device_mesh.h"
#include "distributed/placement.h"
#include "distributed/process_group.h"
#include "distributed/state_layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/checkpoint_tensors.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/state_module.h"
#include "tests/testutil/status_matchers.h"
#include "tests/testutil/thread_ranks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"
#include "torch/nn/modules/linear.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::trainer_lora::testutil::Bytes;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::ModuleWith;
using ::trainer_lora::testutil::ProcessRanks;
using ::trainer_lora::testutil::RankScenario;
using ::trainer_lora::testutil::ReadCheckpoint;
using ::trainer_lora::testutil::RunRanks;
using ::trainer_lora::testutil::ShardOf;
using ::trainer_lora::testutil::StatusIs;

namespace fs = std::filesystem;

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using MeshPtr = std::shared_ptr<const DeviceMesh>;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kUnfit = absl::StatusCode::kFailedPrecondition;

// Three parameters and a buffer; element i is i.
ModulePtr MakeModel() {
  ModulePtr model = ModuleWith({{"a.weight", {4, 3}},
                                {"a.bias", {4}, at::kBFloat16},
                                {"b.weight", {2, 5}}});
  model->register_buffer("count", at::full({}, 7, at::kLong));
  for (const auto& item : model->named_parameters()) {
    const at::Tensor tensor = item.value().detach();
    tensor.copy_(at::arange(tensor.numel()).view(tensor.sizes()));
  }
  return model;
}

class SaveCheckpointTest : public ::testing::Test {
 protected:
  SaveCheckpointTest()
      : parent_(absl::StrCat(
            ::testing::TempDir(), "SaveCheckpointTest.",
            ::testing::UnitTest::GetInstance()->current_test_info()->name())),
        folder_(parent_ + "/out") {
    fs::remove_all(parent_);
    fs::create_directories(parent_);
  }
  ~SaveCheckpointTest() override { fs::remove_all(parent_); }

  // Everything beside and in the place of the folder.
  std::vector<std::string> Entries(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  // Expects the error, and that it leaves nothing behind.
  void ExpectError(absl::StatusCode code, const std::string& message) {
    SCOPED_TRACE(message);
    EXPECT_THAT(SaveCheckpoint(*model_, folder_, options_),
                StatusIs(code, HasSubstr(message)));
    EXPECT_THAT(Entries(parent_), IsEmpty());
  }

  const std::string parent_;
  const std::string folder_;
  ModulePtr model_ = MakeModel();
  SaveCheckpointOptions options_;
};

TEST_F(SaveCheckpointTest, WritesOneFileWithoutAnIndex) {
  ASSERT_THAT(SaveCheckpoint(*model_, folder_, options_), IsOk());
  EXPECT_THAT(Entries(parent_), ElementsAre("out"));
  EXPECT_THAT(Entries(folder_), ElementsAre("model.safetensors"));
  LORA_ASSERT_OK_AND_ASSIGN(
      const SafetensorsFile file,
      SafetensorsFile::Open(folder_ + "/model.safetensors"));
  EXPECT_THAT(file.metadata(), ElementsAre(Pair("format", "pt")));
  const auto saved = ReadCheckpoint(folder_);
  ASSERT_EQ(saved.size(), 4);
  for (const auto& item : model_->named_parameters()) {
    EXPECT_EQ(Bytes(saved.at(item.key())), Bytes(item.value()));
    EXPECT_EQ(saved.at(item.key()).scalar_type(), item.value().scalar_type());
  }
  EXPECT_EQ(saved.at("count").item<int64_t>(), 7);
}

TEST_F(SaveCheckpointTest, DividesTensorsIntoFiles) {
  options_.max_file_bytes = 45;  // a.weight has 48, a.bias 8, b.weight 40.
  options_.file_stem = "part";
  ASSERT_THAT(SaveCheckpoint(*model_, folder_, options_), IsOk());
  EXPECT_THAT(Entries(folder_), ElementsAre("part-00001-of-00004.safetensors",
                                            "part-00002-of-00004.safetensors",
                                            "part-00003-of-00004.safetensors",
                                            "part-00004-of-00004.safetensors",
                                            "part.safetensors.index.json"));
  std::ifstream index_file(folder_ + "/part.safetensors.index.json");
  const nlohmann::json index = nlohmann::json::parse(index_file);
  EXPECT_EQ(index["metadata"]["total_size"], 48 + 8 + 40 + 8);
  EXPECT_EQ(index["weight_map"].size(), 4);
  EXPECT_EQ(ReadCheckpoint(folder_).size(), 4);
}

TEST_F(SaveCheckpointTest, WritesASharedLayerOnce) {
  const torch::nn::Linear layer(2, 2);
  torch::nn::Module model;
  model.register_module("first", layer.ptr());
  model.register_module("second", layer.ptr());
  ASSERT_THAT(SaveCheckpoint(model, folder_, options_), IsOk());
  const auto saved = ReadCheckpoint(folder_);
  ASSERT_EQ(saved.size(), 2);
  EXPECT_EQ(Bytes(saved.at("first.weight")), Bytes(layer->weight));
}

TEST_F(SaveCheckpointTest, WritesRowsUnderTheirKeys) {
  options_.origins = {{"a.weight", {{"q", 1}, {"k", 0}, {"v", 3}}},
                      {"b.weight", {{"renamed", 2}}}};
  options_.left_out = {"a.bias"};
  ASSERT_THAT(SaveCheckpoint(*model_, folder_, options_), IsOk());
  const auto saved = ReadCheckpoint(folder_);
  ASSERT_EQ(saved.size(), 5);
  const at::Tensor weight = model_->named_parameters()["a.weight"].detach();
  EXPECT_EQ(Bytes(saved.at("q")), Bytes(weight.narrow(0, 0, 1)));
  EXPECT_EQ(saved.at("k").sizes(), at::IntArrayRef({0, 3}));
  EXPECT_EQ(Bytes(saved.at("v")), Bytes(weight.narrow(0, 1, 3)));
  EXPECT_EQ(saved.at("renamed").sizes(), at::IntArrayRef({2, 5}));
}

TEST_F(SaveCheckpointTest, WritesConjugateAndTransposedViews) {
  torch::nn::Module model;
  const at::Tensor values =
      at::complex(at::arange(6, at::kFloat), at::ones({6})).view({2, 3});
  model.register_buffer("conjugate", values.conj());
  model.register_buffer("transposed", at::arange(6).view({2, 3}).t());
  ASSERT_THAT(SaveCheckpoint(model, folder_, options_), IsOk());
  const auto saved = ReadCheckpoint(folder_);
  EXPECT_TRUE(at::equal(at::imag(saved.at("conjugate")),
                        at::full({2, 3}, -1, at::kFloat)));
  EXPECT_TRUE(
      at::equal(saved.at("transposed"), at::arange(6).view({2, 3}).t()));
}

TEST_F(SaveCheckpointTest, RefusesNamesThatTheModelLacks) {
  options_.left_out = {"no.such"};
  ExpectError(kInvalid, "leaves out no.such");
  options_.left_out = {};
  options_.origins = {{"no.such", {}}};
  ExpectError(kInvalid, "an origin of no.such");
  options_.origins = {};
  options_.transforms["no.such"] = {};
  ExpectError(kInvalid, "a transform of no.such");
  options_.transforms.clear();
  options_.transforms["a.weight"].inputs = {"no.input"};
  ExpectError(kInvalid, "the transform of a.weight takes no.input");
  options_.transforms.clear();
  StateLayout layout;
  options_.layouts["a.weight"] = layout;
  ExpectError(kInvalid, "layouts need a mesh");
}

TEST_F(SaveCheckpointTest, RefusesKeysAndRowsThatDoNotFit) {
  options_.origins = {{"a.weight", {{"q", 1}, {"k", 2}}}};
  ExpectError(kInvalid, "a.weight has 4 rows, and its origins 1 (q) + 2 (k)");
  options_.origins = {{"a.weight", {{"q", 3}}}};
  ExpectError(kInvalid, "a.weight has 4 rows, and its origins 3 (q)");
  // Nor may keys vanish beside one that fits.
  options_.origins = {{"a.weight", {{"q", 4}, {"k", 4}, {"v", 4}}}};
  ExpectError(kInvalid,
              "a.weight has 4 rows, and its origins 4 (q) + 4 (k) + 4 (v)");
  options_.origins = {{"a.weight", {{"q", 4}, {"k", -1}}}};
  ExpectError(kInvalid, "its origins 4 (q) + -1 (k)");
  model_->register_buffer("none", at::empty({0, 2}));
  options_.origins = {{"none", {{"a", 5}}}};
  ExpectError(kInvalid, "none has 0 rows, and its origins 5 (a)");
  options_.origins = {{"count", {{"a", 1}}}};
  ExpectError(kInvalid, "count has 0 rows, and its origins 1 (a)");
  model_ = MakeModel();
  options_.origins = {{"a.weight", {{"b.weight", 4}}}};
  ExpectError(kInvalid, "under the key b.weight");
  options_.origins = {};
  options_.file_stem = "../model";
  ExpectError(kInvalid, "file_stem is \"../model\"");
  options_.file_stem = "model";
  options_.left_out = {"a.weight", "a.bias", "b.weight", "count"};
  ExpectError(kInvalid, "nothing is left");
}

TEST_F(SaveCheckpointTest, RefusesTensorsThatCannotBeWritten) {
  model_->register_buffer("late", at::empty({2}, at::kMeta));
  ExpectError(kUnfit, "late is on the meta device");
  model_ = MakeModel();
  model_->register_buffer("complex", at::zeros({2}, at::kComplexDouble));
  ExpectError(kUnfit, "complex is of type ComplexDouble");
}

TEST_F(SaveCheckpointTest, RefusesWhatATransformShouldNotGive) {
  auto& apply = options_.transforms["a.weight"].apply;
  apply = [](const at::Tensor&, const std::vector<at::Tensor>&) {
    return at::zeros({3, 4});
  };
  ExpectError(kUnfit,
              "the transform of a.weight gave F32 [3, 4] and not F32 [4, 3]");
  apply = [](const at::Tensor& value, const std::vector<at::Tensor>&) {
    return value.to(at::kDouble);
  };
  ExpectError(kUnfit, "gave F64 [4, 3]");
  apply = [](const at::Tensor&, const std::vector<at::Tensor>&) {
    return at::Tensor();
  };
  ExpectError(kUnfit, "gave an undefined tensor");
  apply = [](const at::Tensor& value, const std::vector<at::Tensor>&) {
    TORCH_CHECK(false, "no factors");
    return value;
  };
  ExpectError(absl::StatusCode::kInternal,
              "the transform of a.weight threw: no factors");
  apply = [](const at::Tensor&, const std::vector<at::Tensor>&) -> at::Tensor {
    throw std::runtime_error("not of torch");
  };
  ExpectError(absl::StatusCode::kInternal, "threw: not of torch");
}

TEST_F(SaveCheckpointTest, AppliesATransformToATensorOfSeveralParts) {
  options_.origins = {{"a.weight", {{"q", 1}, {"v", 3}}}};
  options_.transforms["a.weight"] = {
      {"count", "a.bias"},
      [](const at::Tensor& value, const std::vector<at::Tensor>& inputs) {
        return value + inputs[0] + inputs[1].to(at::kFloat).unsqueeze(1);
      }};
  ASSERT_THAT(SaveCheckpoint(*model_, folder_, options_), IsOk());
  const auto saved = ReadCheckpoint(folder_);
  const at::Tensor expected = at::arange(12, at::kFloat).view({4, 3}) + 7 +
                              at::arange(4, at::kFloat).unsqueeze(1);
  EXPECT_TRUE(at::equal(at::cat({saved.at("q"), saved.at("v")}), expected));
}

TEST_F(SaveCheckpointTest, LeavesWhatIsThereAlone) {
  fs::create_directories(folder_);
  EXPECT_THAT(SaveCheckpoint(*model_, folder_, options_),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(folder_)));
  EXPECT_THAT(Entries(folder_), IsEmpty());
  EXPECT_THAT(Entries(parent_), ElementsAre("out"));
  EXPECT_THAT(SaveCheckpoint(*model_, parent_ + "/no/such", options_),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no/such")));
}

// A rename would replace an empty folder.
TEST_F(SaveCheckpointTest, LeavesAFolderAloneThatAppearsMeanwhile) {
  options_.transforms["a.weight"].apply = [&](const at::Tensor& value,
                                              const std::vector<at::Tensor>&) {
    fs::create_directory(folder_);
    return value;
  };
  EXPECT_THAT(SaveCheckpoint(*model_, folder_, options_),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr(folder_ + " exists")));
  EXPECT_THAT(Entries(folder_), IsEmpty());
  EXPECT_THAT(Entries(parent_), ElementsAre("out"));
}

TEST_F(SaveCheckpointTest, LetsThoseInWhomTheUmaskLetsIn) {
  for (const auto& [mask, mode] :
       std::vector<std::pair<int, int>>{{0027, 0750}, {0002, 0775}}) {
    const mode_t before = umask(mask);
    EXPECT_THAT(SaveCheckpoint(*model_, folder_, options_), IsOk());
    umask(before);
    EXPECT_EQ(static_cast<int>(fs::status(folder_).permissions()), mode);
    fs::remove_all(folder_);
  }
}

TEST_F(SaveCheckpointTest, TakesAFolderThatEndsInSlashes) {
  ASSERT_THAT(SaveCheckpoint(*model_, folder_ + "//", options_), IsOk());
  EXPECT_THAT(Entries(parent_), ElementsAre("out"));
  EXPECT_THAT(Entries(folder_), ElementsAre("model.safetensors"));
  EXPECT_THAT(SaveCheckpoint(*model_, folder_ + "//", options_),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("exists")));
}

// More than any file system has, and no memory: every row is the same one.
TEST_F(SaveCheckpointTest, LooksForRoomFirst) {
  model_->register_buffer("huge", at::zeros({1}).expand({int64_t{1} << 50}));
  ExpectError(absl::StatusCode::kResourceExhausted,
              "are left on its file system");
}

TEST_F(SaveCheckpointTest, GivesRanksThatDifferTheSameError) {
  RunRanks(3, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    SaveCheckpointOptions options;
    options.mesh = mesh;
    if (rank == 2) options.left_out = {"a.bias"};
    const absl::Status differing =
        SaveCheckpoint(*MakeModel(), folder_, options);
    options.left_out = {};
    if (rank == 1) options.max_file_bytes = 50;
    const absl::Status files = SaveCheckpoint(*MakeModel(), folder_, options);
    options.max_file_bytes = 5'000'000'000;
    if (rank == 1) options.file_stem = "";
    const absl::Status stem = SaveCheckpoint(*MakeModel(), folder_, options);
    EXPECT_THAT(differing, StatusIs(kUnfit, HasSubstr("a.bias")));
    EXPECT_THAT(files, StatusIs(kUnfit, HasSubstr("only on rank 1")));
    EXPECT_THAT(stem, StatusIs(kInvalid, HasSubstr("rank 1: file_stem")));
  });
  EXPECT_THAT(Entries(parent_), IsEmpty());
}

// Keys, shapes and files are alike: only the rows under the keys differ.
TEST_F(SaveCheckpointTest, RefusesRowsThatRanksPutUnderOtherKeys) {
  RunRanks(2, [&](int rank, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    SaveCheckpointOptions options;
    options.mesh = mesh;
    std::vector<KeyPart>& parts = options.origins["a.weight"];
    parts = {{"q", 2}, {"k", 2}};
    if (rank == 1) std::swap(parts[0], parts[1]);
    EXPECT_THAT(SaveCheckpoint(*MakeModel(), folder_, options),
                StatusIs(kUnfit, AllOf(HasSubstr("q [2, 3] from row 2"),
                                       HasSubstr("only on rank 1"))));
  });
  EXPECT_THAT(Entries(parent_), IsEmpty());
}

TEST_F(SaveCheckpointTest, RefusesAShardOfAnotherShape) {
  RunRanks(2, [&](int, GroupPtr group) {
    LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
    const ModulePtr model = MakeModel();  // Whole on both ranks.
    SaveCheckpointOptions options;
    options.mesh = mesh;
    options.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});
    EXPECT_THAT(SaveCheckpoint(*model, folder_, options),
                StatusIs(kUnfit, HasSubstr("has the shape [4, 3], and [2, 3] "
                                           "by its layout")));
  });
  EXPECT_THAT(Entries(parent_), IsEmpty());
}

// Rank 2 ends before its rows are asked for.
TEST_F(SaveCheckpointTest, EndsWhenARankIsLost) {
  ProcessRanks ranks(parent_, /*world_size=*/3);
  ranks.WaitForMark(2);
  ranks.Signal(2, SIGKILL);
  EXPECT_TRUE(ranks.EndedWell(0));
  EXPECT_TRUE(ranks.EndedWell(1));
  EXPECT_THAT(Entries(parent_), IsEmpty());
}

TEST_F(SaveCheckpointTest, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs as the ranks' processes";
  LORA_ASSERT_OK_AND_ASSIGN(const config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  ProcessGroupOptions group_options;
  group_options.timeout = std::chrono::seconds(20);
  LORA_ASSERT_OK_AND_ASSIGN(const auto group,
                            InitProcessGroup(environment, group_options));
  LORA_ASSERT_OK_AND_ASSIGN(const MeshPtr mesh, DeviceMesh::Create(group));
  const ModulePtr whole = MakeModel();
  SaveCheckpointOptions options;
  options.mesh = mesh;
  options.layouts = ShardedLayouts(*whole, mesh, {Placement::Shard(0)});
  torch::nn::Module model;
  std::map<std::string, ModulePtr> children;
  for (const auto& item : whole->named_parameters()) {
    const std::string child = item.key().substr(0, 1);
    if (children.count(child) == 0) {
      children[child] =
          model.register_module(child, std::make_shared<torch::nn::Module>());
    }
    children[child]->register_parameter(
        item.key().substr(2),
        ShardOf(item.value().detach().clone(), *mesh, {Placement::Shard(0)}));
  }
  testutil::MakeMark();
  if (mesh->rank() == 2) {
    raise(SIGSTOP);  // Until it is killed.
  }
  EXPECT_THAT(
      SaveCheckpoint(model, RankScenario() + "/out", options),
      AnyOf(StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rank")),
            StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("rank"))));
}

}  // namespace
}  // namespace trainer_lora::distributed
