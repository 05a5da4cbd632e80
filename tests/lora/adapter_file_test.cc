// tests/parity opens such a folder with PEFT itself; here is the rest.
#include "lora/adapter_file.h"

#include <sys/stat.h>

#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "c10/core/InferenceMode.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/merge.h"
#include "nlohmann/json.hpp"
#include "tests/testutil/file_size_limit.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using ::trainer_lora::testutil::DieAtFileSize;
using ::trainer_lora::testutil::FileSizeLimit;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::StatusIs;

namespace fs = std::filesystem;

// Less than the tensors of AdaptedModel() take in a file, with its header.
constexpr int kCutBytes = 500;

struct Model : torch::nn::Module {
  Model() {
    register_module("to_q", to_q);
    register_module("to_v", to_v);
  }
  ReplicatedLinear to_q{5, 7};
  ReplicatedLinear to_v{5, 3};
};

config::LoraConfig Config(int64_t rank = 2, double alpha = 4) {
  config::LoraConfig config;
  config.enable = true;
  config.rank = rank;
  config.alpha = alpha;
  return config;
}

// A model with adapters of random values.
std::unique_ptr<Model> AdaptedModel(int64_t rank = 2, double alpha = 4,
                                    at::ScalarType dtype = at::kFloat) {
  auto model = std::make_unique<Model>();
  model->to(dtype);
  EXPECT_THAT(EnableLoraTraining(*model, Config(rank, alpha)), IsOk());
  for (const auto& item : TrainableParameters(*model)) {
    item.parameter.detach().uniform_(-1, 1);
  }
  return model;
}

std::vector<at::Tensor> AdapterValues(const Model& model) {
  std::vector<at::Tensor> values;
  for (const auto& item : TrainableParameters(model)) {
    values.push_back(item.parameter.detach().clone());
  }
  return values;
}

void ExpectEqual(const std::vector<at::Tensor>& a,
                 const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

class AdapterFileTest : public ::testing::Test {
 protected:
  AdapterFileTest() {
    const auto* info = testing::UnitTest::GetInstance()->current_test_info();
    parent_ = fs::path(testing::TempDir()) / info->name();
    fs::remove_all(parent_);
    fs::create_directories(parent_);
  }

  std::string Path(const std::string& name) const {
    return (parent_ / name).string();
  }

  std::vector<std::string> FilesBeside(const std::string& folder) const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Path(folder))) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  nlohmann::json ReadConfig(const std::string& folder) const {
    std::ifstream file(Path(folder) + "/adapter_config.json");
    return nlohmann::json::parse(file);
  }

  void WriteConfig(const std::string& folder, const std::string& text) const {
    std::ofstream(Path(folder) + "/adapter_config.json") << text;
  }

 private:
  fs::path parent_;
};

TEST_F(AdapterFileTest, WritesPeftsTwoFilesAndNothingElse) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  EXPECT_THAT(FilesBeside("."), ElementsAre("adapter"));
  EXPECT_THAT(
      FilesBeside("adapter"),
      UnorderedElementsAre("adapter_config.json", "adapter_model.safetensors"));
}

TEST_F(AdapterFileTest, TensorsHavePeftsNamesAndTheModelsValues) {
  const auto model = AdaptedModel();
  ASSERT_THAT(SaveAdapter(*model, Path("adapter")), IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const distributed::SafetensorsFile file,
                            distributed::SafetensorsFile::Open(
                                Path("adapter/adapter_model.safetensors")));
  std::vector<std::string> names;
  for (const auto& info : file.tensors()) names.push_back(info.name);
  EXPECT_THAT(names,
              UnorderedElementsAre("base_model.model.to_q.lora_A.weight",
                                   "base_model.model.to_q.lora_B.weight",
                                   "base_model.model.to_v.lora_A.weight",
                                   "base_model.model.to_v.lora_B.weight"));
  const auto* info = file.Find("base_model.model.to_v.lora_B.weight");
  ASSERT_NE(info, nullptr);
  EXPECT_THAT(info->shape, ElementsAre(3, 2));
  at::Tensor stored = at::empty({3, 2});
  ASSERT_THAT(
      file.Read(*info, 0,
                absl::MakeSpan(static_cast<char*>(stored.data_ptr()), 24)),
      IsOk());
  EXPECT_TRUE(at::equal(stored, model->to_v->lora_B()));
}

TEST_F(AdapterFileTest, TheConfigSaysRankAlphaAndExactTargets) {
  struct Case {
    double alpha;
    std::string json;
  };
  for (const Case& test :
       {Case{32, "32"}, Case{0.5, "0.5"}, Case{1, "1"}, Case{16, "16"}}) {
    const std::string folder = "alpha_" + test.json;
    ASSERT_THAT(SaveAdapter(*AdaptedModel(16, test.alpha), Path(folder),
                            {"some/model", "FEATURE_EXTRACTION"}),
                IsOk());
    const nlohmann::json config = ReadConfig(folder);
    EXPECT_EQ(config["peft_type"], "LORA");
    EXPECT_EQ(config["r"].dump(), "16");
    EXPECT_EQ(config["lora_alpha"].dump(), test.json);
    EXPECT_EQ(config["target_modules"], "to_q|to_v");
    EXPECT_EQ(config["base_model_name_or_path"], "some/model");
    EXPECT_EQ(config["task_type"], "FEATURE_EXTRACTION");
  }
}

// PEFT's default for a missing alpha is another number than the rank.
TEST_F(AdapterFileTest, TheConfigSaysAnAlphaThatWasLeftOut) {
  config::LoraConfig config = Config(/*rank=*/3);
  config.alpha.reset();
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  ASSERT_THAT(SaveAdapter(model, Path("adapter")), IsOk());
  EXPECT_EQ(ReadConfig("adapter")["lora_alpha"], 3);
}

TEST_F(AdapterFileTest, WhatWasSavedLoadsBitwise) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const std::string folder = c10::toString(dtype);
    const auto saved = AdaptedModel(2, 0.5, dtype);
    ASSERT_THAT(SaveAdapter(*saved, Path(folder)), IsOk());
    const auto loaded = AdaptedModel(2, 0.5, dtype);
    ASSERT_THAT(LoadAdapter(*loaded, Path(folder)), IsOk());
    ExpectEqual(AdapterValues(*loaded), AdapterValues(*saved));
    EXPECT_EQ(TrainableParameters(*loaded).size(), 4);
  }
}

// An adapter that trains in float32 over a narrower base does not lose bits.
TEST_F(AdapterFileTest, AFloat32AdapterOfANarrowerBaseStaysFloat32) {
  config::LoraConfig config = Config();
  config.adapter_dtype = config::AdapterDtype::kFloat32;
  for (const at::ScalarType base : {at::kBFloat16, at::kHalf}) {
    const std::string folder = c10::toString(base);
    SCOPED_TRACE(folder);
    const auto adapted_model = [&] {
      auto model = std::make_unique<Model>();
      model->to(base);
      EXPECT_THAT(EnableLoraTraining(*model, config), IsOk());
      return model;
    };
    const auto model = adapted_model();
    for (const auto& item : TrainableParameters(*model)) {
      item.parameter.detach().uniform_(-1, 1);
    }
    ASSERT_THAT(SaveAdapter(*model, Path(folder)), IsOk());
    const auto copy = adapted_model();
    ASSERT_THAT(LoadAdapter(*copy, Path(folder)), IsOk());
    for (const at::Tensor& value : AdapterValues(*copy)) {
      EXPECT_EQ(value.scalar_type(), at::kFloat);
    }
    EXPECT_EQ(copy->to_q->weight().scalar_type(), base);
    ExpectEqual(AdapterValues(*copy), AdapterValues(*model));
  }
}

TEST_F(AdapterFileTest, ANonContiguousFactorIsWrittenRight) {
  const auto saved = AdaptedModel();
  saved->to_q->lora_A().set_data(at::rand({5, 2}).t());
  ASSERT_FALSE(saved->to_q->lora_A().is_contiguous());
  ASSERT_THAT(SaveAdapter(*saved, Path("adapter")), IsOk());
  const auto loaded = AdaptedModel();
  ASSERT_THAT(LoadAdapter(*loaded, Path("adapter")), IsOk());
  ExpectEqual(AdapterValues(*loaded), AdapterValues(*saved));
}

TEST_F(AdapterFileTest, NeverWritesOverWhatIsThere) {
  fs::create_directories(Path("empty"));
  std::ofstream(Path("file")) << "text";
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  for (const char* taken :
       {"empty", "file", "adapter", "adapter/", "adapter//"}) {
    EXPECT_THAT(SaveAdapter(*AdaptedModel(), Path(taken)),
                StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr("exists")))
        << taken;
  }
  EXPECT_EQ(FilesBeside(".").size(), 3);
}

TEST_F(AdapterFileTest, AFailedSaveLeavesNothingBehind) {
  EXPECT_THAT(SaveAdapter(*AdaptedModel(), Path("no/such/parent")),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no/such")));
  Model plain;
  EXPECT_THAT(SaveAdapter(plain, Path("adapter")),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("has no LoRA adapter")));
  const auto model = AdaptedModel();
  model->to_q->lora_A().set_data(model->to_q->lora_A().to(at::kComplexDouble));
  EXPECT_THAT(
      SaveAdapter(*model, Path("adapter")),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("to_q.lora_A.weight is of type ComplexDouble")));
  EXPECT_TRUE(FilesBeside(".").empty());
}

TEST_F(AdapterFileTest, AFullDiskIsResourceExhausted) {
  const auto model = AdaptedModel();
  absl::Status status;
  {
    const FileSizeLimit disk_full(kCutBytes);
    status = SaveAdapter(*model, Path("adapter"));
  }
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                               HasSubstr("writing")));
  EXPECT_TRUE(FilesBeside(".").empty());
}

// The child repeats the test up to the save that kills it.
TEST_F(AdapterFileTest, AKilledSaveLeavesAFolderBesideTheTargetAlone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto model = AdaptedModel();
  EXPECT_EXIT(
      {
        DieAtFileSize(kCutBytes);
        SaveAdapter(*model, Path("adapter")).IgnoreError();
      },
      ::testing::KilledBySignal(SIGXFSZ), "");
  EXPECT_THAT(FilesBeside("."), ElementsAre(HasSubstr("adapter.tmp-")));
  ASSERT_THAT(SaveAdapter(*model, Path("adapter")), IsOk());
  const auto loaded = AdaptedModel();
  ASSERT_THAT(LoadAdapter(*loaded, Path("adapter")), IsOk());
  ExpectEqual(AdapterValues(*loaded), AdapterValues(*model));
}

TEST_F(AdapterFileTest, RefusesToWriteTextThatIsNotUtf8) {
  SaveAdapterOptions options;
  options.base_model_name_or_path = "/models/\xff";
  EXPECT_THAT(
      SaveAdapter(*AdaptedModel(), Path("adapter"), options),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("not UTF-8")));
  EXPECT_TRUE(FilesBeside(".").empty());
}

TEST_F(AdapterFileTest, LoadingWithAnotherRankOrAlphaNamesBoth) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(16, 32), Path("adapter")), IsOk());
  EXPECT_THAT(
      LoadAdapter(*AdaptedModel(8, 32), Path("adapter")),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("saved with rank 16"), HasSubstr("rank 8"))));
  EXPECT_THAT(LoadAdapter(*AdaptedModel(16, 16), Path("adapter")),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("alpha 32"), HasSubstr("alpha 16"))));
}

TEST_F(AdapterFileTest, LayersKeepTheirOwnRankAndAlpha) {
  config::LoraConfig config = Config(/*rank=*/2, /*alpha=*/4);
  config.rank_pattern = {{"to_v", 3}};
  config.alpha_pattern = {{"to_v", 0.5}};
  config.dropout = 0.25;
  Model model;
  ASSERT_THAT(EnableLoraTraining(model, config), IsOk());
  ASSERT_THAT(SaveAdapter(model, Path("adapter")), IsOk());

  const nlohmann::json saved = ReadConfig("adapter");
  EXPECT_EQ(saved["r"], 2);
  EXPECT_EQ(saved["lora_alpha"], 4);
  EXPECT_EQ(saved["rank_pattern"], (nlohmann::json{{"^to_v", 3}}));
  EXPECT_EQ(saved["alpha_pattern"], (nlohmann::json{{"^to_v", 0.5}}));
  EXPECT_EQ(saved["lora_dropout"], 0.25);

  Model copy;
  ASSERT_THAT(EnableLoraTraining(copy, config), IsOk());
  ASSERT_THAT(LoadAdapter(copy, Path("adapter")), IsOk());
  ExpectEqual(AdapterValues(copy), AdapterValues(model));

  config.alpha_pattern[0].second = 1;
  Model other;
  ASSERT_THAT(EnableLoraTraining(other, config), IsOk());
  EXPECT_THAT(LoadAdapter(other, Path("adapter")),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("to_v"), HasSubstr("alpha 0.5"),
                             HasSubstr("alpha 1"))));
}

// PEFT's own files name layers by the end of their names.
TEST_F(AdapterFileTest, ReadsPatternsAsPeftDoes) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  const auto load = [&](const std::string& patterns) {
    WriteConfig(
        "adapter",
        R"({"peft_type": "LORA", "r": 8, "lora_alpha": 16, )" + patterns + "}");
    return LoadAdapter(*AdaptedModel(/*rank=*/2, /*alpha=*/4), Path("adapter"));
  };
  EXPECT_THAT(load(R"("rank_pattern": {"to_q": 2, "to_[vw]": 2, ".*": 3},)"
                   R"("alpha_pattern": {"to_.": 4})"),
              IsOk());
  EXPECT_THAT(load(R"("rank_pattern": {"o_q": 2, "to_v": 2},)"
                   R"("alpha_pattern": {"to_.": 4})"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("to_q was saved with rank 8 and alpha 4")));
  EXPECT_THAT(load(R"-("rank_pattern": {"(?=to_q)": 2})-"),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("rank_pattern.(?=to_q) is not supported")));
  EXPECT_THAT(load(R"("rank_pattern": {"to_q": "2"})"),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("rank_pattern.to_q must be a number")));
}

TEST_F(AdapterFileTest, LoadingTensorsThatDoNotFitNamesThemAll) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  const std::vector<float> data(64, 1.0F);
  const auto view = [&data](std::string name, std::vector<int64_t> shape,
                            int64_t offset) {
    return distributed::TensorView{"base_model.model." + name + ".weight",
                                   distributed::TensorDtype::kF32,
                                   std::move(shape), &data[offset]};
  };
  distributed::TensorView four_bits = view("to_v.lora_B", {3, 2}, 31);
  four_bits.dtype = distributed::TensorDtype::kF4;
  ASSERT_THAT(
      distributed::WriteSafetensors(
          Path("adapter/adapter_model.safetensors"),
          {view("to_q.lora_A", {2, 5}, 0), view("to_q.lora_B", {7, 3}, 10),
           four_bits, view("to_z.lora_A", {2, 5}, 37)},
          {}),
      IsOk());
  const auto model = AdaptedModel();
  const auto before = AdapterValues(*model);
  EXPECT_THAT(
      LoadAdapter(*model, Path("adapter")),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          AllOf(HasSubstr("missing: base_model.model.to_v.lora_A.weight"),
                HasSubstr("unexpected: base_model.model.to_z.lora_A.weight"),
                HasSubstr("of type F4: base_model.model.to_v.lora_B.weight"),
                HasSubstr("of shape [7, 3] instead of [7, 2]: "
                          "base_model.model.to_q.lora_B.weight"))));
  ExpectEqual(AdapterValues(*model), before);
}

// The format allows it.
TEST_F(AdapterFileTest, AFileWithoutTensorsLacksThemAll) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  ASSERT_THAT(distributed::WriteSafetensors(
                  Path("adapter/adapter_model.safetensors"), {}, {}),
              IsOk());
  const auto model = AdaptedModel();
  const auto before = AdapterValues(*model);
  EXPECT_THAT(
      LoadAdapter(*model, Path("adapter")),
      StatusIs(
          absl::StatusCode::kInvalidArgument,
          AllOf(HasSubstr("missing: base_model.model.to_q.lora_A.weight"),
                HasSubstr("missing: base_model.model.to_v.lora_B.weight"))));
  ExpectEqual(AdapterValues(*model), before);
}

// Its weight has the adapter in it: another one would have no effect.
TEST_F(AdapterFileTest, RefusesToLoadIntoAMergedLayer) {
  const auto saved = AdaptedModel();
  ASSERT_THAT(SaveAdapter(*saved, Path("adapter")), IsOk());
  const auto model = AdaptedModel();
  const auto before = AdapterValues(*model);
  ASSERT_THAT(MergeAdapters(*model), IsOk());
  EXPECT_THAT(
      LoadAdapter(*model, Path("adapter")),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               HasSubstr("to_q is merged: call UnmergeAdapters first")));
  ExpectEqual(AdapterValues(*model), before);
  ASSERT_THAT(UnmergeAdapters(*model), IsOk());
  ASSERT_THAT(LoadAdapter(*model, Path("adapter")), IsOk());
  ExpectEqual(AdapterValues(*model), AdapterValues(*saved));
}

// The last parameter of the file, so that others would be loaded before it.
TEST_F(AdapterFileTest, RefusesParametersThatCannotBeWrittenBeforeAllElse) {
  ASSERT_THAT(SaveAdapter(*AdaptedModel(), Path("adapter")), IsOk());
  const auto refuses =
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("to_v.lora_B"), HasSubstr("can't be written")));
  const auto expanded = AdaptedModel();
  expanded->to_v->lora_B().set_data(at::zeros({1, 1}).expand({3, 2}));
  const auto before = AdapterValues(*expanded);
  EXPECT_THAT(LoadAdapter(*expanded, Path("adapter")), refuses);
  ExpectEqual(AdapterValues(*expanded), before);

  const auto inference = AdaptedModel();
  {
    const c10::InferenceMode inference_mode;
    inference->to_v->lora_B().unsafeGetTensorImpl()->shallow_copy_from(
        at::zeros({3, 2}).getIntrusivePtr());
  }
  ASSERT_TRUE(inference->to_v->lora_B().is_inference());
  EXPECT_THAT(LoadAdapter(*inference, Path("adapter")), refuses);
}

TEST_F(AdapterFileTest, RefusesAConfigThatIsNoFileWithoutWaiting) {
  const auto model = AdaptedModel();
  ASSERT_THAT(SaveAdapter(*model, Path("adapter")), IsOk());
  const std::string config = Path("adapter/adapter_config.json");
  fs::remove(config);
  ASSERT_EQ(mkfifo(config.c_str(), 0600), 0);
  EXPECT_THAT(LoadAdapter(*model, Path("adapter")),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("adapter_config.json is not a regular file")));
}

TEST_F(AdapterFileTest, BrokenFoldersAreClearErrors) {
  const auto model = AdaptedModel();
  const auto before = AdapterValues(*model);
  EXPECT_THAT(LoadAdapter(*model, Path("nowhere")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("nowhere")));

  ASSERT_THAT(SaveAdapter(*model, Path("adapter")), IsOk());
  struct Case {
    std::string config;
    absl::StatusCode code;
    std::string message;
  };
  const std::string numbers = R"("r": 2, "lora_alpha": 4)";
  using absl::StatusCode;
  for (const Case& test : {
           Case{"", StatusCode::kDataLoss, "adapter_config.json"},
           Case{"{\"r\": ", StatusCode::kDataLoss, "adapter_config.json"},
           Case{"[]", StatusCode::kDataLoss, "not a JSON object"},
           Case{"{" + numbers + "}", StatusCode::kFailedPrecondition,
                "peft_type is not LORA"},
           Case{R"({"peft_type": "LORA", "r": "2", "lora_alpha": 4})",
                StatusCode::kDataLoss, "r must be a number"},
           Case{R"({"peft_type": "LORA", "use_dora": true, )" + numbers + "}",
                StatusCode::kFailedPrecondition,
                "saved with use_dora: true, the "
                "model was enabled with false"},
           Case{R"({"peft_type": "LORA", "rank_pattern": {"to_q": 4}, )" +
                    numbers + "}",
                StatusCode::kFailedPrecondition, "to_q was saved with rank 4"},
       }) {
    WriteConfig("adapter", test.config);
    EXPECT_THAT(LoadAdapter(*model, Path("adapter")),
                StatusIs(test.code, HasSubstr(test.message)))
        << test.config;
  }

  WriteConfig("adapter", R"({"peft_type": "LORA", )" + numbers + "}");
  fs::resize_file(Path("adapter/adapter_model.safetensors"), 100);
  EXPECT_THAT(LoadAdapter(*model, Path("adapter")),
              StatusIs(StatusCode::kDataLoss, HasSubstr("adapter_model")));
  fs::remove(Path("adapter/adapter_model.safetensors"));
  EXPECT_THAT(LoadAdapter(*model, Path("adapter")),
              StatusIs(StatusCode::kNotFound, HasSubstr("adapter_model")));
  ExpectEqual(AdapterValues(*model), before);
}

}  // namespace
}  // namespace trainer_lora::lora
