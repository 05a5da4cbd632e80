#include "distributed/checkpoint/sharded_loader.h"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/Exception.h"
#include "config/logging.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/meta_device.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testutil/log_capture.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/modules/batchnorm.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace trainer_lora::distributed {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::trainer_lora::config::LogLevel;
using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::LogCapture;
using ::trainer_lora::testutil::StatusIs;

namespace fs = std::filesystem;

// in: Linear(3, 2); norm: BatchNorm1d(2), which has buffers of two types.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : in(register_module("in", torch::nn::Linear(3, 2))),
        norm(register_module("norm", torch::nn::BatchNorm1d(2))) {}
  torch::nn::Linear in;
  torch::nn::BatchNorm1d norm;
};

std::shared_ptr<NetImpl> MakeMetaNet() {
  const MetaDeviceGuard meta_device;
  return std::make_shared<NetImpl>();
}

// Tensors for a checkpoint, with their bytes.
class CheckpointBuilder {
 public:
  CheckpointBuilder& Add(const std::string& name, std::vector<int64_t> shape,
                         const std::vector<float>& values) {
    return AddBytes(name, TensorDtype::kF32, std::move(shape), values);
  }
  CheckpointBuilder& AddIntegers(const std::string& name,
                                 std::vector<int64_t> shape,
                                 const std::vector<int64_t>& values) {
    return AddBytes(name, TensorDtype::kI64, std::move(shape), values);
  }
  // The bits of float16 or bfloat16 numbers.
  CheckpointBuilder& AddBits(const std::string& name, TensorDtype dtype,
                             std::vector<int64_t> shape,
                             const std::vector<uint16_t>& bits) {
    return AddBytes(name, dtype, std::move(shape), bits);
  }
  CheckpointBuilder& Remove(const std::string& name) {
    tensors_.erase(name);
    return *this;
  }
  CheckpointBuilder& Rename(const std::string& from, const std::string& to) {
    tensors_[to] = tensors_.at(from);
    return Remove(from);
  }
  void Write(const std::string& path) const {
    std::vector<TensorView> views;
    for (const auto& [name, tensor] : tensors_) {
      views.push_back({name, tensor.dtype, tensor.shape, tensor.bytes.data()});
    }
    ASSERT_THAT(WriteSafetensors(path, views, {}), IsOk());
  }

 private:
  struct Tensor {
    TensorDtype dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };

  template <typename T>
  CheckpointBuilder& AddBytes(const std::string& name, TensorDtype dtype,
                              std::vector<int64_t> shape,
                              const std::vector<T>& values) {
    tensors_[name] = {dtype, std::move(shape),
                      std::string(reinterpret_cast<const char*>(values.data()),
                                  values.size() * sizeof(T))};
    return *this;
  }

  std::map<std::string, Tensor> tensors_;
};

// All of Net's tensors.
CheckpointBuilder NetCheckpoint() {
  return CheckpointBuilder()
      .Add("in.weight", {2, 3}, {1, 2, 3, 4, 5, 6})
      .Add("in.bias", {2}, {7, 8})
      .Add("norm.weight", {2}, {9, 10})
      .Add("norm.bias", {2}, {11, 12})
      .Add("norm.running_mean", {2}, {13, 14})
      .Add("norm.running_var", {2}, {15, 16})
      .AddIntegers("norm.num_batches_tracked", {}, {17});
}

std::vector<float> Values(const at::Tensor& tensor) {
  const at::Tensor flat =
      tensor.detach().to(at::kCPU, at::kFloat).contiguous().view({-1});
  const float* data = flat.const_data_ptr<float>();
  return std::vector<float>(data, data + flat.numel());
}

void ExpectNetIsLoaded(const NetImpl& net) {
  EXPECT_THAT(Values(net.in->weight), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(Values(net.in->bias), ElementsAre(7, 8));
  EXPECT_THAT(Values(net.norm->weight), ElementsAre(9, 10));
  EXPECT_THAT(Values(net.norm->bias), ElementsAre(11, 12));
  EXPECT_THAT(Values(net.norm->running_mean), ElementsAre(13, 14));
  EXPECT_THAT(Values(net.norm->running_var), ElementsAre(15, 16));
  EXPECT_EQ(net.norm->num_batches_tracked.item<int64_t>(), 17);
}

// The bits of every parameter and buffer, by name.
std::map<std::string, std::string> Bits(const torch::nn::Module& model) {
  std::map<std::string, std::string> bits;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor dense = tensor.detach().contiguous();
    bits[name] = std::string(static_cast<const char*>(dense.const_data_ptr()),
                             dense.nbytes());
  };
  for (const auto& item : model.named_parameters()) {
    add(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) add(item.key(), item.value());
  return bits;
}

bool IsAllOnMeta(const torch::nn::Module& model) {
  for (const at::Tensor& tensor : model.parameters()) {
    if (!tensor.is_meta()) return false;
  }
  for (const at::Tensor& tensor : model.buffers()) {
    if (!tensor.is_meta()) return false;
  }
  return true;
}

class LoadCheckpointTest : public ::testing::Test {
 protected:
  LoadCheckpointTest()
      : path_(absl::StrCat(
            ::testing::TempDir(), "/LoadCheckpointTest.",
            ::testing::UnitTest::GetInstance()->current_test_info()->name(),
            ".safetensors")) {}
  ~LoadCheckpointTest() override { fs::remove(path_); }

  const std::string path_;
  LoadCheckpointOptions options_;
};

TEST_F(LoadCheckpointTest, FillsParametersAndBuffers) {
  NetCheckpoint().Write(path_);
  NetImpl net;
  net.in->bias.set_requires_grad(false);
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(net, path_, options_));
  ExpectNetIsLoaded(net);
  EXPECT_TRUE(net.in->weight.requires_grad());
  EXPECT_FALSE(net.in->bias.requires_grad());
  EXPECT_THAT(report.loaded,
              ElementsAre("in.weight", "in.bias", "norm.weight", "norm.bias",
                          "norm.running_mean", "norm.running_var",
                          "norm.num_batches_tracked"));
  EXPECT_THAT(report.initialized, IsEmpty());
  EXPECT_THAT(report.ignored, IsEmpty());
  EXPECT_THAT(report.unexpected, IsEmpty());
  EXPECT_EQ(report.bytes_read, 16 * 4 + 8);
}

TEST_F(LoadCheckpointTest, KeepsTheMemoryOfRealParameters) {
  NetCheckpoint().Write(path_);
  NetImpl net;
  const void* memory = net.in->weight.data_ptr();
  const at::Tensor handle = net.in->weight;
  ASSERT_THAT(LoadCheckpoint(net, path_, options_), IsOk());
  EXPECT_EQ(net.in->weight.data_ptr(), memory);
  EXPECT_THAT(Values(handle), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST_F(LoadCheckpointTest, MaterializesAMetaModelUnderItsHandles) {
  NetCheckpoint().Write(path_);
  const std::shared_ptr<NetImpl> net = MakeMetaNet();
  net->in->bias.set_requires_grad(false);
  const at::Tensor handle = net->in->weight;
  ASSERT_THAT(LoadCheckpoint(*net, path_, options_), IsOk());
  ExpectNetIsLoaded(*net);
  EXPECT_THAT(Values(handle), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_TRUE(net->in->weight.requires_grad());
  EXPECT_FALSE(net->in->bias.requires_grad());
  // (1, 1, 1) * weight + bias.
  const at::Tensor out = net->in->forward(at::full({1, 3}, 1.0));
  EXPECT_THAT(Values(out), ElementsAre(13, 23));
  out.sum().backward();
  EXPECT_THAT(Values(net->in->weight.grad()), ElementsAre(1, 1, 1, 1, 1, 1));
}

TEST_F(LoadCheckpointTest, LoadsParametersForTrainingUnderInferenceMode) {
  NetCheckpoint().Write(path_);
  const std::shared_ptr<NetImpl> net = MakeMetaNet();
  {
    const c10::InferenceMode inference_mode;
    ASSERT_THAT(LoadCheckpoint(*net, path_, options_), IsOk());
  }
  EXPECT_FALSE(net->in->weight.is_inference());
  net->in->forward(at::full({1, 3}, 1.0)).sum().backward();
  EXPECT_THAT(Values(net->in->bias.grad()), ElementsAre(1, 1));
}

TEST_F(LoadCheckpointTest, FollowsAliases) {
  NetCheckpoint()
      .Rename("in.weight", "encoder.weight")
      .Rename("in.bias", "encoder.bias")
      .Write(path_);
  ASSERT_THAT(options_.aliases.Add("encoder.weight", "in.weight"), IsOk());
  ASSERT_THAT(options_.aliases.Add("encoder.bias", "in.bias"), IsOk());
  ASSERT_THAT(options_.aliases.Add("not.there", "nor.here"), IsOk());
  NetImpl net;
  ASSERT_THAT(LoadCheckpoint(net, path_, options_), IsOk());
  ExpectNetIsLoaded(net);
}

TEST_F(LoadCheckpointTest, LeavesIgnoredKeysOut) {
  NetCheckpoint()
      .Add("pooler.weight", {1}, {0})
      .Add("pooler.bias", {1}, {0})
      .AddIntegers("position_ids", {1}, {0})
      .Write(path_);
  options_.ignored_patterns = {R"(pooler\..*)", "position_ids"};
  NetImpl net;
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(net, path_, options_));
  ExpectNetIsLoaded(net);
  EXPECT_THAT(report.ignored,
              ElementsAre("position_ids", "pooler.bias", "pooler.weight"));
  EXPECT_EQ(report.bytes_read, 16 * 4 + 8);
}

TEST_F(LoadCheckpointTest, MatchesIgnoredPatternsFromEndToEnd) {
  NetCheckpoint().Add("pooler.weight", {1}, {0}).Write(path_);
  options_.ignored_patterns = {"pooler", "weight", "ooler.weigh"};
  NetImpl net;
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("pooler.weight")));
}

TEST_F(LoadCheckpointTest, RefusesABrokenPattern) {
  NetCheckpoint().Write(path_);
  options_.ignored_patterns = {"fine", "(unclosed"};
  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(
      LoadCheckpoint(net, path_, options_),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"(unclosed\"")));
  EXPECT_EQ(Bits(net), before);
}

TEST_F(LoadCheckpointTest, ListsEverythingThatDoesNotFitAndTouchesNothing) {
  CheckpointBuilder()
      .Add("in.weight", {3, 2}, {1, 2, 3, 4, 5, 6})
      .Add("encoder.bias", {2}, {7, 8})
      .Add("in.bias", {2}, {7, 8})
      .AddIntegers("norm.weight", {2}, {9, 10})
      .Add("norm.running_mean", {2}, {13, 14})
      .Add("norm.num_batches_tracked", {}, {17})
      .Add("extra.a", {1}, {0})
      .Add("extra.b", {1}, {0})
      .Write(path_);
  ASSERT_THAT(options_.aliases.Add("encoder.bias", "in.bias"), IsOk());
  ASSERT_THAT(options_.aliases.Add("old.var", "norm.running_var"), IsOk());
  const auto expected = StatusIs(
      absl::StatusCode::kFailedPrecondition,
      AllOf(HasSubstr(path_), HasSubstr("extra.a, extra.b"),
            HasSubstr("missing, and not known to the initializer: norm.bias, "
                      "norm.running_var (key old.var);"),
            HasSubstr("in.bias (by the keys encoder.bias and in.bias)"),
            HasSubstr("in.weight is F32 [3, 2] in the checkpoint and "
                      "F32 [2, 3] in the model"),
            HasSubstr("norm.weight is I64 [2] in the checkpoint and "
                      "F32 [2] in the model"),
            HasSubstr("norm.num_batches_tracked is F32 [] in the checkpoint "
                      "and I64 [] in the model"),
            Not(HasSubstr("norm.running_mean"))));

  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(LoadCheckpoint(net, path_, options_), expected);
  EXPECT_EQ(Bits(net), before);

  const std::shared_ptr<NetImpl> meta_net = MakeMetaNet();
  EXPECT_THAT(LoadCheckpoint(*meta_net, path_, options_), expected);
  EXPECT_TRUE(IsAllOnMeta(*meta_net));
}

TEST_F(LoadCheckpointTest, RefusesATypeThatTensorsDoNotHave) {
  NetCheckpoint().AddBits("in.bias", TensorDtype::kF4, {2}, {0}).Write(path_);
  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("in.bias is F4 [2]")));
  EXPECT_EQ(Bits(net), before);
}

TEST_F(LoadCheckpointTest, WarnsOfUnexpectedKeysWhenNotStrict) {
  NetCheckpoint()
      .Add("extra.a", {1}, {0})
      .Add("extra.b", {1}, {0})
      .Write(path_);
  options_.strict = false;
  NetImpl net;
  const LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(net, path_, options_));
  ExpectNetIsLoaded(net);
  EXPECT_THAT(report.unexpected, ElementsAre("extra.a", "extra.b"));
  EXPECT_THAT(
      logs.Messages(LogLevel::kWarning),
      ElementsAre(AllOf(HasSubstr(path_), HasSubstr("extra.a, extra.b"))));
}

TEST_F(LoadCheckpointTest, WarnsInOneLineWhateverTheKeys) {
  NetCheckpoint()
      .Add("a\nb", {1}, {0})
      .Add("c\x1b._extra_state", {1}, {0})
      .Write(path_);
  options_.strict = false;
  NetImpl net;
  const LogCapture logs;
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(net, path_, options_));
  EXPECT_THAT(report.unexpected, ElementsAre("a\nb"));
  EXPECT_THAT(logs.Messages(LogLevel::kWarning),
              ElementsAre(HasSubstr(R"(left out c\x1b._extra_state)"),
                          HasSubstr(R"(for the keys a\x0ab)")));
}

TEST_F(LoadCheckpointTest, RefusesMissingParametersAlsoWhenNotStrict) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  options_.strict = false;
  NetImpl net;
  const LogCapture logs;
  EXPECT_THAT(
      LoadCheckpoint(net, path_, options_),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in.bias")));
  EXPECT_THAT(logs.Records(), IsEmpty());
}

TEST_F(LoadCheckpointTest, NamesAFileThatIsMissingOrBroken) {
  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(path_)));
  std::ofstream(path_) << "not a checkpoint";
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(path_)));
  EXPECT_EQ(Bits(net), before);
}

// The format allows it.
TEST_F(LoadCheckpointTest, NamesWhatAFileWithoutTensorsLacks) {
  CheckpointBuilder().Write(path_);
  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(path_), HasSubstr("missing"),
                             HasSubstr("in.weight"), HasSubstr("in.bias"),
                             HasSubstr("norm.num_batches_tracked"))));
  EXPECT_EQ(Bits(net), before);
}

// Gives "adapter.*" 0.5 plus the number of the call; knows no other name. Calls
// for no elements, by which a plan is made, don't count.
MissingParameterInitializer AdapterInitializer(
    std::vector<std::string>* asked) {
  return [asked](absl::string_view name, at::IntArrayRef global_shape,
                 at::ScalarType dtype,
                 const TensorSlice& slice) -> std::optional<at::Tensor> {
    if (slice.numel() > 0) {
      EXPECT_EQ(slice, TensorSlice::Whole(global_shape));
      asked->push_back(std::string(name));
    }
    if (name.substr(0, 8) != "adapter.") return std::nullopt;
    return at::full(slice.sizes, asked->size() - 0.5,
                    at::TensorOptions().dtype(dtype));
  };
}

TEST_F(LoadCheckpointTest, GivesWhatTheCheckpointLacksToTheInitializer) {
  NetCheckpoint().Write(path_);
  std::vector<std::string> asked;
  options_.missing_parameter_initializer = AdapterInitializer(&asked);
  for (const bool on_meta : {false, true}) {
    SCOPED_TRACE(on_meta);
    asked.clear();
    const std::shared_ptr<NetImpl> net =
        on_meta ? MakeMetaNet() : std::make_shared<NetImpl>();
    std::optional<MetaDeviceGuard> meta_device;
    if (on_meta) meta_device.emplace();
    torch::nn::Linear adapter(torch::nn::LinearOptions(2, 1));
    adapter->weight.set_requires_grad(false);
    adapter->to(at::kHalf);
    meta_device.reset();
    net->register_module("adapter", adapter);

    LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                              LoadCheckpoint(*net, path_, options_));
    ExpectNetIsLoaded(*net);
    EXPECT_THAT(asked, ElementsAre("adapter.weight", "adapter.bias"));
    EXPECT_THAT(report.initialized,
                ElementsAre("adapter.weight", "adapter.bias"));
    EXPECT_THAT(Values(adapter->weight), ElementsAre(0.5, 0.5));
    EXPECT_THAT(Values(adapter->bias), ElementsAre(1.5));
    EXPECT_EQ(adapter->weight.scalar_type(), at::kHalf);
    EXPECT_FALSE(adapter->weight.requires_grad());
    EXPECT_TRUE(adapter->bias.requires_grad());
  }
}

TEST_F(LoadCheckpointTest, RefusesAnInitialValueThatDoesNotFit) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  const struct {
    at::Tensor value;
    std::string message;
  } cases[] = {
      {at::zeros({3}), "in.bias got F32 [3] from the initializer"},
      {at::zeros({0}, at::kHalf), "in.bias got F16 [0]"},
      {at::Tensor(), "in.bias got an undefined tensor"},
  };
  NetImpl net;
  const auto before = Bits(net);
  for (const auto& c : cases) {
    options_.missing_parameter_initializer =
        [&](absl::string_view, at::IntArrayRef, at::ScalarType,
            const TensorSlice&) { return std::make_optional(c.value); };
    EXPECT_THAT(
        LoadCheckpoint(net, path_, options_),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(c.message)));
    EXPECT_EQ(Bits(net), before);
  }
}

// It promised another value when the load was planned.
TEST_F(LoadCheckpointTest, RefusesAValueThatChangesItsMind) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  options_.missing_parameter_initializer =
      [](absl::string_view, at::IntArrayRef, at::ScalarType dtype,
         const TensorSlice& slice) {
        return std::make_optional(
            at::zeros(slice.sizes, slice.numel() == 0 ? dtype : at::kHalf));
      };
  const std::shared_ptr<NetImpl> net = MakeMetaNet();
  EXPECT_THAT(LoadCheckpoint(*net, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("in.bias got F16 [2] from the initializer")));
  EXPECT_TRUE(IsAllOnMeta(*net));
}

TEST_F(LoadCheckpointTest, ConvertsFloatingPointTypes) {
  // 0.5 and -2 in each type, exactly.
  const struct {
    TensorDtype dtype;
    std::vector<uint16_t> bits;
  } sources[] = {
      {TensorDtype::kF32, {}},
      {TensorDtype::kF16, {0x3800, 0xc000}},
      {TensorDtype::kBF16, {0x3f00, 0xc000}},
  };
  for (const auto& source : sources) {
    CheckpointBuilder checkpoint;
    if (source.dtype == TensorDtype::kF32) {
      checkpoint.Add("weight", {1, 2}, {0.5, -2});
    } else {
      checkpoint.AddBits("weight", source.dtype, {1, 2}, source.bits);
    }
    checkpoint.Write(path_);
    for (const at::ScalarType dtype :
         {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble}) {
      for (const bool on_meta : {false, true}) {
        SCOPED_TRACE(absl::StrCat(TensorDtypeName(source.dtype), " to ",
                                  c10::toString(dtype),
                                  on_meta ? " on meta" : ""));
        std::optional<MetaDeviceGuard> meta_device;
        if (on_meta) meta_device.emplace();
        torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
        linear->to(dtype);
        meta_device.reset();
        ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
        EXPECT_EQ(linear->weight.scalar_type(), dtype);
        EXPECT_THAT(Values(linear->weight), ElementsAre(0.5, -2));
      }
    }
  }
}

TEST_F(LoadCheckpointTest, ConvertsTypesOfAByte) {
  // 0.5 and -2.
  const struct {
    TensorDtype dtype;
    std::vector<uint8_t> bits;
  } sources[] = {{TensorDtype::kF8E4M3, {0x30, 0xc0}},
                 {TensorDtype::kF8E5M2, {0x38, 0xc0}}};
  for (const auto& source : sources) {
    ASSERT_THAT(
        WriteSafetensors(
            path_, {{"weight", source.dtype, {1, 2}, source.bits.data()}}, {}),
        IsOk());
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(absl::StrCat(TensorDtypeName(source.dtype), " to ",
                                c10::toString(dtype)));
      torch::nn::Linear linear(torch::nn::LinearOptions(2, 1).bias(false));
      linear->to(dtype);
      ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
      EXPECT_THAT(Values(linear->weight), ElementsAre(0.5, -2));
    }
  }
}

TEST_F(LoadCheckpointTest, RoundsToNearestWhenItNarrows) {
  // 1 + 2^-8 + 2^-16 lies just above the middle of two bfloat16 numbers.
  CheckpointBuilder()
      .Add("weight", {1, 1}, {1.0f + 1.0f / 256 + 1.0f / 65536})
      .Write(path_);
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
  linear->to(at::kBFloat16);
  ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
  EXPECT_THAT(Values(linear->weight), ElementsAre(1.0f + 1.0f / 128));
}

TEST_F(LoadCheckpointTest, FillsParametersOfAnyStrides) {
  CheckpointBuilder().Add("weight", {2, 3}, {1, 2, 3, 4, 5, 6}).Write(path_);
  torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
  linear->weight.set_data(at::zeros({3, 2}).t());
  const at::Tensor memory = linear->weight.detach().t();
  ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
  EXPECT_THAT(Values(linear->weight), ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(Values(memory), ElementsAre(1, 4, 2, 5, 3, 6));
}

// What is converted at once ends within rows, which lie apart in memory.
TEST_F(LoadCheckpointTest, FillsParametersOfAnyStridesInPieces) {
  const at::Tensor whole =
      at::arange(120'000, at::kFloat).view({2000, 5, 3, 4});
  CheckpointBuilder()
      .Add("weight", {2000, 5, 3, 4}, Values(whole))
      .Write(path_);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const std::vector<int64_t>& order :
         {std::vector<int64_t>{0, 2, 3, 1}, {3, 2, 1, 0}, {1, 0, 2, 3}}) {
      torch::nn::Module model;
      std::vector<int64_t> sizes;
      std::vector<int64_t> inverse(4);
      for (int64_t i = 0; i < 4; ++i) {
        sizes.push_back(whole.size(order[i]));
        inverse[order[i]] = i;
      }
      const at::Tensor weight = at::zeros(sizes, dtype).permute(inverse);
      ASSERT_FALSE(weight.is_contiguous());
      model.register_parameter("weight", weight);
      ASSERT_THAT(LoadCheckpoint(model, path_, options_), IsOk());
      EXPECT_TRUE(at::equal(weight, whole.to(dtype))) << order;
    }
  }
}

// What the checkpoint lacks, too.
TEST_F(LoadCheckpointTest, MakesParametersOfAnyStrides) {
  CheckpointBuilder().Write(path_);
  torch::nn::Module model;
  const auto transposed = [] {
    return at::full({3, 2}, 7, at::kFloat).t().set_requires_grad(true);
  };
  const at::Tensor zeroed = model.register_parameter("zeroed", transposed());
  const at::Tensor made = model.register_parameter("adapter", transposed());
  ASSERT_FALSE(made.is_contiguous());
  options_.zero_patterns = {"zeroed"};
  options_.missing_parameter_initializer =
      [](absl::string_view name, at::IntArrayRef, at::ScalarType dtype,
         const TensorSlice& slice) -> std::optional<at::Tensor> {
    if (name != "adapter") return std::nullopt;
    return at::arange(slice.numel(), dtype).view(slice.sizes);
  };
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(model, path_, options_));
  EXPECT_THAT(report.zeroed, ElementsAre("zeroed"));
  EXPECT_THAT(Values(zeroed), Each(0));
  EXPECT_THAT(Values(made), ElementsAre(0, 1, 2, 3, 4, 5));
}

TEST_F(LoadCheckpointTest, RefusesParametersThatCannotBeWritten) {
  CheckpointBuilder().Add("a", {2}, {1, 2}).Add("b", {2}, {1, 2}).Write(path_);
  torch::nn::Module model;
  const at::Tensor first = model.register_parameter("a", at::zeros({2}));
  {
    const c10::InferenceMode inference_mode;
    model.register_buffer("b", at::zeros({2}));
  }
  EXPECT_THAT(LoadCheckpoint(model, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("b was made in inference mode")));
  torch::nn::Module expanded;
  expanded.register_parameter("a", first);
  expanded.register_buffer("b", at::zeros({1}).expand({2}));
  EXPECT_THAT(LoadCheckpoint(expanded, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("b has several elements in one place")));
  EXPECT_THAT(Values(first), Each(0));
}

TEST_F(LoadCheckpointTest, IsSeenByAutograd) {
  CheckpointBuilder().Add("weight", {1, 1}, {2}).Write(path_);
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
  const at::Tensor input = at::full({1, 1}, 1.0).set_requires_grad(true);
  const at::Tensor out = linear->forward(input).sum();
  ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
  // The weight that backward needs is gone: an error, not a wrong gradient.
  EXPECT_THROW(out.backward(), c10::Error);
}

// One Linear(1, 1), without bias, under two names.
struct SharedImpl : torch::nn::Module {
  SharedImpl() : layer(torch::nn::LinearOptions(1, 1).bias(false)) {
    register_module("first", layer);
    register_module("second", layer);
  }
  torch::nn::Linear layer;
};

TEST_F(LoadCheckpointTest, LoadsASharedLayerOnceUnderEitherName) {
  const std::vector<std::vector<std::string>> cases = {
      {"first.weight"}, {"second.weight"}, {"first.weight", "second.weight"}};
  for (const auto& keys : cases) {
    for (const bool on_meta : {false, true}) {
      SCOPED_TRACE(absl::StrCat(keys.front(), " ", keys.size(), " ", on_meta));
      CheckpointBuilder checkpoint;
      for (const std::string& key : keys) checkpoint.Add(key, {1, 1}, {3});
      checkpoint.Write(path_);
      std::optional<MetaDeviceGuard> meta_device;
      if (on_meta) meta_device.emplace();
      SharedImpl model;
      meta_device.reset();
      LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                                LoadCheckpoint(model, path_, options_));
      EXPECT_THAT(Values(model.layer->weight), ElementsAre(3));
      EXPECT_THAT(report.loaded, ElementsAre("first.weight"));
      EXPECT_EQ(report.bytes_read, 4);
    }
  }
}

TEST_F(LoadCheckpointTest, ChecksTheShapeUnderEveryNameOfASharedLayer) {
  CheckpointBuilder()
      .Add("first.weight", {1, 1}, {3})
      .Add("second.weight", {1}, {3})
      .Write(path_);
  SharedImpl model;
  EXPECT_THAT(LoadCheckpoint(model, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("second.weight is F32 [1]")));
}

TEST_F(LoadCheckpointTest, AsksTheInitializerUnderEveryNameOfASharedLayer) {
  CheckpointBuilder().Write(path_);
  struct Model : torch::nn::Module {
    Model() : layer(torch::nn::LinearOptions(1, 1).bias(false)) {
      register_module("first", layer);
      register_module("adapter", layer);
    }
    torch::nn::Linear layer;
  } model;
  std::vector<std::string> asked;
  options_.missing_parameter_initializer = AdapterInitializer(&asked);
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(model, path_, options_));
  EXPECT_THAT(asked, ElementsAre("first.weight", "adapter.weight"));
  EXPECT_THAT(report.initialized, ElementsAre("first.weight"));
  EXPECT_THAT(Values(model.layer->weight), ElementsAre(1.5));
}

TEST_F(LoadCheckpointTest, AcceptsTwoAliasesOfOneName) {
  CheckpointBuilder()
      .Add("x.weight", {1, 1}, {3})
      .Add("y.weight", {1, 1}, {3})
      .Write(path_);
  ASSERT_THAT(options_.aliases.Add("x.weight", "weight"), IsOk());
  ASSERT_THAT(options_.aliases.Add("y.weight", "weight"), IsOk());
  torch::nn::Linear linear(torch::nn::LinearOptions(1, 1).bias(false));
  ASSERT_THAT(LoadCheckpoint(*linear, path_, options_), IsOk());
  EXPECT_THAT(Values(linear->weight), ElementsAre(3));
}

TEST_F(LoadCheckpointTest, RefusesMetaTensorsThatShareMemory) {
  CheckpointBuilder()
      .Add("base", {2}, {1, 2})
      .Add("view", {1}, {1})
      .Write(path_);
  torch::nn::Module model;
  const at::Tensor base = at::zeros({2}, at::kMeta);
  model.register_buffer("base", base);
  model.register_buffer("view", base.slice(0, 0, 1));
  EXPECT_THAT(LoadCheckpoint(model, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("view is a view of base")));
}

TEST_F(LoadCheckpointTest, RefusesMetaParametersWithAGradient) {
  NetCheckpoint().Write(path_);
  const std::shared_ptr<NetImpl> net = MakeMetaNet();
  net->in->bias.mutable_grad() = at::zeros({2}, at::kMeta);
  EXPECT_THAT(LoadCheckpoint(*net, path_, options_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("in.bias has a gradient")));
  EXPECT_TRUE(IsAllOnMeta(*net));
}

// An initializer that cuts the file after its header was read, so that reading
// the data fails.
MissingParameterInitializer FileCutter(const std::string& path) {
  return [path](absl::string_view, at::IntArrayRef, at::ScalarType dtype,
                const TensorSlice& slice) {
    // When the load is planned, and so before data is read.
    if (slice.numel() == 0) fs::resize_file(path, fs::file_size(path) - 1);
    return std::make_optional(
        at::zeros(slice.sizes, at::TensorOptions().dtype(dtype)));
  };
}

TEST_F(LoadCheckpointTest, LeavesAMetaModelOnMetaWhenReadingFails) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  options_.missing_parameter_initializer = FileCutter(path_);
  const std::shared_ptr<NetImpl> net = MakeMetaNet();
  EXPECT_THAT(LoadCheckpoint(*net, path_, options_),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(path_), HasSubstr("norm.weight"),
                             Not(HasSubstr("partly loaded")))));
  EXPECT_TRUE(IsAllOnMeta(*net));
}

TEST_F(LoadCheckpointTest, SaysThatARealModelIsPartlyLoadedWhenReadingFails) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  options_.missing_parameter_initializer = FileCutter(path_);
  NetImpl net;
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("the model is now partly loaded")));
}

TEST_F(LoadCheckpointTest, SaysWhenMemoryRunsOut) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  NetImpl net;
  for (const bool on_device : {false, true}) {
    options_.missing_parameter_initializer =
        [&](absl::string_view, at::IntArrayRef, at::ScalarType dtype,
            const TensorSlice& slice) -> std::optional<at::Tensor> {
      if (slice.numel() == 0) return at::empty(slice.sizes, dtype);
      TORCH_CHECK_WITH(OutOfMemoryError, !on_device, "CUDA out of memory");
      return at::empty({int64_t{1} << 55}, dtype);
    };
    EXPECT_THAT(LoadCheckpoint(net, path_, options_),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr(path_), HasSubstr("memory"))));
  }
}

TEST_F(LoadCheckpointTest, ReportsWhatTorchThrows) {
  NetCheckpoint().Remove("in.bias").Write(path_);
  options_.missing_parameter_initializer =
      [](absl::string_view, at::IntArrayRef, at::ScalarType,
         const TensorSlice&) -> std::optional<at::Tensor> {
    TORCH_CHECK(false, "no such adapter");
  };
  NetImpl net;
  const auto before = Bits(net);
  EXPECT_THAT(LoadCheckpoint(net, path_, options_),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr(path_), HasSubstr("no such adapter"))));
  EXPECT_EQ(Bits(net), before);
  EXPECT_THAT(DescribeLoad(net, path_, options_),
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr(path_), HasSubstr("no such adapter"))));
}

}  // namespace
}  // namespace trainer_lora::distributed
