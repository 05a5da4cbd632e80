// Averaging the gradients of replicated adapters over ranks that are processes
// of this machine, against other ways to do it:
//
//   bazel run -c opt //tests/lora:lora_gradient_sync_benchmark
//   ... -- --rounds=21 --benchmark_filter=ranks:2/tensors:480
//
//   loop           one all-reduce and one division a tensor; of many tensors in
//                  few of the rounds, as it takes seconds
//   flat           one all-reduce and one division of one flat tensor that has
//                  as many elements: what the network alone costs
//   one_shot       ReduceGradients()
//   model          SyncReplicatedLoraGradients() of a model whose adapters have
//                  these tensors, and which it collects each time
//   this           GradientSync::Sync(), gradients being views of its buffers
//   backward       a backward pass without any reduction
//   ddp            the same backward pass under DistributedDataParallel's
//                  Reducer, with gradients as views of its buckets of 25 MiB
//   this_overlap   the same backward pass with GradientSync's overlap_backward,
//                  and Sync()
//
// With --device=cuda the ranks are one and, where the machine has more, as many
// as it has GPUs, one each.
//
// The contenders of a case take turns, once a round, so that the noise of the
// machine hits all alike; all times are medians of rank 0's. Gradients are
// written anew before each turn, untimed. Every number comes from one
// measurement of the case, so --benchmark_repetitions only repeats it: use
// --rounds.
//
// The ratios are of medians of the same run. Less is better:
//   vs_flat  time / flat
//   vs_loop  time / loop
//   vs_ddp   time / ddp, for this_overlap; for those without a backward pass
//            time / (ddp - backward), which is what DDP's reduction adds
// In vs_flat and vs_loop, the time of what has a backward pass is without the
// median of `backward`.
//
// copies are the gradients that GradientSync copied, summed over the rounds;
// collectives are those of one round. With more ranks than cores the times say
// little, as the ranks wait for each other's turn.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/ATen.h"
#include "ATen/Parallel.h"
#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "benchmark/benchmark.h"
#include "c10/core/Device.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "config/lora_config.h"
#include "distributed/collectives.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_sync.h"
#include "distributed/parameter_layout.h"
#include "lora/layer_replacement.h"
#include "lora/linear.h"
#include "lora/lora_gradient_sync.h"
#include "tests/testutil/benchmark_device.h"
#include "tests/testutil/benchmark_flags.h"
#include "tests/testutil/follower_processes.h"
#include "tests/testutil/median.h"
#include "tests/testutil/run_benchmarks.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/options/linear.h"

namespace trainer_lora::lora {
namespace {

using distributed::DeviceMesh;
using distributed::DistributedParameter;
using distributed::GradientSync;
using distributed::GradientSyncOptions;
using distributed::GradientSyncStatistics;
using distributed::ParameterLayout;

// Each model logs what it adapted.
const config::LogSink kNoLog =
    config::SetLogSink([](const config::LogRecord&) {});

// --- What is measured --------------------------------------------------------

struct Case {
  int64_t tensors = 0;
  int64_t floats = 0;  // Of each tensor.
};

// An adapter matrix of rank 16 in a model of 240 layers; small and large ones;
// very many.
constexpr Case kCases[] = {
    {480, 24576}, {2000, 1024}, {640, 81920}, {20000, 256}};
constexpr Case kSmokeCase = {16, 64};

// What a contender works on: parameters of this rank, and the mesh.
struct Workload {
  std::shared_ptr<const DeviceMesh> mesh;
  Case size;
  // One for all contenders, as none writes to its parameters. On the rank's
  // device.
  at::Tensor values;

  // Every contender has handles of its own: hooks and gradients belong to them.
  std::vector<at::Tensor> MakeParameters() const {
    std::vector<at::Tensor> parameters;
    for (const at::Tensor& value : values.unbind()) {
      parameters.push_back(value.detach().set_requires_grad(true));
    }
    return parameters;
  }

  // The gradients are this on each rank, and their average after.
  float gradient() const { return static_cast<float>(mesh->rank() + 1); }
  float average() const { return static_cast<float>(mesh->size() + 1) / 2.0f; }
};

class Contender {
 public:
  virtual ~Contender() = default;

  // Untimed: makes the gradients, or what the backward pass needs.
  virtual void Prepare() = 0;
  // Timed. May throw what c10d throws.
  virtual absl::Status Run() = 0;
  // That of a parameter, after Run().
  virtual at::Tensor Gradient(int64_t index) const = 0;
  // Null without a GradientSync.
  virtual const GradientSyncStatistics* statistics() const { return nullptr; }
};

// --- The contenders ----------------------------------------------------------

void AllReduceAverage(const DeviceMesh& mesh, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors = {tensor};
  mesh.group()->allreduce(tensors)->wait();
  tensors[0].div_(mesh.size());
}

// With gradients that exist: fills them in place, so that views stay views.
void FillGradients(const std::vector<at::Tensor>& parameters, float value) {
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad().fill_(value);
  }
}

std::vector<at::Tensor> WithGradients(std::vector<at::Tensor> parameters) {
  for (const at::Tensor& parameter : parameters) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
  return parameters;
}

std::vector<DistributedParameter> Distribute(
    const std::vector<at::Tensor>& parameters, const Workload& workload) {
  std::vector<DistributedParameter> distributed;
  for (size_t i = 0; i < parameters.size(); ++i) {
    distributed.push_back({absl::StrCat("layer", i, ".lora_A"), parameters[i],
                           ParameterLayout::Replicated(workload.mesh)});
  }
  return distributed;
}

// A loss that uses one parameter after the other, as a model's layers do; the
// gradient of each is `gradient`.
at::Tensor MakeLoss(const std::vector<at::Tensor>& parameters, float gradient) {
  at::Tensor loss = at::zeros({}, parameters[0].device());
  for (const at::Tensor& parameter : parameters) loss = loss + parameter.sum();
  return loss * gradient;
}

class Loop : public Contender {
 public:
  explicit Loop(const Workload& workload)
      : workload_(workload),
        parameters_(WithGradients(workload.MakeParameters())) {}

  void Prepare() override { FillGradients(parameters_, workload_.gradient()); }
  absl::Status Run() override {
    for (const at::Tensor& parameter : parameters_) {
      AllReduceAverage(*workload_.mesh, parameter.grad());
    }
    return absl::OkStatus();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }

 private:
  const Workload workload_;
  const std::vector<at::Tensor> parameters_;
};

class Flat : public Contender {
 public:
  explicit Flat(const Workload& workload)
      : workload_(workload), gradients_(at::zeros_like(workload.values)) {}

  void Prepare() override { gradients_.fill_(workload_.gradient()); }
  absl::Status Run() override {
    AllReduceAverage(*workload_.mesh, gradients_);
    return absl::OkStatus();
  }
  at::Tensor Gradient(int64_t index) const override {
    return gradients_[index];
  }

 private:
  const Workload workload_;
  const at::Tensor gradients_;
};

class OneShot : public Contender {
 public:
  explicit OneShot(const Workload& workload)
      : workload_(workload),
        parameters_(WithGradients(workload.MakeParameters())),
        distributed_(Distribute(parameters_, workload)) {}

  void Prepare() override { FillGradients(parameters_, workload_.gradient()); }
  absl::Status Run() override {
    return distributed::ReduceGradients(*workload_.mesh, distributed_).status();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }

 private:
  const Workload workload_;
  const std::vector<at::Tensor> parameters_;
  const std::vector<DistributedParameter> distributed_;
};

// The parameters are the factors of a model's adapters, two a layer.
class Model : public Contender {
 public:
  static absl::StatusOr<std::unique_ptr<Contender>> Make(
      const Workload& workload) {
    const Case& size = workload.size;
    // The largest power of two that leaves layers no narrower than their rank.
    int64_t lora_rank = 1;
    while (size.floats % (2 * lora_rank) == 0 &&
           4 * lora_rank * lora_rank <= size.floats) {
      lora_rank *= 2;
    }
    const int64_t width = size.floats / lora_rank;
    torch::nn::ModuleList model;
    for (int64_t i = 0; i < size.tensors / 2; ++i) {
      model->push_back(
          ReplicatedLinear(torch::nn::LinearOptions(width, width).bias(false)));
    }
    config::LoraConfig config;
    config.enable = true;
    config.rank = lora_rank;
    config.target_modules = {"all-linear"};
    LORA_RETURN_IF_ERROR(EnableLoraTraining(*model, config).status());
    LORA_RETURN_IF_ERROR(FinalizeLoraTraining(*model).status());
    model->to(workload.values.device());
    LORA_RETURN_IF_ERROR(ReplicateLoraParameters(*model, workload.mesh));
    return std::unique_ptr<Contender>(new Model(workload, std::move(model)));
  }

  void Prepare() override { FillGradients(parameters_, workload_.gradient()); }
  absl::Status Run() override {
    return SyncReplicatedLoraGradients(*model_).status();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad().flatten();
  }

 private:
  Model(const Workload& workload, torch::nn::ModuleList model)
      : workload_(workload), model_(std::move(model)) {
    std::vector<at::Tensor> parameters;
    for (const DistributedParameter& item : LoraParameters(*model_)) {
      parameters.push_back(item.parameter);
    }
    parameters_ = WithGradients(std::move(parameters));
  }

  const Workload workload_;
  const torch::nn::ModuleList model_;
  std::vector<at::Tensor> parameters_;
};

class This : public Contender {
 public:
  static absl::StatusOr<std::unique_ptr<Contender>> Make(
      const Workload& workload) {
    std::vector<at::Tensor> parameters = workload.MakeParameters();
    LORA_ASSIGN_OR_RETURN(
        std::unique_ptr<GradientSync> sync,
        GradientSync::Create(workload.mesh, Distribute(parameters, workload)));
    return std::unique_ptr<Contender>(
        new This(workload, std::move(parameters), std::move(sync)));
  }

  void Prepare() override {
    sync_->ZeroGrad();
    FillGradients(parameters_, workload_.gradient());
  }
  absl::Status Run() override { return sync_->Sync().status(); }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }
  const GradientSyncStatistics* statistics() const override {
    return &sync_->statistics();
  }

 private:
  This(const Workload& workload, std::vector<at::Tensor> parameters,
       std::unique_ptr<GradientSync> sync)
      : workload_(workload),
        parameters_(std::move(parameters)),
        sync_(std::move(sync)) {}

  const Workload workload_;
  const std::vector<at::Tensor> parameters_;
  const std::unique_ptr<GradientSync> sync_;
};

class Backward : public Contender {
 public:
  explicit Backward(const Workload& workload)
      : average_(workload.average()),
        parameters_(WithGradients(workload.MakeParameters())) {}

  void Prepare() override {
    FillGradients(parameters_, 0);
    loss_ = MakeLoss(parameters_, average_);
  }
  absl::Status Run() override {
    loss_.backward();
    return absl::OkStatus();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }

 private:
  const float average_;
  const std::vector<at::Tensor> parameters_;
  at::Tensor loss_;
};

class Ddp : public Contender {
 public:
  explicit Ddp(const Workload& workload)
      : workload_(workload), parameters_(workload.MakeParameters()) {
    // As DistributedDataParallel's constructor does it. The buckets are made
    // again in the second pass, in the order in which gradients came.
    constexpr int64_t kFirst = c10d::kDefaultFirstBucketBytes;
    constexpr int64_t kCap = c10d::kDefaultBucketBytesCap;
    const std::vector<bool> sparse(parameters_.size(), false);
    std::vector<std::vector<size_t>> buckets =
        std::get<0>(c10d::compute_bucket_assignment_by_size(
            parameters_, {kFirst, kCap}, sparse));
    std::reverse(buckets.begin(), buckets.end());
    reducer_ = std::make_unique<c10d::Reducer>(
        parameters_, std::move(buckets), workload_.mesh->group(), sparse, kCap,
        /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
        /*param_names=*/std::unordered_map<size_t, std::string>(), kFirst,
        /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
        /*bucket_bytes_cap_list=*/std::vector<int64_t>());
  }

  // What DistributedDataParallel does in forward is not timed either.
  void Prepare() override {
    for (const at::Tensor& parameter : parameters_) {
      if (parameter.grad().defined()) parameter.mutable_grad().zero_();
    }
    reducer_->rebuild_buckets();
    loss_ = MakeLoss(parameters_, workload_.gradient());
    reducer_->prepare_for_backward({loss_});
  }
  absl::Status Run() override {
    loss_.backward();
    return absl::OkStatus();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }

 private:
  const Workload workload_;
  const std::vector<at::Tensor> parameters_;
  std::unique_ptr<c10d::Reducer> reducer_;
  at::Tensor loss_;
};

class ThisOverlap : public Contender {
 public:
  static absl::StatusOr<std::unique_ptr<Contender>> Make(
      const Workload& workload) {
    std::vector<at::Tensor> parameters = workload.MakeParameters();
    GradientSyncOptions options;
    options.overlap_backward = true;
    LORA_ASSIGN_OR_RETURN(
        std::unique_ptr<GradientSync> sync,
        GradientSync::Create(workload.mesh, Distribute(parameters, workload),
                             options));
    return std::unique_ptr<Contender>(
        new ThisOverlap(workload, std::move(parameters), std::move(sync)));
  }

  void Prepare() override {
    sync_->ZeroGrad();
    loss_ = MakeLoss(parameters_, workload_.gradient());
  }
  absl::Status Run() override {
    loss_.backward();
    return sync_->Sync().status();
  }
  at::Tensor Gradient(int64_t index) const override {
    return parameters_[index].grad();
  }
  const GradientSyncStatistics* statistics() const override {
    return &sync_->statistics();
  }

 private:
  ThisOverlap(const Workload& workload, std::vector<at::Tensor> parameters,
              std::unique_ptr<GradientSync> sync)
      : workload_(workload),
        parameters_(std::move(parameters)),
        sync_(std::move(sync)) {}

  const Workload workload_;
  const std::vector<at::Tensor> parameters_;
  const std::unique_ptr<GradientSync> sync_;
  at::Tensor loss_;
};

template <typename T>
absl::StatusOr<std::unique_ptr<Contender>> Make(const Workload& workload) {
  return std::make_unique<T>(workload);
}

struct ContenderType {
  const char* name;
  bool has_backward;
  // How many collectives a tensor it makes, which bounds its rounds.
  int collectives_per_tensor;
  absl::StatusOr<std::unique_ptr<Contender>> (*make)(const Workload& workload);
};

constexpr ContenderType kContenders[] = {
    {"loop", false, 1, Make<Loop>},
    {"flat", false, 0, Make<Flat>},
    {"one_shot", false, 0, Make<OneShot>},
    {"model", false, 0, Model::Make},
    {"this", false, 0, This::Make},
    {"backward", true, 0, Make<Backward>},
    {"ddp", true, 0, Make<Ddp>},
    {"this_overlap", true, 0, ThisOverlap::Make},
};
constexpr int kContendersCount = std::size(kContenders);

// --- Measuring a case, on every rank -----------------------------------------

// A collective of the loop takes about a millisecond.
constexpr int64_t kMaxCollectives = 6000;

// How often `type` is run in `rounds` rounds, the same on every rank.
int64_t RoundsOf(const ContenderType& type, int64_t tensors, int64_t rounds) {
  if (type.collectives_per_tensor == 0) return rounds;
  const int64_t most =
      kMaxCollectives / (type.collectives_per_tensor * tensors);
  return std::clamp<int64_t>(most, 1, rounds);
}

struct Measurement {
  std::vector<double> seconds;  // One a round.
  int64_t copies = 0;
  int64_t collectives = 0;

  double median() const { return testutil::Median(seconds); }
};

// By contender.
using Measurements = std::vector<Measurement>;

// A contender that does something else is no contender.
absl::Status CheckAverages(const Contender& contender,
                           const Workload& workload) {
  for (const int64_t index : {int64_t{0}, workload.size.tensors - 1}) {
    const at::Tensor gradient = contender.Gradient(index);
    if (!at::all(gradient == workload.average()).item<bool>()) {
      return absl::InternalError(absl::StrCat(
          "gradient ", index, " starts with ", gradient[0].item<float>(),
          " instead of ", workload.average()));
    }
  }
  return absl::OkStatus();
}

absl::Status Turn(Contender& contender, const Workload& workload,
                  Measurement& measurement) {
  const at::Device device = workload.values.device();
  contender.Prepare();
  testutil::Synchronize(device);  // No rank waits for another's preparation.
  LORA_RETURN_IF_ERROR(distributed::Barrier(*workload.mesh));
  testutil::DeviceTimer timer(device);
  LORA_RETURN_IF_ERROR(contender.Run());
  measurement.seconds.push_back(timer.Stop());
  if (const GradientSyncStatistics* statistics = contender.statistics()) {
    measurement.copies += statistics->copied_gradients;
    measurement.collectives = statistics->collectives;
  }
  return CheckAverages(contender, workload);
}

absl::Status AddContext(const absl::Status& status, const char* contender) {
  return status.ok()
             ? status
             : absl::Status(status.code(),
                            absl::StrCat(contender, ": ",
                                         std::string(status.message())));
}

// That of this rank.
at::Device DeviceOf(const DeviceMesh& mesh) {
  return mesh.group()->getBoundDeviceId().value_or(at::kCPU);
}

// Collective.
absl::StatusOr<Measurements> Measure(
    const std::shared_ptr<const DeviceMesh>& mesh, const Case& size,
    int64_t rounds) {
  const at::Device device = DeviceOf(*mesh);
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  const Workload workload = {mesh, size,
                             at::zeros({size.tensors, size.floats}, device)};
  std::vector<std::unique_ptr<Contender>> contenders;
  for (const ContenderType& type : kContenders) {
    absl::StatusOr<std::unique_ptr<Contender>> contender = type.make(workload);
    if (!contender.ok()) return AddContext(contender.status(), type.name);
    contenders.push_back(*std::move(contender));
  }

  Measurements measurements(kContendersCount);
  // Memory is touched and buckets are made again in the rounds before 0.
  constexpr int kWarmUpRounds = 2;
  for (int64_t round = -kWarmUpRounds; round < rounds; ++round) {
    for (int i = 0; i < kContendersCount; ++i) {
      const int64_t turns = RoundsOf(kContenders[i], size.tensors, rounds);
      const bool is_short = turns == rounds;
      if (round >= turns || (round < 0 && !is_short)) continue;
      Measurement unused;
      LORA_RETURN_IF_ERROR(AddContext(
          Turn(*contenders[i], workload, round < 0 ? unused : measurements[i]),
          kContenders[i].name));
    }
  }
  return measurements;
}

// Measure(), without the exceptions that c10d throws.
absl::StatusOr<Measurements> TryMeasure(
    const std::shared_ptr<const DeviceMesh>& mesh, const Case& size,
    int64_t rounds) {
  try {
    return Measure(mesh, size, rounds);
  } catch (const std::exception& exception) {
    return absl::UnavailableError(exception.what());
  }
}

// --- Rank 0 and its followers ------------------------------------------------

// What rank 0 has the others do: measure a case. None: end.
struct Order {
  Case size;
  int64_t rounds = 0;
};

// Collective: every rank gets the order of rank 0.
absl::StatusOr<Order> ShareOrder(const DeviceMesh& mesh, const Order& order) {
  Order shared;
  for (const auto& [from, to] :
       {std::pair(order.size.tensors, &shared.size.tensors),
        std::pair(order.size.floats, &shared.size.floats),
        std::pair(order.rounds, &shared.rounds)}) {
    LORA_ASSIGN_OR_RETURN(
        const double value,
        distributed::AllReduce(mesh, mesh.rank() == 0 ? from : 0,
                               distributed::ReduceOp::kSum));
    *to = static_cast<int64_t>(value);
  }
  return shared;
}

absl::Status Follow(int argc, char** argv) {
  LORA_ASSIGN_OR_RETURN(auto group, testutil::JoinAsFollower(argc, argv));
  LORA_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceMesh> mesh,
                        DeviceMesh::Create(std::move(group)));
  while (true) {
    LORA_ASSIGN_OR_RETURN(const Order order, ShareOrder(*mesh, {}));
    if (order.rounds == 0) return distributed::Barrier(*mesh);
    LORA_RETURN_IF_ERROR(TryMeasure(mesh, order.size, order.rounds).status());
  }
}

// Rank 0 of a world that lives as long as it is asked for the same size.
class Leader {
 public:
  explicit Leader(int64_t rounds) : rounds_(rounds) {}
  ~Leader() { EndWorld(); }

  // The measurements of a case, which are made once. After an error every
  // other case of the same world has it too.
  const absl::StatusOr<Measurements>& Get(int world_size, const Case& size) {
    const auto key = std::make_tuple(world_size, size.tensors, size.floats);
    const auto found = measured_.find(key);
    if (found != measured_.end()) return found->second;
    return measured_.emplace(key, MeasureIn(world_size, size)).first->second;
  }

 private:
  absl::StatusOr<Measurements> MeasureIn(int world_size, const Case& size) {
    absl::StatusOr<Measurements> measurements = [&] {
      return TryMeasureIn(world_size, size);
    }();
    if (!measurements.ok()) {
      // Its ranks may wait for each other: they end as rank 0 leaves.
      mesh_ = nullptr;
      world_ = nullptr;
    }
    return measurements;
  }

  absl::StatusOr<Measurements> TryMeasureIn(int world_size, const Case& size) {
    if (mesh_ == nullptr || mesh_->size() != world_size) {
      EndWorld();
      LORA_ASSIGN_OR_RETURN(
          world_, testutil::FollowerProcesses::Start(
                      world_size, testutil::BenchmarkDevice().type()));
      LORA_ASSIGN_OR_RETURN(mesh_, DeviceMesh::Create(world_->group()));
    }
    LORA_RETURN_IF_ERROR(ShareOrder(*mesh_, {size, rounds_}).status());
    return TryMeasure(mesh_, size, rounds_);
  }

  void EndWorld() {
    if (mesh_ == nullptr) return;
    absl::Status ended = ShareOrder(*mesh_, {}).status();
    if (ended.ok()) ended = distributed::Barrier(*mesh_);
    if (!ended.ok()) std::cerr << ended << std::endl;
    mesh_ = nullptr;
    world_ = nullptr;
  }

  const int64_t rounds_;
  std::unique_ptr<testutil::FollowerProcesses> world_;
  std::shared_ptr<const DeviceMesh> mesh_;
  std::map<std::tuple<int, int64_t, int64_t>, absl::StatusOr<Measurements>>
      measured_;
};

// --- Google Benchmark --------------------------------------------------------

const Measurement& Named(const Measurements& measurements,
                         absl::string_view name) {
  for (int i = 0; i < kContendersCount; ++i) {
    if (name == kContenders[i].name) return measurements[i];
  }
  std::abort();
}

void Report(benchmark::State& state, Leader& leader, int world_size,
            const Case& size, int contender) {
  const absl::StatusOr<Measurements>& measurements =
      leader.Get(world_size, size);
  if (!measurements.ok()) {
    state.SkipWithError(measurements.status().ToString().c_str());
    return;
  }
  const Measurement& measurement = (*measurements)[contender];
  const double time = measurement.median();
  for (auto _ : state) state.SetIterationTime(time);

  state.counters["turns"] = static_cast<double>(measurement.seconds.size());
  const absl::string_view name = kContenders[contender].name;
  if (name == "backward") return;
  const double backward = Named(*measurements, "backward").median();
  const double ddp = Named(*measurements, "ddp").median();
  const bool has_backward = kContenders[contender].has_backward;
  const double reduction = has_backward ? time - backward : time;
  state.counters["vs_flat"] = reduction / Named(*measurements, "flat").median();
  state.counters["vs_loop"] = reduction / Named(*measurements, "loop").median();
  state.counters["vs_ddp"] =
      has_backward ? time / ddp : time / (ddp - backward);
  if (name == "this" || name == "this_overlap") {
    state.counters["copies"] = static_cast<double>(measurement.copies);
    state.counters["collectives"] =
        static_cast<double>(measurement.collectives);
  }
}

void Register(Leader& leader, int world_size, const Case& size) {
  for (int i = 0; i < kContendersCount; ++i) {
    const std::string name = absl::StrCat(
        "GradientSync/ranks:", world_size, "/tensors:", size.tensors,
        "/floats:", size.floats, "/", kContenders[i].name);
    benchmark::RegisterBenchmark(
        name.c_str(),
        [&leader, world_size, size, i](benchmark::State& state) {
          Report(state, leader, world_size, size, i);
        })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

std::vector<int> WorldSizes() {
  if (testutil::BenchmarkDevice().is_cpu()) return {2, 4};
  const int gpus = at::detail::getCUDAHooks().deviceCount();
  return gpus > 1 ? std::vector<int>{1, gpus} : std::vector<int>{1};
}

int Main(int argc, char** argv) {
  at::set_num_threads(1);
  if (testutil::IsFollower(argc, argv)) {
    const absl::Status status = Follow(argc, argv);
    if (!status.ok()) std::cerr << status << std::endl;
    return status.ok() ? 0 : 1;
  }

  const bool smoke = testutil::TakeFlag(argc, argv, "smoke") == "true";
  const std::string rounds_flag =
      testutil::TakeFlag(argc, argv, "rounds").value_or(smoke ? "1" : "11");
  int64_t rounds = 0;
  if (!absl::SimpleAtoi(rounds_flag, &rounds) || rounds < 1) {
    std::cerr << "--rounds=" << rounds_flag << ": give a number from 1"
              << std::endl;
    return 1;
  }
  testutil::InitializeBenchmark(argc, argv);

  Leader leader(rounds);
  for (const int world_size : WorldSizes()) {
    if (smoke) {
      Register(leader, world_size, kSmokeCase);
    } else {
      for (const Case& size : kCases) Register(leader, world_size, size);
    }
  }
  return testutil::RunBenchmarks();
}

}  // namespace
}  // namespace trainer_lora::lora

int main(int argc, char** argv) { return trainer_lora::lora::Main(argc, argv); }
