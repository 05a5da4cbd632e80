#include "distributed/checkpoint/sharded_saver.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/record_function.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "c10/core/GradMode.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/gather_rows.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/checkpoint/internal/new_folder.h"
#include "distributed/checkpoint/internal/safetensors_index.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/safetensors_writer.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {
namespace {

using internal::DescribeTensor;
using internal::ModelTensor;
using internal::RowGathering;

// Rows [begin, begin + rows) of a tensor, or all of a scalar, and their key.
struct Entry {
  TensorSpec spec;
  const ModelTensor* tensor;
  int64_t begin;
};

// One call of SaveCheckpoint().
class Saver {
 public:
  Saver(const torch::nn::Module& model, const std::string& folder,
        const SaveCheckpointOptions& options)
      : model_(model),
        folder_(folder),
        options_(options),
        group_(options.mesh == nullptr ? nullptr : options.mesh->group().get()),
        rank_(options.mesh == nullptr ? 0 : options.mesh->rank()) {}

  absl::Status Save() {
    LORA_RETURN_IF_ERROR(Agree([&] { return Prepare(); }));
    if (group_ != nullptr) {
      LORA_RETURN_IF_ERROR(internal::CheckRanksAgree(
          *group_, options_.mesh->ToString(), "comparison of what is saved",
          AgreementLines()));
    }
    LORA_RETURN_IF_ERROR(Agree([&] { return Begin(); }));
    for (size_t i = 0; i < files_.size(); ++i) {
      LORA_RETURN_IF_ERROR(SaveFile(i));
    }
    return Agree([&] { return Finish(); });
  }

 private:
  bool IsWriter() const { return rank_ == 0; }

  // Calls `step` and, with a mesh, has all ranks return the same.
  absl::Status Agree(const std::function<absl::Status()>& step) const {
    return internal::AgreedStep(options_.mesh.get(),
                                absl::StrCat("saving of ", folder_),
                                absl::StrCat("saving ", folder_), step);
  }

  absl::Status Prepare() {
    if (options_.file_stem.empty() ||
        absl::StrContains(options_.file_stem, '/')) {
      return absl::InvalidArgumentError(
          absl::StrCat("file_stem is \"", options_.file_stem,
                       "\", which can't begin the name of a file"));
    }
    tensors_ = internal::ListTensors(model_, options_.layouts);
    LORA_RETURN_IF_ERROR(internal::CheckLayouts(tensors_, options_.mesh.get(),
                                                options_.layouts));
    for (const ModelTensor& tensor : tensors_) {
      for (const std::string& name : tensor.names) by_name_[name] = &tensor;
    }
    LORA_RETURN_IF_ERROR(CheckNames());
    std::vector<Entry> entries;
    for (const ModelTensor& tensor : tensors_) {
      if (IsLeftOut(tensor)) continue;
      LORA_RETURN_IF_ERROR(CheckTensor(tensor));
      LORA_RETURN_IF_ERROR(AddEntries(tensor, entries));
    }
    return DivideIntoFiles(std::move(entries));
  }

  // That all names in the options are the model's.
  absl::Status CheckNames() const {
    const auto check = [&](const std::string& name, absl::string_view what) {
      if (by_name_.count(name) != 0) return absl::OkStatus();
      return absl::InvalidArgumentError(absl::StrCat(
          what, " ", name, ", which is no parameter or buffer of the model"));
    };
    for (const auto& [name, parts] : options_.origins) {
      LORA_RETURN_IF_ERROR(check(name, "there is an origin of"));
    }
    for (const std::string& name : options_.left_out) {
      LORA_RETURN_IF_ERROR(check(name, "it leaves out"));
    }
    for (const auto& [name, transform] : options_.transforms) {
      LORA_RETURN_IF_ERROR(check(name, "there is a transform of"));
      for (const std::string& input : transform.inputs) {
        LORA_RETURN_IF_ERROR(
            check(input, absl::StrCat("the transform of ", name, " takes")));
        LORA_RETURN_IF_ERROR(CheckTensor(*by_name_.at(input)));
      }
    }
    return absl::OkStatus();
  }

  bool IsLeftOut(const ModelTensor& tensor) const {
    return std::any_of(tensor.names.begin(), tensor.names.end(),
                       [&](const std::string& name) {
                         return options_.left_out.count(name) != 0;
                       });
  }

  // That the values of `tensor` can be written.
  static absl::Status CheckTensor(const ModelTensor& tensor) {
    const std::string& name = tensor.names.front();
    if (tensor.tensor.is_meta()) {
      return absl::FailedPreconditionError(
          absl::StrCat(name, " is on the meta device: it has no values"));
    }
    if (!ToTensorDtype(tensor.tensor.scalar_type()).has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          name, " is of type ", c10::toString(tensor.tensor.scalar_type()),
          ", which files don't have"));
    }
    const std::vector<int64_t> shape = tensor.LocalShape();
    if (tensor.tensor.sizes() != at::IntArrayRef(shape)) {
      return absl::FailedPreconditionError(absl::StrCat(
          name, " has the shape [", absl::StrJoin(tensor.tensor.sizes(), ", "),
          "], and [", absl::StrJoin(shape, ", "), "] by its layout"));
    }
    return absl::OkStatus();
  }

  // What the options have for `tensor` under one of its names; null if nothing.
  template <typename Value>
  static const Value* Find(const std::map<std::string, Value>& values,
                           const ModelTensor& tensor) {
    for (const std::string& name : tensor.names) {
      const auto found = values.find(name);
      if (found != values.end()) return &found->second;
    }
    return nullptr;
  }

  absl::Status AddEntries(const ModelTensor& tensor,
                          std::vector<Entry>& entries) const {
    const std::string& name = tensor.names.front();
    const TensorDtype dtype =
        ToTensorDtype(tensor.tensor.scalar_type()).value();
    std::vector<int64_t> shape = tensor.GlobalShape();
    const std::vector<KeyPart>* const origin = Find(options_.origins, tensor);
    const int64_t rows = shape.empty() ? -1 : shape[0];
    if (origin == nullptr ||
        (origin->size() == 1 && origin->front().rows == rows)) {
      entries.push_back(
          {{origin == nullptr ? name : origin->front().key, dtype, shape},
           &tensor,
           0});
      return absl::OkStatus();
    }
    int64_t begin = 0;
    bool fits = !origin->empty();
    for (const KeyPart& part : *origin) {
      fits = fits && part.rows >= 0 && part.rows <= rows - begin;
      if (!fits) break;
      shape[0] = part.rows;
      entries.push_back({{part.key, dtype, shape}, &tensor, begin});
      begin += part.rows;
    }
    if (fits && begin == rows) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        name, " has ", std::max<int64_t>(rows, 0), " rows, and its origins ",
        absl::StrJoin(*origin, " + ",
                      [](std::string* out, const KeyPart& part) {
                        absl::StrAppend(out, part.rows, " (",
                                        config::Printable(part.key), ")");
                      })));
  }

  absl::Status DivideIntoFiles(std::vector<Entry> entries) {
    std::set<absl::string_view> keys;
    for (const Entry& entry : entries) {
      if (!keys.insert(entry.spec.name).second) {
        return absl::InvalidArgumentError(
            absl::StrCat("two tensors would be written under the key ",
                         config::Printable(entry.spec.name), ", one of them ",
                         entry.tensor->names.front()));
      }
    }
    int64_t file_bytes = 0;
    for (Entry& entry : entries) {
      int64_t bytes = TensorDtypeBits(entry.spec.dtype) / 8;
      for (const int64_t size : entry.spec.shape) bytes *= size;
      if (files_.empty() ||
          (file_bytes + bytes > options_.max_file_bytes && file_bytes > 0)) {
        files_.emplace_back();
        file_bytes = 0;
      }
      files_.back().push_back(std::move(entry));
      file_bytes += bytes;
      total_bytes_ += bytes;
    }
    if (files_.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("nothing is left to be saved to ", folder_));
    }
    for (std::vector<Entry>& file : files_) {
      std::sort(file.begin(), file.end(), [](const Entry& a, const Entry& b) {
        return IsWrittenBefore(a.spec, b.spec);
      });
    }
    return absl::OkStatus();
  }

  std::vector<std::string> AgreementLines() const {
    std::vector<std::string> lines = {folder_};
    for (size_t i = 0; i < files_.size(); ++i) {
      lines.push_back(absl::CHexEscape(FileName(i)));
      for (const Entry& entry : files_[i]) {
        lines.push_back(absl::StrCat(absl::CHexEscape(entry.spec.name), " [",
                                     absl::StrJoin(entry.spec.shape, ", "),
                                     "] from row ", entry.begin, " of ",
                                     internal::DescribeShards(*entry.tensor)));
        const SaveTransform* const transform =
            Find(options_.transforms, *entry.tensor);
        if (transform == nullptr) continue;
        absl::StrAppend(&lines.back(), ", transformed");
        for (const std::string& name : transform->inputs) {
          absl::StrAppend(&lines.back(), " with ",
                          internal::DescribeShards(*by_name_.at(name)));
        }
      }
    }
    return lines;
  }

  std::string FileName(size_t index) const {
    if (files_.size() == 1) return options_.file_stem + ".safetensors";
    return absl::StrFormat("%s-%05d-of-%05d.safetensors", options_.file_stem,
                           index + 1, files_.size());
  }

  std::vector<TensorSpec> SpecsOf(size_t index) const {
    std::vector<TensorSpec> specs;
    for (const Entry& entry : files_[index]) specs.push_back(entry.spec);
    return specs;
  }

  // Makes the folder, if it has room for everything.
  absl::Status Begin() {
    if (!IsWriter()) return absl::OkStatus();
    LORA_ASSIGN_OR_RETURN(internal::NewFolder new_folder,
                          internal::NewFolder::Create(folder_));
    new_folder_.emplace(std::move(new_folder));
    uint64_t bytes = 0;
    if (files_.size() > 1) {
      LORA_ASSIGN_OR_RETURN(index_text_, IndexText());
      bytes += index_text_.size();
    }
    for (size_t i = 0; i < files_.size(); ++i) {
      LORA_ASSIGN_OR_RETURN(const uint64_t file_bytes,
                            SafetensorsFileSize(SpecsOf(i), options_.metadata));
      bytes += file_bytes;
    }
    return new_folder_->CheckSpace(bytes);
  }

  absl::StatusOr<std::string> IndexText() const {
    internal::SafetensorsIndex index;
    index.total_size = total_bytes_;
    for (size_t i = 0; i < files_.size(); ++i) {
      for (const Entry& entry : files_[i]) {
        index.weight_map[entry.spec.name] = FileName(i);
      }
    }
    return internal::SafetensorsIndexJson(index);
  }

  absl::Status SaveFile(size_t index) {
    std::optional<SafetensorsWriter> writer;
    LORA_RETURN_IF_ERROR(Agree([&]() -> absl::Status {
      if (!IsWriter()) return absl::OkStatus();
      LORA_ASSIGN_OR_RETURN(writer, SafetensorsWriter::Create(
                                        new_folder_->PathOf(FileName(index)),
                                        SpecsOf(index), options_.metadata));
      return absl::OkStatus();
    }));
    for (const Entry& entry : files_[index]) {
      std::vector<RowGathering> gatherings;
      LORA_RETURN_IF_ERROR(Agree([&] {
        gatherings = GatheringsOf(entry);
        return absl::OkStatus();
      }));
      // Agreeing after each tensor keeps a rank that has none of the next ones
      // from waiting for them longer than a collective may.
      LORA_RETURN_IF_ERROR(Agree([&]() -> absl::Status {
        std::vector<at::Tensor> tensors;
        for (RowGathering& gathering : gatherings) {
          LORA_ASSIGN_OR_RETURN(tensors.emplace_back(), gathering.Run());
        }
        if (!IsWriter()) return absl::OkStatus();
        LORA_ASSIGN_OR_RETURN(const at::Tensor value,
                              ValueOf(entry, std::move(tensors)));
        return writer->Append(absl::string_view(
            static_cast<const char*>(value.const_data_ptr()), value.nbytes()));
      }));
    }
    return Agree(
        [&] { return IsWriter() ? writer->Finish() : absl::OkStatus(); });
  }

  // What the values of `entry` take: its rows or, for a transform, all of the
  // tensor and of each input.
  std::vector<RowGathering> GatheringsOf(const Entry& entry) const {
    const DeviceMesh* const mesh = options_.mesh.get();
    const SaveTransform* const transform =
        Find(options_.transforms, *entry.tensor);
    std::vector<RowGathering> gatherings;
    if (transform == nullptr) {
      gatherings.emplace_back(mesh, *entry.tensor, entry.begin,
                              entry.spec.shape);
      return gatherings;
    }
    gatherings.emplace_back(mesh, *entry.tensor, 0,
                            entry.tensor->GlobalShape());
    for (const std::string& name : transform->inputs) {
      const ModelTensor& input = *by_name_.at(name);
      gatherings.emplace_back(mesh, input, 0, input.GlobalShape());
    }
    return gatherings;
  }

  // The values of `entry`, contiguous on the CPU, from what was gathered.
  absl::StatusOr<at::Tensor> ValueOf(const Entry& entry,
                                     std::vector<at::Tensor> tensors) const {
    const SaveTransform* const transform =
        Find(options_.transforms, *entry.tensor);
    const at::Tensor value = tensors.front();
    if (transform == nullptr) return value;
    tensors.erase(tensors.begin());
    at::Tensor transformed;
    try {
      transformed = transform->apply(value, tensors);
    } catch (const std::exception& error) {
      return absl::InternalError(
          absl::StrCat("the transform of ", entry.tensor->names.front(),
                       " threw: ", internal::ErrorMessage(error)));
    }
    if (!transformed.defined() || transformed.sizes() != value.sizes() ||
        transformed.scalar_type() != value.scalar_type()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the transform of ", entry.tensor->names.front(), " gave ",
          transformed.defined()
              ? DescribeTensor(transformed.scalar_type(), transformed.sizes())
              : "an undefined tensor",
          " and not ", DescribeTensor(value.scalar_type(), value.sizes())));
    }
    const at::Tensor on_cpu = internal::Dense(transformed.detach(), at::kCPU);
    if (on_cpu.dim() == 0) return on_cpu;
    return on_cpu.narrow(0, entry.begin, entry.spec.shape[0]);
  }

  absl::Status Finish() {
    if (!IsWriter()) return absl::OkStatus();
    if (files_.size() > 1) {
      LORA_RETURN_IF_ERROR(new_folder_->WriteText(
          options_.file_stem + ".safetensors.index.json", index_text_));
    }
    return new_folder_->MoveIntoPlace();
  }

  const torch::nn::Module& model_;
  const std::string& folder_;
  const SaveCheckpointOptions& options_;
  c10d::ProcessGroup* const group_;  // Null without a mesh.
  const int64_t rank_;

  std::vector<ModelTensor> tensors_;
  std::map<std::string, const ModelTensor*> by_name_;
  std::vector<std::vector<Entry>> files_;  // In the order of their bytes.
  int64_t total_bytes_ = 0;
  // On the writer alone.
  std::optional<internal::NewFolder> new_folder_;
  std::string index_text_;  // Empty for a single file.
};

}  // namespace

absl::Status SaveCheckpoint(const torch::nn::Module& model,
                            const std::string& folder,
                            const SaveCheckpointOptions& options) {
  RECORD_FUNCTION("trainer_lora::save_checkpoint", {});
  const at::NoGradGuard no_grad;
  return Saver(model, folder, options).Save();
}

}  // namespace trainer_lora::distributed
