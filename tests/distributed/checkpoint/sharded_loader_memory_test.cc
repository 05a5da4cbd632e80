// What loading a large checkpoint takes beyond the shards themselves: four
// processes, as each has memory of its own.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/launch_environment.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/meta_device.h"
#include "distributed/placement.h"
#include "distributed/process_group.h"
#include "distributed/state_layout.h"
#include "gtest/gtest.h"
#include "tests/testutil/peak_memory.h"
#include "tests/testutil/process_ranks.h"
#include "tests/testutil/state_module.h"
#include "tests/testutil/status_matchers.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

using ::trainer_lora::testutil::IsOk;
using ::trainer_lora::testutil::IsRankProcess;
using ::trainer_lora::testutil::ParameterSpec;
using ::trainer_lora::testutil::PeakMemory;
using ::trainer_lora::testutil::ProcessRanks;
using ::trainer_lora::testutil::RankScenario;

constexpr int kWorldSize = 4;

struct FileTensor {
  std::string name;
  TensorDtype dtype;
  std::vector<int64_t> shape;
};

constexpr char kReplicas[] = "replicas once";

// 2 GB; the largest has a quarter of it. That one alone where each rank holds
// all.
std::vector<FileTensor> FileTensors(const std::string& scenario) {
  std::vector<FileTensor> tensors = {
      {"embed", TensorDtype::kBF16, {64'000, 4'096}}};
  if (scenario == kReplicas) return tensors;
  for (int i = 0; i < 11; ++i) {
    tensors.push_back(
        {absl::StrCat("wide", i), TensorDtype::kF32, {1'000, 16'384}});
    tensors.push_back(
        {absl::StrCat("tall", i), TensorDtype::kBF16, {16'384, 2'048}});
  }
  return tensors;
}

// A file whose data takes no room on the disk: all zeros that were never
// written. Returns the bytes of data.
int64_t WriteSparse(const std::string& path, const std::string& scenario) {
  std::vector<std::string> entries;
  int64_t end = 0;
  for (const FileTensor& tensor : FileTensors(scenario)) {
    const int64_t begin = end;
    end +=
        tensor.shape[0] * tensor.shape[1] * (TensorDtypeBits(tensor.dtype) / 8);
    entries.push_back(absl::StrCat(
        "\"", tensor.name, "\":{\"dtype\":\"", TensorDtypeName(tensor.dtype),
        "\",\"shape\":[", absl::StrJoin(tensor.shape, ","),
        "],\"data_offsets\":[", begin, ",", end, "]}"));
  }
  const std::string header =
      absl::StrCat("{", absl::StrJoin(entries, ","), "}");
  const uint64_t size = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header << std::flush;
  std::error_code error;
  std::filesystem::resize_file(path, sizeof(size) + size + end, error);
  return file && !error ? end : -1;
}

class ShardedLoaderMemoryTest : public ::testing::Test {
 protected:
  // Runs the ranks, which check themselves.
  void RunScenario(const std::string& scenario) {
    const std::string path =
        absl::StrCat(::testing::TempDir(), "sharded_loader_memory_test.",
                     scenario, ".safetensors");
    if (const auto peak = PeakMemory::Start(); !peak.ok()) {
      GTEST_SKIP() << peak.status();
    }
    if (WriteSparse(path, scenario) < 0) {
      std::filesystem::remove(path);
      GTEST_SKIP() << "no file of 2 GB can be made here";
    }
    {
      ProcessRanks ranks(absl::StrCat(scenario, "@", path), kWorldSize);
      for (int rank = 0; rank < kWorldSize; ++rank) {
        EXPECT_TRUE(ranks.EndedWell(rank));
      }
    }
    std::filesystem::remove(path);
  }
};

TEST_F(ShardedLoaderMemoryTest, OfRows) { RunScenario("rows"); }
TEST_F(ShardedLoaderMemoryTest, OfColumns) { RunScenario("columns"); }
TEST_F(ShardedLoaderMemoryTest, OfRowsThatAreConverted) {
  RunScenario("converted rows");
}
TEST_F(ShardedLoaderMemoryTest, OfRowsThatAreReadOnce) {
  RunScenario("rows once");
}
TEST_F(ShardedLoaderMemoryTest, OfReplicasThatAreReadOnce) {
  RunScenario(kReplicas);
}

TEST_F(ShardedLoaderMemoryTest, DISABLED_Rank) {
  if (!IsRankProcess()) GTEST_SKIP() << "runs as the ranks' processes";
  const std::pair<std::string, std::string> scenario_and_path =
      absl::StrSplit(RankScenario(), absl::MaxSplits('@', 1));
  const auto& [scenario, path] = scenario_and_path;
  LORA_ASSERT_OK_AND_ASSIGN(const config::LaunchEnvironment environment,
                            config::ReadLaunchEnvironment());
  LORA_ASSERT_OK_AND_ASSIGN(const auto group, InitProcessGroup(environment));
  LORA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<const DeviceMesh> mesh,
                            DeviceMesh::Create(group));
  std::vector<ParameterSpec> specs;
  for (const FileTensor& tensor : FileTensors(scenario)) {
    specs.push_back(
        {tensor.name, tensor.shape,
         tensor.dtype == TensorDtype::kF32 || scenario == "converted rows"
             ? at::kFloat
             : at::kBFloat16});
  }
  std::shared_ptr<torch::nn::Module> model;
  {
    const MetaDeviceGuard meta_device;
    model = testutil::ModuleWith(specs);
  }
  LoadCheckpointOptions options;
  options.mesh = mesh;
  options.layouts =
      ShardedLayouts(*model, mesh,
                     {scenario == kReplicas
                          ? Placement::Replicate()
                          : Placement::Shard(scenario == "columns" ? 1 : 0)});
  if (scenario == "rows once" || scenario == kReplicas) {
    options.read_once_dims = {0};
  }

  LORA_ASSERT_OK_AND_ASSIGN(const PeakMemory peak, PeakMemory::Start());
  LORA_ASSERT_OK_AND_ASSIGN(const LoadCheckpointReport report,
                            LoadCheckpoint(*model, path, options));
  const int64_t taken = peak.BytesAboveStart();
  int64_t shard_bytes = 0;
  int64_t file_bytes = 0;  // Of the shard, as the file has it.
  for (const auto& item : model->named_parameters()) {
    shard_bytes += item.value().nbytes();
    for (const FileTensor& tensor : FileTensors(scenario)) {
      if (tensor.name != item.key()) continue;
      file_bytes += item.value().numel() * (TensorDtypeBits(tensor.dtype) / 8);
    }
  }
  // Each of its bytes is read by one of the ranks.
  if (scenario == kReplicas) file_bytes /= kWorldSize;
  EXPECT_GT(shard_bytes, 450 << 20);
  EXPECT_LE(taken - shard_bytes, 64 << 20);
  if (scenario != "columns") {
    EXPECT_LE(report.bytes_read, file_bytes + file_bytes / 50);
  }
  EXPECT_THAT(Barrier(*mesh), IsOk());
}

}  // namespace
}  // namespace trainer_lora::distributed
