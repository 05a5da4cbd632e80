// Compiles and runs the README's code for checkpoints in shards.
#include "tests/docs/shards.inc"

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/status.h"
#include "config/launch_environment.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/meta_device.h"
#include "distributed/process_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "lora/linear.h"
#include "tests/testutil/status_matchers.h"

namespace {

using ::trainer_lora::testutil::IsOk;

struct AttentionImpl : torch::nn::Module {
  AttentionImpl() {
    register_module("to_qk", to_qk);
    register_module("to_out", to_out);
  }
  lora::ReplicatedLinear to_qk{torch::nn::LinearOptions(3, 4).bias(false)};
  lora::ReplicatedLinear to_out{torch::nn::LinearOptions(4, 3).bias(false)};
};

TEST(ReadmeTest, ACheckpointIsLoadedInShardsAndWrittenBack) {
  const std::string folder = testing::TempDir() + "readme_shards";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  const std::string in = folder + "/model.safetensors";
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) values[i] = i;
  const auto f32 = distributed::TensorDtype::kF32;
  ASSERT_THAT(distributed::WriteSafetensors(
                  in,
                  {{"attn.query.weight", f32, {2, 3}, values.data()},
                   {"attn.key.weight", f32, {2, 3}, values.data() + 6},
                   {"attn.to_out.0.weight", f32, {3, 4}, values.data() + 12}},
                  {{"format", "pt"}}),
              IsOk());

  torch::nn::Module model;
  {
    const distributed::MetaDeviceGuard meta_device;
    model.register_module("attn", std::make_shared<AttentionImpl>());
  }
  config::LoraConfig config;
  config.enable = true;
  config.rank = 2;
  config.target_modules = {"to_qk", "to_out"};
  lora::LoraTrainingOptions options;
  options.prepare_for_fsdp = true;
  LORA_ASSERT_OK_AND_ASSIGN(const lora::LoraTraining training,
                            lora::EnableLoraTraining(model, config, options));
  LORA_ASSERT_OK_AND_ASSIGN(const config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  LORA_ASSERT_OK_AND_ASSIGN(const auto group,
                            distributed::InitProcessGroup(environment));
  LORA_ASSERT_OK_AND_ASSIGN(
      const auto mesh,
      distributed::DeviceMesh::Create(group, {{"replicate", 1}, {"shard", 1}}));

  ASSERT_THAT(LoadAndExport(model, training, mesh, in, folder + "/out"),
              IsOk());
  LORA_ASSERT_OK_AND_ASSIGN(const auto before,
                            distributed::SafetensorsFile::Open(in));
  LORA_ASSERT_OK_AND_ASSIGN(
      const auto after,
      distributed::SafetensorsFile::Open(folder + "/out/model.safetensors"));
  ASSERT_EQ(after.tensors().size(), 3);
  for (const distributed::TensorInfo& tensor : before.tensors()) {
    const distributed::TensorInfo* written = after.Find(tensor.name);
    ASSERT_NE(written, nullptr) << tensor.name;
    std::string expected(tensor.byte_size, '\0');
    std::string actual(written->byte_size, '\0');
    ASSERT_THAT(
        before.Read(tensor, 0, absl::MakeSpan(&expected[0], expected.size())),
        IsOk());
    ASSERT_THAT(
        after.Read(*written, 0, absl::MakeSpan(&actual[0], actual.size())),
        IsOk());
    EXPECT_EQ(actual, expected) << tensor.name;
  }
}

}  // namespace
