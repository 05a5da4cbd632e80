// Loads a safetensors file in shards, for loader_speed.py, which says what is
// measured and how: four ranks on this machine, each with its Shard(0) of every
// tensor.
//
//   bazel run -c opt //tests/parity:load_shards -- --file=weights.safetensors
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/Parallel.h"
#include "ATen/core/Tensor.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "c10/core/ScalarType.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/meta_device.h"
#include "distributed/placement.h"
#include "distributed/state_layout.h"
#include "tests/testutil/follower_processes.h"
#include "tests/testutil/peak_memory.h"
#include "tests/testutil/state_module.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "torch/nn/module.h"

ABSL_FLAG(std::string, file, "", "safetensors file to load");

namespace trainer_lora::distributed {
namespace {

constexpr int kWorldSize = 4;        // The same in loader_speed.py.
constexpr char kFileKey[] = "file";  // Of the store.

// On meta, with the tensors that the file has.
absl::StatusOr<std::shared_ptr<torch::nn::Module>> MakeModel(
    const std::string& path) {
  LORA_ASSIGN_OR_RETURN(const SafetensorsFile file,
                        SafetensorsFile::Open(path));
  std::vector<testutil::ParameterSpec> specs;
  for (const TensorInfo& tensor : file.tensors()) {
    const std::optional<at::ScalarType> dtype = ToScalarType(tensor.dtype);
    if (!dtype.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(tensor.name, " is of type ",
                       TensorDtypeName(tensor.dtype), ": give another file"));
    }
    specs.push_back({tensor.name, tensor.shape, *dtype});
  }
  const MetaDeviceGuard meta_device;
  return testutil::ModuleWith(specs);
}

// Of the slowest or largest rank.
struct Measurements {
  double seconds;
  double peak_rss_above_shard;
};

absl::StatusOr<Measurements> Measure(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const std::string& path) {
  LORA_ASSIGN_OR_RETURN(const std::shared_ptr<const DeviceMesh> mesh,
                        DeviceMesh::Create(group));
  LORA_ASSIGN_OR_RETURN(const std::shared_ptr<torch::nn::Module> model,
                        MakeModel(path));
  LoadCheckpointOptions options;
  options.mesh = mesh;
  options.layouts = ShardedLayouts(*model, mesh, {Placement::Shard(0)});

  LORA_ASSIGN_OR_RETURN(const testutil::PeakMemory peak,
                        testutil::PeakMemory::Start());
  LORA_RETURN_IF_ERROR(Barrier(*mesh));
  const auto begin = std::chrono::steady_clock::now();
  LORA_RETURN_IF_ERROR(LoadCheckpoint(*model, path, options).status());
  LORA_RETURN_IF_ERROR(Barrier(*mesh));
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - begin;
  int64_t above_shard = peak.BytesAboveStart();
  for (const at::Tensor& shard : model->parameters()) {
    above_shard -= static_cast<int64_t>(shard.nbytes());
  }

  Measurements measurements;
  LORA_ASSIGN_OR_RETURN(measurements.seconds,
                        AllReduce(*mesh, seconds.count(), ReduceOp::kMax));
  LORA_ASSIGN_OR_RETURN(
      measurements.peak_rss_above_shard,
      AllReduce(*mesh, static_cast<double>(above_shard), ReduceOp::kMax));
  return measurements;
}

absl::Status Follow(int argc, char** argv) {
  LORA_ASSIGN_OR_RETURN(const c10::intrusive_ptr<c10d::ProcessGroup> group,
                        testutil::JoinAsFollower(argc, argv));
  const std::vector<uint8_t> path = group->getStore()->get(kFileKey);
  return Measure(group, std::string(path.begin(), path.end())).status();
}

absl::Status Lead(const std::string& path) {
  LORA_ASSIGN_OR_RETURN(const auto followers,
                        testutil::FollowerProcesses::Start(kWorldSize));
  followers->group()->getStore()->set(
      kFileKey, std::vector<uint8_t>(path.begin(), path.end()));
  LORA_ASSIGN_OR_RETURN(const Measurements measurements,
                        Measure(followers->group(), path));
  std::cout << absl::StrFormat(
                   R"({"seconds": %.6f, "peak_rss_above_shard": %.0f})",
                   measurements.seconds, measurements.peak_rss_above_shard)
            << std::endl;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  at::set_num_threads(1);
  absl::Status status;
  if (testutil::IsFollower(argc, argv)) {
    status = Follow(argc, argv);
  } else {
    absl::ParseCommandLine(argc, argv);
    status = Lead(absl::GetFlag(FLAGS_file));
  }
  if (status.ok()) return EXIT_SUCCESS;
  std::cerr << status << std::endl;
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace trainer_lora::distributed

int main(int argc, char** argv) {
  return trainer_lora::distributed::Main(argc, argv);
}
