#include "distributed/checkpoint/sharded_loader.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/record_function.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/intrusive_ptr.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/checkpoint/internal/shard_destination.h"
#include "distributed/checkpoint/internal/shard_reader.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"
#include "distributed/internal/write_problem.h"
#include "distributed/meta_device.h"
#include "distributed/state_layout.h"
#include "distributed/tensor_slice.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

using internal::DescribeTensor;
using internal::ModelTensor;

// That the options are fit for the model.
absl::Status CheckOptions(const std::vector<ModelTensor>& tensors,
                          const LoadCheckpointOptions& options) {
  if (options.num_threads < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_threads must be positive, got ", options.num_threads));
  }
  if (options.mesh == nullptr && !options.read_once_dims.empty()) {
    return absl::InvalidArgumentError(
        "read_once_dims need a mesh, which is null");
  }
  return internal::CheckLayouts(tensors, options.mesh.get(), options.layouts);
}

// That any two ranks of `group` can send to each other at once. Those of NCCL,
// which has an order of its own for them, would wait without end.
absl::Status CheckReadOnceGroup(const c10d::ProcessGroup& group) {
  if (internal::MetadataDevice(group).is_cpu()) return absl::OkStatus();
  return absl::UnimplementedError(
      "read_once_dims need a group that has a backend for the CPU too, such as "
      "gloo beside nccl");
}

// What `rank` of the mesh wants of `tensor`.
TargetTensor MakeTarget(const ModelTensor& tensor, int64_t rank) {
  TargetTensor target;
  target.names = tensor.names;
  // A type that files don't have was a problem before.
  target.dtype =
      ToTensorDtype(tensor.tensor.scalar_type()).value_or(TensorDtype::kU8);
  target.global_shape = tensor.GlobalShape();
  target.slices = tensor.SlicesOf(rank);
  return target;
}

// That the initializer gave what it was asked for.
absl::Status CheckValue(absl::string_view name, const at::Tensor& value,
                        at::ScalarType dtype, const TensorSlice& slice) {
  if (value.defined() && value.sizes() == at::IntArrayRef(slice.sizes) &&
      value.scalar_type() == dtype) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      name, " got ",
      value.defined() ? DescribeTensor(value.scalar_type(), value.sizes())
                      : "an undefined tensor",
      " from the initializer, which was asked for ",
      DescribeTensor(dtype, slice.sizes)));
}

// A load that can begin.
struct PreparedLoad {
  std::vector<TargetTensor> targets;  // One a tensor of the model.
  LoadPlan plan;
};

// Plans loads, for this rank and others.
class LoadPlanner {
 public:
  LoadPlanner(std::vector<ModelTensor> tensors,
              const SafetensorsCheckpoint& checkpoint,
              const LoadCheckpointOptions& options)
      : tensors_(std::move(tensors)),
        checkpoint_(checkpoint),
        initializer_(options.missing_parameter_initializer) {
    for (const ModelTensor& tensor : tensors_) {
      for (const std::string& name : tensor.names) by_name_[name] = &tensor;
    }
    plan_options_.mapping = options.mapping;
    plan_options_.aliases = options.aliases;
    plan_options_.ignored_patterns = options.ignored_patterns;
    plan_options_.zero_patterns = options.zero_patterns;
    plan_options_.strict = options.strict;
    if (initializer_ != nullptr) {
      plan_options_.is_initializable = [this](absl::string_view name) {
        return IsInitializable(name);
      };
    }
  }
  LoadPlanner(const LoadPlanner&) = delete;

  std::vector<TargetTensor> TargetsOf(int64_t rank) const {
    std::vector<TargetTensor> targets;
    targets.reserve(tensors_.size());
    for (const ModelTensor& tensor : tensors_) {
      targets.push_back(MakeTarget(tensor, rank));
    }
    return targets;
  }

  const std::vector<ModelTensor>& tensors() const { return tensors_; }

  // The plan of `rank`, the one that this process is, with every problem of
  // model and checkpoint in one error.
  absl::StatusOr<PreparedLoad> Prepare(int64_t rank) const {
    unfit_values_.clear();
    PreparedLoad load;
    load.targets = TargetsOf(rank);
    std::vector<std::string> problems;
    absl::StatusOr<LoadPlan> plan =
        MakeLoadPlan(load.targets, checkpoint_.tensors(), plan_options_);
    if (plan.ok()) {
      load.plan = *std::move(plan);
    } else if (plan.status().code() == absl::StatusCode::kFailedPrecondition) {
      problems.push_back(std::string(plan.status().message()));
    } else {
      return plan.status();
    }
    AddModelProblems(load.targets, problems);
    if (!problems.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(
          checkpoint_.path(), " does not fit the model, which was left as it ",
          "is; ", absl::StrJoin(problems, "; ")));
    }
    return load;
  }

 private:
  // Asks the initializer for no elements of it (for a scalar: for the one),
  // which costs nothing.
  bool IsInitializable(absl::string_view name) const {
    const ModelTensor& tensor = *by_name_.at(std::string(name));
    const std::vector<int64_t> shape = tensor.GlobalShape();
    const TensorSlice nothing{std::vector<int64_t>(shape.size(), 0),
                              std::vector<int64_t>(shape.size(), 0)};
    const at::ScalarType dtype = tensor.tensor.scalar_type();
    const std::optional<at::Tensor> value =
        initializer_(name, shape, dtype, nothing);
    if (!value.has_value()) return false;
    if (absl::Status status = CheckValue(name, *value, dtype, nothing);
        !status.ok()) {
      unfit_values_.push_back(std::string(status.message()));
    }
    return true;
  }

  void AddModelProblems(const std::vector<TargetTensor>& targets,
                        std::vector<std::string>& problems) const {
    std::vector<std::string> misshapen;
    std::vector<std::string> unknown_types;
    std::vector<std::string> not_writable;
    std::vector<std::string> not_materializable;
    std::unordered_map<const c10::StorageImpl*, std::string> meta_storages;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& tensor = tensors_[i].tensor;
      const std::string& name = tensors_[i].names.front();
      if (!ToTensorDtype(tensor.scalar_type()).has_value()) {
        unknown_types.push_back(
            absl::StrCat(name, " (", c10::toString(tensor.scalar_type()), ")"));
      }
      const std::vector<int64_t> shape = LocalShape(targets[i]);
      if (tensor.sizes() != at::IntArrayRef(shape) &&
          !(tensor.is_meta() &&
            tensor.sizes() == at::IntArrayRef(targets[i].global_shape))) {
        misshapen.push_back(absl::StrCat(
            name, " has [", absl::StrJoin(tensor.sizes(), ", "),
            "] in the model, and [", absl::StrJoin(shape, ", "), "] of [",
            absl::StrJoin(targets[i].global_shape, ", "), "] by its layout"));
      }
      const char* const write_problem = internal::WriteProblem(tensor);
      if (write_problem != nullptr) {
        not_writable.push_back(absl::StrCat(name, " ", write_problem));
      }
      // Materializing breaks what autograd or another tensor knows of a tensor.
      if (!tensor.is_meta()) continue;
      if (tensor.grad().defined()) {
        not_materializable.push_back(absl::StrCat(name, " has a gradient"));
      }
      const auto [first, is_first] = meta_storages.try_emplace(
          tensor.storage().unsafeGetStorageImpl(), name);
      if (!is_first) {
        not_materializable.push_back(
            absl::StrCat(name, " is a view of ", first->second));
      }
    }
    const auto add = [&](absl::string_view what,
                         const std::vector<std::string>& names) {
      if (names.empty()) return;
      problems.push_back(absl::StrCat(what, ": ", absl::StrJoin(names, ", ")));
    };
    add("of a type that checkpoints don't have", unknown_types);
    add("of another shape than the layout says", misshapen);
    add("not made as wanted", unfit_values_);
    add("not to be written", not_writable);
    add("on the meta device, and not to be materialized", not_materializable);
  }

  const std::vector<ModelTensor> tensors_;
  const SafetensorsCheckpoint& checkpoint_;
  const MissingParameterInitializer& initializer_;
  std::unordered_map<std::string, const ModelTensor*> by_name_;
  LoadPlanOptions plan_options_;
  mutable std::vector<std::string> unfit_values_;  // Of the initializer.
};

// What must be the same on every rank, a line a tensor.
std::vector<std::string> AgreementLines(
    const std::vector<ModelTensor>& tensors,
    const SafetensorsCheckpoint& checkpoint) {
  std::vector<std::string> lines;
  lines.reserve(tensors.size() + checkpoint.tensors().size());
  for (const ModelTensor& tensor : tensors) {
    lines.push_back(internal::DescribeShards(tensor));
  }
  for (const CheckpointTensor& source : checkpoint.tensors()) {
    lines.push_back(absl::StrCat("key ", absl::CHexEscape(source.info->name),
                                 " ", TensorDtypeName(source.info->dtype), " [",
                                 absl::StrJoin(source.info->shape, ", "), "]"));
  }
  return lines;
}

// Tells the caller of the options how far the load is.
class ProgressMeter {
 public:
  ProgressMeter(const std::function<void(const LoadProgress&)>& callback,
                int64_t bytes_total)
      : callback_(callback), start_(absl::Now()), last_call_(start_) {
    progress_.bytes_total = bytes_total;
  }

  void Add(int64_t bytes) {
    progress_.bytes_done += bytes;
    if (callback_ == nullptr || progress_.bytes_done == progress_.bytes_total) {
      return;  // Finish() is near.
    }
    const absl::Time now = absl::Now();
    if (now - last_call_ < absl::Milliseconds(100)) return;
    last_call_ = now;
    progress_.time_left =
        (now - start_) *
        (static_cast<double>(progress_.bytes_total - progress_.bytes_done) /
         static_cast<double>(progress_.bytes_done));
    callback_(progress_);
  }

  void Finish() {
    progress_.time_left = absl::ZeroDuration();
    if (callback_ != nullptr) callback_(progress_);
  }

 private:
  const std::function<void(const LoadProgress&)>& callback_;
  const absl::Time start_;
  absl::Time last_call_;
  LoadProgress progress_;
};

// One call of LoadCheckpoint().
class Loader {
 public:
  Loader(const torch::nn::Module& model, const std::string& path,
         const LoadCheckpointOptions& options)
      : model_(model), path_(path), options_(options) {}

  absl::StatusOr<LoadCheckpointReport> Load() {
    LORA_RETURN_IF_ERROR(Agree("plan of a load", [&] { return Prepare(); }));
    if (options_.mesh != nullptr) {
      LORA_RETURN_IF_ERROR(internal::CheckRanksAgree(
          *options_.mesh->group(), options_.mesh->ToString(),
          "comparison of models and checkpoints",
          AgreementLines(planner_->tensors(), *checkpoint_)));
    }
    LORA_RETURN_IF_ERROR(
        Agree("allocation of parameters", [&] { return Allocate(); }));
    absl::Status status = Agree("load of a checkpoint", [&] { return Read(); });
    if (!status.ok()) {
      if (!WritesInPlace()) return status;
      return absl::Status(
          status.code(),
          absl::StrCat(status.message(), "; the model is now partly loaded"));
    }
    LORA_RETURN_IF_ERROR(Commit());
    return MakeReport();
  }

 private:
  // Calls `step` and, with a mesh, has all ranks return the same.
  absl::Status Agree(const std::string& what,
                     const std::function<absl::Status()>& step) const {
    return internal::AgreedStep(options_.mesh.get(), what, Context(), step);
  }

  std::string Context() const { return absl::StrCat("loading ", path_); }

  absl::Status Prepare() {
    std::vector<ModelTensor> tensors =
        internal::ListTensors(model_, options_.layouts);
    LORA_RETURN_IF_ERROR(CheckOptions(tensors, options_));
    if (!options_.read_once_dims.empty()) {
      LORA_ASSIGN_OR_RETURN(read_once_group_,
                            options_.mesh->GroupOver(options_.read_once_dims));
      LORA_RETURN_IF_ERROR(CheckReadOnceGroup(*read_once_group_));
    }
    LORA_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint,
                          SafetensorsCheckpoint::Open(path_));
    checkpoint_.emplace(std::move(checkpoint));
    planner_.emplace(std::move(tensors), *checkpoint_, options_);
    LORA_ASSIGN_OR_RETURN(
        load_, planner_->Prepare(
                   options_.mesh == nullptr ? 0 : options_.mesh->rank()));
    if (read_once_group_ != nullptr) {
      for (const int64_t rank :
           options_.mesh->RanksOver(options_.read_once_dims)) {
        group_copies_.push_back(rank == options_.mesh->rank()
                                    ? load_.plan.copies
                                    : CopiesFor(load_.plan,
                                                planner_->TargetsOf(rank),
                                                checkpoint_->tensors()));
      }
    }
    Warn();
    return absl::OkStatus();
  }

  void Warn() const {
    std::vector<std::string> extra_states;
    for (const std::string& key : load_.plan.ignored) {
      if (absl::EndsWith(key, "_extra_state")) {
        extra_states.push_back(config::Printable(key));
      }
    }
    std::vector<std::string> unexpected;
    for (const std::string& key : load_.plan.unexpected) {
      unexpected.push_back(config::Printable(key));
    }
    config::Logger logger = config::InitLogger("checkpoint");
    if (!extra_states.empty()) {
      logger.Warning(absl::StrCat(path_, ": left out ",
                                  absl::StrJoin(extra_states, ", ")));
    }
    if (!unexpected.empty()) {
      logger.Warning(absl::StrCat(path_,
                                  ": the model has no place for the keys ",
                                  absl::StrJoin(unexpected, ", ")));
    }
  }

  // Whether a tensor of the model changes before all is read.
  bool WritesInPlace() const {
    for (const ModelTensor& tensor : planner_->tensors()) {
      if (!tensor.tensor.is_meta()) return true;
    }
    return false;
  }

  absl::Status Allocate() {
    for (size_t i = 0; i < load_.targets.size(); ++i) {
      const at::Tensor& tensor = planner_->tensors()[i].tensor;
      values_.push_back(
          tensor.is_meta()
              ? at::empty(
                    LocalShape(load_.targets[i]),
                    at::TensorOptions(options_.device).dtype(tensor.dtype()))
              : tensor);
      destinations_.emplace_back(values_.back());
    }
    return absl::OkStatus();
  }

  absl::Status Read() {
    if (read_once_group_ != nullptr) return ReadOnce();
    ProgressMeter meter(options_.progress, load_.plan.bytes_read);
    LORA_RETURN_IF_ERROR(internal::ReadShards(
        *checkpoint_, load_.plan.copies, destinations_, options_.num_threads,
        [&](int64_t bytes) { meter.Add(bytes); },
        [&] { return Initialize(); }));
    bytes_read_ = load_.plan.bytes_read;
    meter.Finish();
    return absl::OkStatus();
  }

  absl::Status ReadOnce() {
    int64_t bytes_total = 0;
    for (const PlannedCopy& copy : load_.plan.copies) {
      const TensorInfo& info = *checkpoint_->tensors()[copy.source].info;
      bytes_total +=
          copy.num_runs * copy.run_elements * TensorDtypeBits(info.dtype) / 8;
    }
    ProgressMeter meter(options_.progress, bytes_total);
    // Also after an error: the others wait for this rank.
    const absl::Status initialized =
        internal::GuardedStep(Context(), [&] { return Initialize(); });
    LORA_ASSIGN_OR_RETURN(
        bytes_read_,
        internal::ReadShardsOnce(*checkpoint_, group_copies_, destinations_,
                                 *read_once_group_, options_.mesh->ToString(),
                                 [&](int64_t bytes) { meter.Add(bytes); }));
    LORA_RETURN_IF_ERROR(initialized);
    meter.Finish();
    return absl::OkStatus();
  }

  // Makes what the checkpoint lacks.
  absl::Status Initialize() {
    for (size_t i = 0; i < load_.targets.size(); ++i) {
      if (load_.plan.value_sources[i] == ValueSource::kZero) {
        values_[i].detach().zero_();
      } else if (load_.plan.value_sources[i] == ValueSource::kInitializer) {
        LORA_RETURN_IF_ERROR(InitializeTarget(i));
      }
    }
    return absl::OkStatus();
  }

  absl::Status InitializeTarget(size_t index) {
    const TargetTensor& target = load_.targets[index];
    const at::Tensor value = values_[index].detach();
    int64_t row = 0;
    for (const TensorSlice& slice : target.slices) {
      const at::Tensor part =
          value.dim() == 0 ? value : value.narrow(0, row, slice.sizes[0]);
      LORA_RETURN_IF_ERROR(InitializeSlice(target, slice, part));
      if (value.dim() > 0) row += slice.sizes[0];
    }
    return absl::OkStatus();
  }

  // Asks the initializer under each of the target's names.
  absl::Status InitializeSlice(const TargetTensor& target,
                               const TensorSlice& slice,
                               const at::Tensor& part) {
    for (const std::string& name : target.names) {
      const std::optional<at::Tensor> initial =
          options_.missing_parameter_initializer(name, target.global_shape,
                                                 part.scalar_type(), slice);
      if (!initial.has_value()) continue;
      LORA_RETURN_IF_ERROR(
          CheckValue(name, *initial, part.scalar_type(), slice));
      part.copy_(*initial);
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(
        absl::StrCat(target.names[0], ": the initializer gave nothing for ",
                     slice.ToString(), ", though it knew the name before"));
  }

  // Nothing here can fail: what could was checked when the load was planned.
  absl::Status Commit() const {
    for (size_t i = 0; i < values_.size(); ++i) {
      const at::Tensor& tensor = planner_->tensors()[i].tensor;
      if (tensor.is_meta()) {
        LORA_RETURN_IF_ERROR(MaterializeShardInPlace(tensor, values_[i]));
      } else {
        // As an in-place operator does, for autograd to notice.
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
    return absl::OkStatus();
  }

  LoadCheckpointReport MakeReport() {
    LoadCheckpointReport report;
    for (size_t i = 0; i < load_.targets.size(); ++i) {
      const std::string& name = load_.targets[i].names.front();
      switch (load_.plan.value_sources[i]) {
        case ValueSource::kCheckpoint:
          report.loaded.push_back(name);
          break;
        case ValueSource::kInitializer:
          report.initialized.push_back(name);
          break;
        case ValueSource::kZero:
          report.zeroed.push_back(name);
          break;
      }
    }
    report.ignored = std::move(load_.plan.ignored);
    report.unexpected = std::move(load_.plan.unexpected);
    report.origins = std::move(load_.plan.origins);
    report.bytes_read = bytes_read_;
    return report;
  }

  const torch::nn::Module& model_;
  const std::string& path_;
  const LoadCheckpointOptions& options_;

  c10::intrusive_ptr<c10d::ProcessGroup> read_once_group_;
  std::optional<SafetensorsCheckpoint> checkpoint_;
  std::optional<LoadPlanner> planner_;
  PreparedLoad load_;
  // What each rank of the group wants; empty without one.
  std::vector<std::vector<PlannedCopy>> group_copies_;
  std::vector<at::Tensor> values_;  // One a target.
  std::vector<internal::ShardDestination> destinations_;
  int64_t bytes_read_ = 0;
};

}  // namespace

absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
    torch::nn::Module& model, const std::string& path,
    const LoadCheckpointOptions& options) {
  RECORD_FUNCTION("trainer_lora::load_checkpoint", {});
  // A parameter that is loaded in inference mode could not be trained.
  const c10::InferenceMode no_inference_mode(false);
  const at::NoGradGuard no_grad;
  return Loader(model, path, options).Load();
}

absl::StatusOr<std::string> DescribeLoad(const torch::nn::Module& model,
                                         const std::string& path,
                                         const LoadCheckpointOptions& options) {
  std::string text;
  LORA_RETURN_IF_ERROR(internal::GuardedStep(
      absl::StrCat("loading ", path), [&]() -> absl::Status {
        std::vector<ModelTensor> tensors =
            internal::ListTensors(model, options.layouts);
        LORA_RETURN_IF_ERROR(CheckOptions(tensors, options));
        LORA_ASSIGN_OR_RETURN(const SafetensorsCheckpoint checkpoint,
                              SafetensorsCheckpoint::Open(path));
        const LoadPlanner planner(std::move(tensors), checkpoint, options);
        LORA_ASSIGN_OR_RETURN(
            const PreparedLoad load,
            planner.Prepare(options.mesh == nullptr ? 0
                                                    : options.mesh->rank()));
        text = load.plan.ToString(load.targets, checkpoint.tensors());
        return absl::OkStatus();
      }));
  return text;
}

}  // namespace trainer_lora::distributed
