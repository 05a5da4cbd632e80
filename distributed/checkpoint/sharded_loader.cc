#include "distributed/checkpoint/sharded_loader.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "config/internal/status_macros.h"
#include "config/logging.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/meta_device.h"
#include "re2/re2.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

// A parameter or buffer of the model, and where its value comes from: `source`
// or `initial_value`.
struct Target {
  std::vector<std::string> names;  // One for each place that it hangs at.
  at::Tensor tensor;
  const TensorInfo* source = nullptr;
  at::Tensor initial_value;
};

struct Plan {
  std::vector<Target> targets;
  LoadCheckpointReport report;
};

std::string DescribeTensor(at::ScalarType dtype, at::IntArrayRef shape) {
  return absl::StrCat(c10::toString(dtype), " [", absl::StrJoin(shape, ", "),
                      "]");
}

// Whether a checkpoint's value of type `from` may become one of type `to`.
bool IsConvertible(at::ScalarType from, at::ScalarType to) {
  return from == to || (at::isFloatingType(from) && at::isFloatingType(to));
}

// The model's parameters and buffers, in its order and each once:
// named_parameters() lists a shared layer under each of its names.
std::vector<Target> ListTargets(const torch::nn::Module& model) {
  std::vector<Target> targets;
  std::map<const c10::TensorImpl*, size_t> known;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const auto [found, is_new] =
        known.try_emplace(tensor.unsafeGetTensorImpl(), targets.size());
    if (is_new) targets.push_back({{}, tensor});
    targets[found->second].names.push_back(name);
  };
  for (const auto& item : model.named_parameters()) {
    add(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) add(item.key(), item.value());
  return targets;
}

// The keys of a checkpoint that the caller wants left alone.
class IgnoredKeys {
 public:
  static absl::StatusOr<IgnoredKeys> Compile(
      const std::vector<std::string>& patterns) {
    IgnoredKeys ignored;
    for (const std::string& pattern : patterns) {
      // Quiet: the status carries the error, RE2 need not log it too.
      auto compiled = std::make_unique<RE2>(pattern, RE2::Quiet);
      if (!compiled->ok()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the ignored pattern \"", pattern,
            "\" is not a regular expression: ", compiled->error()));
      }
      ignored.patterns_.push_back(std::move(compiled));
    }
    return ignored;
  }

  bool Contains(const std::string& key) const {
    for (const auto& pattern : patterns_) {
      if (RE2::FullMatch(key, *pattern)) return true;
    }
    return false;
  }

 private:
  std::vector<std::unique_ptr<RE2>> patterns_;
};

// Finds a value for every target, and everything that stands in the way.
class Planner {
 public:
  Planner(const torch::nn::Module& model, const SafetensorsFile& file,
          const LoadCheckpointOptions& options)
      : file_(file), options_(options) {
    plan_.targets = ListTargets(model);
    for (size_t i = 0; i < plan_.targets.size(); ++i) {
      for (const std::string& name : plan_.targets[i].names) {
        index_.emplace(name, i);
      }
    }
  }

  absl::StatusOr<Plan> MakePlan() {
    LORA_ASSIGN_OR_RETURN(const IgnoredKeys ignored,
                          IgnoredKeys::Compile(options_.ignored_patterns));
    for (const TensorInfo& source : file_.tensors()) {
      if (ignored.Contains(source.name)) {
        plan_.report.ignored.push_back(source.name);
      } else {
        Assign(source);
      }
    }
    for (Target& target : plan_.targets) {
      if (target.source != nullptr) {
        plan_.report.loaded.push_back(target.names.front());
      } else {
        Initialize(target);
      }
      CheckMaterializable(target);
    }
    LORA_RETURN_IF_ERROR(Problems());
    if (!plan_.report.unexpected.empty()) {
      config::InitLogger("checkpoint")
          .Warning(absl::StrCat(file_.path(),
                                ": the model has no place for the keys ",
                                absl::StrJoin(plan_.report.unexpected, ", ")));
    }
    return std::move(plan_);
  }

 private:
  // Makes `source` the value of the tensor that its key leads to.
  void Assign(const TensorInfo& source) {
    const std::string name(options_.aliases.Resolve(source.name));
    const auto found = index_.find(name);
    if (found == index_.end()) {
      plan_.report.unexpected.push_back(source.name);
      return;
    }
    // Two aliases of one name are a layer that the checkpoint holds twice. But
    // if one key is the name itself, it can't be known which one is meant.
    const auto [first, is_first] = keys_.try_emplace(name, source.name);
    if (!is_first && (first->second == name || source.name == name)) {
      given_twice_.push_back(absl::StrCat(name, " (by the keys ", first->second,
                                          " and ", source.name, ")"));
    }
    Target& target = plan_.targets[found->second];
    const std::optional<at::ScalarType> dtype = ToScalarType(source.dtype);
    if (target.tensor.sizes() != at::IntArrayRef(source.shape) ||
        !dtype.has_value() ||
        !IsConvertible(*dtype, target.tensor.scalar_type())) {
      mismatched_.push_back(absl::StrCat(
          name, " is ",
          dtype.has_value()
              ? DescribeTensor(*dtype, source.shape)
              : absl::StrCat(TensorDtypeName(source.dtype), " [",
                             absl::StrJoin(source.shape, ", "),
                             "], a type that tensors do not have,"),
          " in the checkpoint and ",
          DescribeTensor(target.tensor.scalar_type(), target.tensor.sizes()),
          " in the model"));
    }
    if (target.source == nullptr) target.source = &source;
  }

  // Asks the initializer for the value of `target`, under each of its names.
  void Initialize(Target& target) {
    const at::Tensor& tensor = target.tensor;
    for (const std::string& name : target.names) {
      if (options_.missing_parameter_initializer == nullptr) break;
      std::optional<at::Tensor> value = options_.missing_parameter_initializer(
          name, tensor.sizes(), tensor.scalar_type(),
          TensorSlice::Whole(tensor.sizes()));
      if (!value.has_value()) continue;
      if (!value->defined() || value->sizes() != tensor.sizes() ||
          value->scalar_type() != tensor.scalar_type()) {
        mismatched_.push_back(absl::StrCat(
            name, " got ",
            value->defined()
                ? DescribeTensor(value->scalar_type(), value->sizes())
                : "an undefined tensor",
            " from the initializer and is ",
            DescribeTensor(tensor.scalar_type(), tensor.sizes()),
            " in the model"));
      }
      target.initial_value = *std::move(value);
      plan_.report.initialized.push_back(target.names.front());
      return;
    }
    const std::string& name = target.names.front();
    const absl::string_view key = options_.aliases.Reverse(name);
    missing_.push_back(key == name ? name
                                   : absl::StrCat(name, " (key ", key, ")"));
  }

  // Materializing breaks what autograd or another tensor knows of a tensor.
  void CheckMaterializable(const Target& target) {
    if (!target.tensor.is_meta()) return;
    const std::string& name = target.names.front();
    if (target.tensor.grad().defined()) {
      not_materializable_.push_back(absl::StrCat(name, " has a gradient"));
    }
    const auto [first, is_first] = meta_storages_.try_emplace(
        target.tensor.storage().unsafeGetStorageImpl(), name);
    if (!is_first) {
      not_materializable_.push_back(
          absl::StrCat(name, " is a view of ", first->second));
    }
  }

  absl::Status Problems() const {
    std::vector<std::string> problems;
    const auto add = [&](absl::string_view what,
                         const std::vector<std::string>& names) {
      if (names.empty()) return;
      problems.push_back(absl::StrCat(what, ": ", absl::StrJoin(names, ", ")));
    };
    if (options_.strict) {
      add("keys that the model has no place for (see ignored_patterns)",
          plan_.report.unexpected);
    }
    add("missing, and not known to the initializer", missing_);
    add("given twice", given_twice_);
    add("of another shape or type", mismatched_);
    add("on the meta device, and not to be materialized", not_materializable_);
    if (problems.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(file_.path(), " does not fit the model, which was left ",
                     "as it is; ", absl::StrJoin(problems, "; ")));
  }

  const SafetensorsFile& file_;
  const LoadCheckpointOptions& options_;
  Plan plan_;
  std::map<std::string, size_t> index_;      // Model name -> targets[i].
  std::map<std::string, std::string> keys_;  // Model name -> its first key.
  std::map<const c10::StorageImpl*, std::string> meta_storages_;
  std::vector<std::string> missing_;
  std::vector<std::string> given_twice_;
  std::vector<std::string> mismatched_;
  std::vector<std::string> not_materializable_;
};

// Fills `destination`, which is not on meta, with the value of `target`.
absl::Status Fill(const at::Tensor& destination, const Target& target,
                  const SafetensorsFile& file) {
  if (target.source == nullptr) {
    destination.copy_(target.initial_value);
    return absl::OkStatus();
  }
  const TensorInfo& source = *target.source;
  const at::ScalarType dtype = ToScalarType(source.dtype).value();
  const bool reads_in_place = destination.is_cpu() &&
                              destination.scalar_type() == dtype &&
                              destination.is_contiguous();
  const at::Tensor buffer =
      reads_in_place ? destination : at::empty(source.shape, dtype);
  LORA_RETURN_IF_ERROR(
      file.Read(source, 0,
                absl::MakeSpan(static_cast<char*>(buffer.mutable_data_ptr()),
                               static_cast<size_t>(source.byte_size))));
  if (reads_in_place) {
    // As an in-place operator does, for autograd to notice.
    destination.unsafeGetTensorImpl()->bump_version();
  } else {
    destination.copy_(buffer);
  }
  return absl::OkStatus();
}

// Sets `model_changed` as soon as the model is no longer what it was.
absl::Status Execute(const Plan& plan, const SafetensorsFile& file,
                     c10::Device device, bool& model_changed) {
  // First whatever can fail without a trace: meta tensors get theirs at the
  // end.
  std::vector<std::pair<at::Tensor, at::Tensor>> materialized;
  for (const Target& target : plan.targets) {
    if (!target.tensor.is_meta()) continue;
    const at::Tensor value =
        at::empty(target.tensor.sizes(),
                  at::TensorOptions(device).dtype(target.tensor.dtype()));
    LORA_RETURN_IF_ERROR(Fill(value, target, file));
    materialized.emplace_back(target.tensor, value);
  }
  for (const Target& target : plan.targets) {
    if (target.tensor.is_meta()) continue;
    model_changed = true;
    LORA_RETURN_IF_ERROR(Fill(target.tensor, target, file));
  }
  for (const auto& [tensor, value] : materialized) {
    model_changed = true;
    LORA_RETURN_IF_ERROR(MaterializeInPlace(tensor, value));
  }
  return absl::OkStatus();
}

absl::StatusOr<LoadCheckpointReport> LoadOrThrow(
    const torch::nn::Module& model, const std::string& path,
    const LoadCheckpointOptions& options, bool& model_changed) {
  // A parameter that is loaded in inference mode could not be trained.
  const c10::InferenceMode no_inference_mode(false);
  const at::NoGradGuard no_grad;
  LORA_ASSIGN_OR_RETURN(const SafetensorsFile file,
                        SafetensorsFile::Open(path));
  LORA_ASSIGN_OR_RETURN(Plan plan, Planner(model, file, options).MakePlan());
  LORA_RETURN_IF_ERROR(Execute(plan, file, options.device, model_changed));
  for (const Target& target : plan.targets) {
    if (target.source != nullptr) {
      plan.report.bytes_read += target.source->byte_size;
    }
  }
  return std::move(plan.report);
}

}  // namespace

absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
    torch::nn::Module& model, const std::string& path,
    const LoadCheckpointOptions& options) {
  bool model_changed = false;
  absl::Status status;
  try {
    absl::StatusOr<LoadCheckpointReport> report =
        LoadOrThrow(model, path, options, model_changed);
    if (report.ok()) return report;
    status = report.status();
  } catch (const c10::Error& error) {
    status = absl::InternalError(
        absl::StrCat("loading ", path, ": ", error.what_without_backtrace()));
  }
  if (!model_changed) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; the model is now partly loaded"));
}

}  // namespace trainer_lora::distributed
