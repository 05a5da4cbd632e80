// Planning a load, and loading a checkpoint into a model on the meta device,
// against reading as many bytes with plain preads:
//
//   bazel run -c opt //tests/distributed/checkpoint:sharded_loader_benchmark
//
// The checkpoint is made first, in the folder for temporary files, and stays in
// the page cache. Baselines take turns; the reported time is the mean of the
// loader's turns, and ratios are of medians: less is better.
//
//   vs_pread          loading over allocating tensors of the file's types, each
//                     filled with one pread on one thread, and copied to the
//                     device if that is not the CPU
//   bytes_per_second  of the file
//   vs_copy           planning over copying the descriptions that are planned
//   ns_per_tensor     of a plan: the same for any number of tensors
//
// --bytes=N: the size of the checkpoint, 1 GB by default.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/safetensors_writer.h"
#include "distributed/checkpoint/sharded_loader.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/meta_device.h"
#include "distributed/tensor_slice.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/benchmark_flags.h"
#include "tests/testutil/run_benchmarks.h"
#include "tests/testutil/state_module.h"
#include "tests/testutil/take_turns.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

using testutil::BenchmarkDevice;
using testutil::SecondsOnDevice;
using testutil::SecondsOnHost;
using testutil::TakeTurns;

// Ends the program where the machine does not do what the benchmark needs.
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::cerr << status << std::endl;
  std::exit(EXIT_FAILURE);
}

// --- Plans -------------------------------------------------------------------

// As many tensors as are asked for; a third has an alias, and names are mapped
// by 30 rules of which one matches.
struct PlanInput {
  std::deque<TensorInfo> infos;
  std::vector<CheckpointTensor> sources;
  std::vector<TargetTensor> targets;
  LoadPlanOptions options;
};

PlanInput MakePlanInput(int64_t count, int64_t shard_dim) {
  PlanInput input;
  std::vector<MappingRule> rules;
  for (int rule = 0; rule < 30; ++rule) {
    rules.push_back({absl::StrCat(R"(blocks\.(\d+)\.old)", rule, R"(\.(.*))"),
                     absl::StrCat(R"(blocks.\1.new)", rule, R"(.\2)")});
  }
  absl::StatusOr<StateDictMapping> mapping =
      StateDictMapping::Create(std::move(rules));
  Check(mapping.status());
  input.options.mapping = *std::move(mapping);
  const std::vector<int64_t> shape = {4096, 1024};
  TensorSlice slice = TensorSlice::Whole(shape);
  slice.offsets[shard_dim] = shape[shard_dim] / 8;
  slice.sizes[shard_dim] = shape[shard_dim] / 8;
  for (int64_t i = 0; i < count; ++i) {
    const std::string tail = absl::StrCat(i % 30, ".weight");
    const std::string block = absl::StrCat("blocks.", i / 30, ".");
    input.infos.push_back({absl::StrCat(block, "old", tail), TensorDtype::kF32,
                           shape, 0, 4u * 4096 * 1024});
    input.sources.push_back({0, &input.infos.back()});
    std::string name = absl::StrCat(block, "new", tail);
    if (i % 3 == 0) {
      const std::string adapted =
          absl::StrCat(block, "new", i % 30, ".base_layer.weight");
      Check(input.options.aliases.Add(name, adapted));
      name = adapted;
    }
    input.targets.push_back({{name}, TensorDtype::kBF16, shape, {slice}});
  }
  return input;
}

void BM_Plan(benchmark::State& state) {
  const PlanInput input = MakePlanInput(state.range(0), state.range(1));
  const auto [plan, copy] = TakeTurns(
      state,
      [&] {
        return SecondsOnHost([&] {
          Check(MakeLoadPlan(input.targets, input.sources, input.options)
                    .status());
        });
      },
      [&] {
        return SecondsOnHost([&] {
          const std::vector<TargetTensor> targets = input.targets;
          const std::vector<CheckpointTensor> sources = input.sources;
          benchmark::DoNotOptimize(targets.data());
          benchmark::DoNotOptimize(sources.data());
        });
      });
  state.counters["ns_per_tensor"] = plan * 1e9 / state.range(0);
  state.counters["vs_copy"] = plan / copy;
}
BENCHMARK(BM_Plan)
    ->ArgNames({"tensors", "shard_dim"})
    ->ArgsProduct({{10'000, 100'000}, {0, 1}})
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

// --- Loads -------------------------------------------------------------------

// A file of layers such as a transformer's, and what is in it.
class Checkpoint {
 public:
  Checkpoint(const std::string& folder, TensorDtype dtype, int64_t bytes)
      : path_(
            absl::StrCat(folder, "/", TensorDtypeName(dtype), ".safetensors")) {
    const int64_t width = bytes < 100'000'000 ? 64 : 1024;
    const int64_t element_size = TensorDtypeBits(dtype) / 8;
    const std::vector<std::vector<int64_t>> layer = {
        {width, width}, {width, width},     {width, width},    {width, width},
        {width},        {4 * width, width}, {width, 4 * width}};
    for (int64_t size = 0; size < bytes;) {
      for (const std::vector<int64_t>& shape : layer) {
        const int64_t columns = shape.size() == 1 ? 1 : shape[1];
        specs_.push_back({absl::StrCat("w", specs_.size()), dtype, shape});
        size += shape[0] * columns * element_size;
      }
    }
    Check(Write());
  }

  const std::string& path() const { return path_; }
  const std::vector<TensorSpec>& specs() const { return specs_; }

 private:
  absl::Status Write() {
    LORA_ASSIGN_OR_RETURN(SafetensorsWriter writer,
                          SafetensorsWriter::Create(path_, specs_, {}));
    for (const TensorSpec& spec : writer.tensors()) {
      int64_t size = TensorDtypeBits(spec.dtype) / 8;
      for (const int64_t extent : spec.shape) size *= extent;
      LORA_RETURN_IF_ERROR(writer.Append(std::string(size, '\1')));
    }
    return writer.Finish();
  }

  const std::string path_;
  std::vector<TensorSpec> specs_;
};

std::shared_ptr<torch::nn::Module> MetaModel(const Checkpoint& checkpoint,
                                             at::ScalarType dtype) {
  std::vector<testutil::ParameterSpec> specs;
  for (const TensorSpec& spec : checkpoint.specs()) {
    specs.push_back({spec.name, spec.shape, dtype});
  }
  const MetaDeviceGuard meta_device;
  return testutil::ModuleWith(specs);
}

// One pread a tensor, into new memory.
std::vector<at::Tensor> ReadPlainly(const Checkpoint& checkpoint) {
  const int descriptor = open(checkpoint.path().c_str(), O_RDONLY | O_CLOEXEC);
  std::vector<at::Tensor> tensors;
  int64_t offset = 0;
  for (const TensorSpec& spec : checkpoint.specs()) {
    const at::Tensor tensor =
        at::empty(spec.shape, ToScalarType(spec.dtype).value());
    const int64_t size = tensor.nbytes();
    if (pread(descriptor, tensor.data_ptr(), size, offset) != size) {
      Check(absl::DataLossError(checkpoint.path()));
    }
    tensors.push_back(tensor.to(BenchmarkDevice()));
    offset += size;
  }
  close(descriptor);
  return tensors;
}

void BM_Load(benchmark::State& state, const Checkpoint& checkpoint,
             at::ScalarType dtype, int num_threads) {
  int64_t bytes = 0;
  LoadCheckpointOptions options;
  options.num_threads = num_threads;
  options.device = BenchmarkDevice();
  const auto [load, preads] = TakeTurns(
      state,
      [&] {
        const auto model = MetaModel(checkpoint, dtype);
        return SecondsOnDevice([&] {
          const absl::StatusOr<LoadCheckpointReport> report =
              LoadCheckpoint(*model, checkpoint.path(), options);
          Check(report.status());
          bytes = report->bytes_read;
        });
      },
      [&] { return SecondsOnDevice([&] { return ReadPlainly(checkpoint); }); });
  state.counters["vs_pread"] = load / preads;
  state.SetBytesProcessed(state.iterations() * bytes);
}

int Main(int argc, char** argv) {
  const std::string bytes_flag =
      testutil::TakeFlag(argc, argv, "bytes").value_or("1000000000");
  int64_t bytes = 0;
  if (!absl::SimpleAtoi(bytes_flag, &bytes) || bytes < 1) {
    std::cerr << "--bytes=" << bytes_flag << ": give a number from 1"
              << std::endl;
    return EXIT_FAILURE;
  }
  testutil::InitializeBenchmark(argc, argv);

  std::string folder = (std::filesystem::temp_directory_path() /
                        "sharded_loader_benchmark.XXXXXX")
                           .string();
  if (mkdtemp(folder.data()) == nullptr) {
    Check(absl::UnavailableError(absl::StrCat("no folder at ", folder)));
  }
  int exit_status = EXIT_FAILURE;
  {
    const Checkpoint f32(folder, TensorDtype::kF32, bytes);
    const Checkpoint bf16(folder, TensorDtype::kBF16, bytes);
    for (const auto& [checkpoint, dtype] :
         {std::pair(&f32, at::kFloat), std::pair(&bf16, at::kBFloat16),
          std::pair(&bf16, at::kFloat)}) {
      for (const int threads : {1, 2, 4}) {
        benchmark::RegisterBenchmark(
            absl::StrCat(
                "BM_Load/",
                std::string(TensorDtypeName(checkpoint->specs()[0].dtype)),
                "_to_", std::string(TensorDtypeName(*ToTensorDtype(dtype))),
                "/threads:", threads)
                .c_str(),
            BM_Load, *checkpoint, dtype, threads)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond);
      }
    }
    exit_status = testutil::RunBenchmarks();
  }
  std::filesystem::remove_all(folder);
  return exit_status;
}

}  // namespace
}  // namespace trainer_lora::distributed

int main(int argc, char** argv) {
  return trainer_lora::distributed::Main(argc, argv);
}
