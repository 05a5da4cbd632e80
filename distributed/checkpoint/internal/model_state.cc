#include "distributed/checkpoint/internal/model_state.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/device_mesh.h"
#include "distributed/state_layout.h"
#include "distributed/tensor_slice.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed::internal {

std::vector<int64_t> ModelTensor::GlobalShape() const {
  return layout == nullptr ? tensor.sizes().vec() : layout->global_shape;
}

std::vector<TensorSlice> ModelTensor::SlicesOf(int64_t rank) const {
  if (layout == nullptr) return {TensorSlice::Whole(tensor.sizes())};
  return layout->SlicesOf(rank);
}

std::vector<int64_t> ModelTensor::LocalShape() const {
  return layout == nullptr ? tensor.sizes().vec() : layout->LocalShape();
}

std::vector<ModelTensor> ListTensors(const torch::nn::Module& model,
                                     const StateLayouts& layouts) {
  std::vector<ModelTensor> tensors;
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    const auto [found, is_new] =
        known.try_emplace(tensor.unsafeGetTensorImpl(), tensors.size());
    if (is_new) tensors.push_back({{}, tensor, nullptr});
    ModelTensor& entry = tensors[found->second];
    entry.names.push_back(name);
    if (entry.layout != nullptr) return;
    const auto layout = layouts.find(name);
    if (layout != layouts.end()) entry.layout = &layout->second;
  };
  for (const auto& item : model.named_parameters()) {
    add(item.key(), item.value());
  }
  for (const auto& item : model.named_buffers()) add(item.key(), item.value());
  return tensors;
}

absl::Status CheckLayouts(const std::vector<ModelTensor>& tensors,
                          const DeviceMesh* mesh, const StateLayouts& layouts) {
  if (mesh == nullptr && !layouts.empty()) {
    return absl::InvalidArgumentError("layouts need a mesh, which is null");
  }
  std::unordered_set<std::string> names;
  for (const ModelTensor& tensor : tensors) {
    names.insert(tensor.names.begin(), tensor.names.end());
  }
  for (const auto& [name, layout] : layouts) {
    if (names.count(name) == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("there is a layout for ", name,
                       ", which is no parameter or buffer of the model"));
    }
    if (absl::Status status = layout.Validate(); !status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": ", status.message()));
    }
    const DeviceMesh& own_mesh = *layout.layout.mesh;
    if (own_mesh.size() != mesh->size() || own_mesh.rank() != mesh->rank()) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": its layout is over ", own_mesh.RankString(),
                       ", which has not the ranks of ", mesh->RankString()));
    }
  }
  return absl::OkStatus();
}

std::string DescribeTensor(at::ScalarType dtype, at::IntArrayRef shape) {
  const std::optional<TensorDtype> name = ToTensorDtype(dtype);
  return absl::StrCat(
      name.has_value() ? TensorDtypeName(*name) : c10::toString(dtype), " [",
      absl::StrJoin(shape, ", "), "]");
}

std::string DescribeShards(const ModelTensor& tensor) {
  std::string text = absl::StrCat(
      tensor.names.front(), " (",
      DescribeTensor(tensor.tensor.scalar_type(), tensor.GlobalShape()));
  if (const StateLayout* layout = tensor.layout; layout != nullptr) {
    absl::StrAppend(&text, ", ", layout->layout.mesh->ToString(), " ",
                    layout->layout.ToString());
  }
  return absl::StrCat(text, ")");
}

}  // namespace trainer_lora::distributed::internal
