#include "lora/adapter_file.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "c10/core/GradMode.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/gather_rows.h"
#include "distributed/checkpoint/internal/model_state.h"
#include "distributed/checkpoint/internal/new_folder.h"
#include "distributed/checkpoint/internal/read_file.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/write_problem.h"
#include "distributed/tensor_slice.h"
#include "lora/internal/adapter_config.h"
#include "lora/layer_replacement.h"
#include "lora/lora_adapter.h"
#include "lora/tensor_parallel_layouts.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::distributed::DeviceMesh;
using ::trainer_lora::distributed::internal::AgreedStep;
using ::trainer_lora::distributed::internal::ModelTensor;
using ::trainer_lora::distributed::internal::RowGathering;

using Step = std::function<absl::Status()>;

constexpr char kTensorFile[] = "adapter_model.safetensors";
constexpr char kConfigFile[] = "adapter_config.json";

// A parameter, the shape that all of it has in PEFT's file, and its key there.
struct FileTensor {
  std::string key;
  std::vector<int64_t> shape;
  ModelTensor parameter;
};

// An adapted layer of a model.
struct AdapterEntry {
  std::string layer_name;
  LoraAdapterOptions options;
};

// The adapters of one name of a model, at least one.
struct Adapters {
  const LoraAdapterOptions& first() const { return layers.front().options; }

  std::vector<AdapterEntry> layers;
  std::vector<FileTensor> tensors;
};

// A parameter as PEFT has it. Factors are modules of their own there, but for
// those of embeddings.
FileTensor ToFile(const std::string& layer_name, std::string name,
                  ModelTensor parameter, const LoraAdapter& adapter) {
  std::vector<int64_t> shape = parameter.GlobalShape();
  if (name == "lora_magnitude") {
    name = "lora_magnitude_vector";
    // That of a convolution can be broadcast against its output.
    if (adapter.lora_A.dim() > 2) {
      shape.insert(shape.begin(), 1);
      shape.resize(adapter.lora_A.dim(), 1);
    }
  } else if (name == "lora_A" || name == "lora_B") {
    name += ".weight";
  }
  return {absl::StrCat("base_model.model.", layer_name, ".", name),
          std::move(shape), std::move(parameter)};
}

// An adapter that starts from its base weight, as one for the original weight:
// s (B A - B0 A0) has twice the rank, and alpha so that s is the same.
LoraAdapter ForOriginalWeight(LoraAdapter adapter, const LoraAdapter& initial) {
  const auto cat = [](const at::Tensor& a, const at::Tensor& b, int64_t dim) {
    return at::cat({a.detach().to(at::kCPU), b}, dim);
  };
  adapter.lora_A = cat(adapter.lora_A, initial.lora_A, 0);
  adapter.lora_B = cat(adapter.lora_B, -initial.lora_B, 1);
  adapter.options.rank *= 2;
  adapter.options.alpha *= adapter.options.use_rslora ? std::sqrt(2.0) : 2.0;
  return adapter;
}

// The parameters of a model, by each of their names.
using Parameters = std::map<std::string, ModelTensor>;

absl::StatusOr<Parameters> ListParameters(
    const torch::nn::Module& model, const DeviceMesh* mesh,
    const distributed::StateLayouts& layouts) {
  const std::vector<ModelTensor> tensors =
      distributed::internal::ListTensors(model, layouts);
  LORA_RETURN_IF_ERROR(
      distributed::internal::CheckLayouts(tensors, mesh, layouts));
  Parameters parameters;
  for (const ModelTensor& tensor : tensors) {
    for (const std::string& name : tensor.names) parameters[name] = tensor;
  }
  return parameters;
}

enum class Purpose { kSave, kLoad };

// That all of a parameter can be had, by its layout, and be written to load it.
absl::Status CheckParameter(const ModelTensor& parameter, bool is_split,
                            Purpose purpose) {
  const std::string& name = parameter.names.front();
  if (!parameter.tensor.defined() || parameter.tensor.is_meta()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, " has no values yet: load the base weights first"));
  }
  if (is_split && parameter.layout == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        name,
        " is split over ranks, and has no layout in the options: give them the "
        "mesh and TensorParallelLayouts(model)"));
  }
  if (parameter.tensor.sizes() != at::IntArrayRef(parameter.LocalShape())) {
    return absl::FailedPreconditionError(absl::StrCat(
        name, " has the shape [", absl::StrJoin(parameter.tensor.sizes(), ", "),
        "], and [", absl::StrJoin(parameter.LocalShape(), ", "),
        "] by its layout"));
  }
  return purpose == Purpose::kLoad
             ? distributed::internal::CheckCanWrite(name, parameter.tensor)
             : absl::OkStatus();
}

absl::StatusOr<Adapters> CollectAdapters(
    const torch::nn::Module& model, const std::string& adapter_name,
    const DeviceMesh* mesh, const distributed::StateLayouts& layouts,
    Purpose purpose) {
  LORA_ASSIGN_OR_RETURN(const Parameters parameters,
                        ListParameters(model, mesh, layouts));
  const auto find = [&](const std::string& name) {
    const auto found = parameters.find(name);
    return found == parameters.end() ? ModelTensor{{name}, {}, nullptr}
                                     : found->second;
  };
  Adapters adapters;
  for (const auto& [name, layer] : LoraLayers(model)) {
    if (!layer->HasAdapter(adapter_name)) continue;
    if (purpose == Purpose::kLoad && layer->is_merged()) {
      return absl::FailedPreconditionError(absl::StrCat(
          name, " is merged: call UnmergeAdapters first, and load then"));
    }
    LoraAdapter adapter = layer->adapter(adapter_name);
    const LoraAdapter initial = layer->InitialFactors(adapter_name);
    std::vector<ModelTensor> tensors;
    for (const AdapterParameter& item :
         layer->AdapterParameters(adapter_name)) {
      tensors.push_back(find(absl::StrCat(name, ".", item.name)));
      LORA_RETURN_IF_ERROR(
          CheckParameter(tensors.back(), item.is_split, purpose));
      if (initial.lora_A.defined() && tensors.back().layout != nullptr) {
        return absl::UnimplementedError(absl::StrCat(
            name, ".", item.name,
            " has started from its base weight, by PiSSA or OLoRA, and has a "
            "layout: such adapters are saved whole"));
      }
    }
    if (config::StartsFromBase(adapter.options.initialization)) {
      if (purpose == Purpose::kLoad) {
        return absl::FailedPreconditionError(absl::StrCat(
            name,
            " starts from its base weight, by PiSSA or OLoRA, and a file is "
            "for the original one: load it into a model that was enabled with "
            "the default initialization and the rank of the file"));
      }
      if (!initial.lora_A.defined()) {
        return absl::FailedPreconditionError(absl::StrCat(
            name,
            " has its weight and its adapter, which started from it by PiSSA "
            "or OLoRA, from a checkpoint, which says nothing of the original "
            "weight: merge the adapter and save the model, or save the adapter "
            "in the process that starts it"));
      }
      adapter = ForOriginalWeight(std::move(adapter), initial);
      tensors[0].tensor = adapter.lora_A;
      tensors[1].tensor = adapter.lora_B;
    }
    const LoraLayer::FactorNames names = layer->factor_names();
    const std::vector<const char*> file_names = {names.lora_A, names.lora_B,
                                                 "lora_magnitude"};
    for (size_t i = 0; i < tensors.size(); ++i) {
      adapters.tensors.push_back(
          ToFile(name, file_names[i], std::move(tensors[i]), adapter));
    }
    adapters.layers.push_back({name, adapter.options});
  }
  if (adapters.layers.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the model has no LoRA adapter",
                     adapter_name == kDefaultAdapter
                         ? ""
                         : absl::StrCat(" of the name '", adapter_name, "'"),
                     ": call EnableLoraTraining first"));
  }
  const LoraAdapterOptions& first = adapters.first();
  for (const AdapterEntry& layer : adapters.layers) {
    if (layer.options.use_dora == first.use_dora &&
        layer.options.use_rslora == first.use_rslora) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        layer.layer_name, " has an adapter of another kind than ",
        adapters.layers.front().layer_name,
        ", which one file can't say: use_dora and use_rslora must be the same "
        "for all"));
  }
  const distributed::StateLayouts own_layouts = TensorParallelLayouts(model);
  for (const NamedParameter& bias : TrainedBiases(model, adapter_name)) {
    ModelTensor parameter = find(bias.name);
    const bool is_split = std::any_of(
        parameter.names.begin(), parameter.names.end(),
        [&](const std::string& name) {
          const auto own = own_layouts.find(name);
          return own != own_layouts.end() &&
                 own->second.LocalShape() != own->second.global_shape;
        });
    LORA_RETURN_IF_ERROR(CheckParameter(parameter, is_split, purpose));
    adapters.tensors.push_back({"base_model.model." + bias.name,
                                parameter.GlobalShape(), std::move(parameter)});
  }
  return adapters;
}

internal::AdapterDescription Describe(const Adapters& adapters,
                                      const SaveAdapterOptions& options) {
  internal::AdapterDescription description;
  for (const AdapterEntry& layer : adapters.layers) {
    description.layers.push_back(
        {layer.layer_name, layer.options.rank, layer.options.alpha});
  }
  description.dropout = adapters.first().dropout;
  description.bias = adapters.first().bias;
  description.use_dora = adapters.first().use_dora;
  description.use_rslora = adapters.first().use_rslora;
  description.base_model_name_or_path = options.base_model_name_or_path;
  description.task_type = options.task_type;
  return description;
}

// The tensors of the file, on rank 0; collective over `mesh`, if there is one.
// `agreed` takes a step whose error is that of all ranks.
absl::StatusOr<std::vector<at::Tensor>> GatherTensors(
    const Adapters& adapters, const DeviceMesh* mesh,
    const std::function<absl::Status(const Step&)>& agreed) {
  std::vector<at::Tensor> tensors;
  for (const FileTensor& item : adapters.tensors) {
    std::optional<RowGathering> gathering;
    LORA_RETURN_IF_ERROR(agreed([&] {
      gathering.emplace(mesh, item.parameter, /*begin=*/0,
                        item.parameter.GlobalShape());
      return absl::OkStatus();
    }));
    // Agreeing after each keeps a rank that has none of the next ones from
    // waiting for them longer than a collective may.
    LORA_RETURN_IF_ERROR(agreed([&]() -> absl::Status {
      LORA_ASSIGN_OR_RETURN(const at::Tensor whole, gathering->Run());
      if (whole.defined()) tensors.push_back(whole.view(item.shape));
      return absl::OkStatus();
    }));
  }
  return tensors;
}

absl::Status WriteTensors(const Adapters& adapters,
                          const std::vector<at::Tensor>& tensors,
                          const std::string& path) {
  std::vector<distributed::TensorView> views;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& key = adapters.tensors[i].key;
    const auto dtype = distributed::ToTensorDtype(tensors[i].scalar_type());
    if (!dtype.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          key, " is of type ", c10::toString(tensors[i].scalar_type()),
          ", which the file format does not have"));
    }
    views.push_back(
        {key, *dtype, tensors[i].sizes().vec(), tensors[i].const_data_ptr()});
  }
  return distributed::WriteSafetensors(path, views, {{"format", "pt"}});
}

absl::StatusOr<internal::AdapterConfig> ReadConfig(const std::string& path,
                                                   const Adapters& adapters) {
  LORA_ASSIGN_OR_RETURN(
      const std::string json,
      distributed::internal::ReadFile(path, internal::kMaxAdapterConfigBytes));
  std::vector<std::string> layer_names;
  for (const AdapterEntry& layer : adapters.layers) {
    layer_names.push_back(layer.layer_name);
  }
  auto config = internal::AdapterConfig::Parse(json, layer_names);
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      absl::StrCat(path, ": ", config.status().message()));
}

absl::Status CheckConfig(const internal::AdapterConfig& config,
                         const Adapters& adapters, const std::string& path) {
  for (const auto& [variant, file_has_it, model_has_it] :
       {std::make_tuple("use_dora", config.use_dora(),
                        adapters.first().use_dora),
        std::make_tuple("use_rslora", config.use_rslora(),
                        adapters.first().use_rslora)}) {
    if (file_has_it != model_has_it) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": the adapter was saved with ", variant,
          model_has_it ? ": false" : ": true", ", the model was enabled with ",
          model_has_it ? "true" : "false"));
    }
  }
  for (size_t i = 0; i < adapters.layers.size(); ++i) {
    const auto& [name, options] = adapters.layers[i];
    const double saved_rank = config.ranks()[i];
    const double saved_alpha = config.alphas()[i];
    if (saved_rank == options.rank && saved_alpha == options.alpha) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": the adapter of ", name, " was saved with rank ", saved_rank,
        " and alpha ", saved_alpha, ", the model was enabled with rank ",
        options.rank, " and alpha ", options.alpha));
  }
  return absl::OkStatus();
}

// Compares the tensors of a file with the model's; all differences in one
// error.
absl::Status CheckTensors(const distributed::SafetensorsFile& file,
                          const Adapters& adapters) {
  std::vector<std::string> problems;
  std::set<std::string> expected;
  const auto is_floating = [](distributed::TensorDtype dtype) {
    const auto scalar_type = distributed::ToScalarType(dtype);
    return scalar_type.has_value() && at::isFloatingType(*scalar_type);
  };
  for (const FileTensor& item : adapters.tensors) {
    expected.insert(item.key);
    const distributed::TensorInfo* info = file.Find(item.key);
    if (info == nullptr) {
      problems.push_back(absl::StrCat("missing: ", item.key));
    } else if (item.shape != info->shape) {
      problems.push_back(absl::StrCat(
          "of shape [", absl::StrJoin(info->shape, ", "), "] instead of [",
          absl::StrJoin(item.shape, ", "), "]: ", item.key));
    } else if (!is_floating(info->dtype)) {
      problems.push_back(absl::StrCat(
          "of type ", std::string(distributed::TensorDtypeName(info->dtype)),
          ": ", item.key));
    }
  }
  for (const distributed::TensorInfo& info : file.tensors()) {
    if (expected.count(info.name) == 0) {
      problems.push_back(
          absl::StrCat("unexpected: ", config::Printable(info.name)));
    }
  }
  if (problems.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(file.path(), " does not fit the adapters of the model:\n  ",
                   absl::StrJoin(problems, "\n  ")));
}

// What this rank holds of each parameter, from the file, as the parameter has
// it.
absl::StatusOr<std::vector<at::Tensor>> ReadTensors(
    const distributed::SafetensorsFile& file, const Adapters& adapters,
    int64_t rank) {
  std::vector<at::Tensor> tensors;
  for (const FileTensor& item : adapters.tensors) {
    const distributed::TensorInfo& info = *file.Find(item.key);
    at::Tensor whole =
        at::empty(info.shape, distributed::ToScalarType(info.dtype).value());
    LORA_RETURN_IF_ERROR(
        file.Read(info, 0,
                  absl::MakeSpan(static_cast<char*>(whole.mutable_data_ptr()),
                                 info.byte_size)));
    whole = whole.view(item.parameter.GlobalShape());
    std::vector<at::Tensor> slices;
    for (const distributed::TensorSlice& slice :
         item.parameter.SlicesOf(rank)) {
      slices.push_back(whole);
      for (int64_t dim = 0; dim < whole.dim(); ++dim) {
        slices.back() =
            slices.back().narrow(dim, slice.offsets[dim], slice.sizes[dim]);
      }
    }
    tensors.push_back((slices.size() == 1 ? slices[0] : at::cat(slices))
                          .to(item.parameter.tensor.options()));
  }
  return tensors;
}

}  // namespace

absl::Status SaveAdapter(const torch::nn::Module& model,
                         const std::string& folder,
                         const SaveAdapterOptions& options) {
  const c10::NoGradGuard no_grad;
  const DeviceMesh* const mesh = options.mesh.get();
  const auto agreed = [&](const Step& step) {
    return AgreedStep(mesh, absl::StrCat("saving of ", folder),
                      absl::StrCat("saving ", folder), step);
  };
  Adapters adapters;
  LORA_RETURN_IF_ERROR(agreed([&]() -> absl::Status {
    LORA_ASSIGN_OR_RETURN(adapters,
                          CollectAdapters(model, options.adapter_name, mesh,
                                          options.layouts, Purpose::kSave));
    return absl::OkStatus();
  }));
  if (mesh != nullptr) {
    std::vector<std::string> lines = {absl::CHexEscape(folder)};
    for (const FileTensor& item : adapters.tensors) {
      lines.push_back(distributed::internal::DescribeShards(item.parameter));
    }
    LORA_RETURN_IF_ERROR(distributed::internal::CheckRanksAgree(
        *mesh->group(), mesh->ToString(), "comparison of what is saved",
        lines));
  }
  LORA_ASSIGN_OR_RETURN(const std::vector<at::Tensor> tensors,
                        GatherTensors(adapters, mesh, agreed));
  return agreed([&]() -> absl::Status {
    if (mesh != nullptr && mesh->rank() != 0) return absl::OkStatus();
    LORA_ASSIGN_OR_RETURN(
        const std::string config,
        internal::AdapterConfigJson(Describe(adapters, options)));
    LORA_ASSIGN_OR_RETURN(distributed::internal::NewFolder new_folder,
                          distributed::internal::NewFolder::Create(folder));
    LORA_RETURN_IF_ERROR(
        WriteTensors(adapters, tensors, new_folder.PathOf(kTensorFile)));
    LORA_RETURN_IF_ERROR(new_folder.WriteText(kConfigFile, config));
    return new_folder.MoveIntoPlace();
  });
}

absl::Status LoadAdapter(torch::nn::Module& model, const std::string& folder,
                         const LoadAdapterOptions& options) {
  const c10::NoGradGuard no_grad;
  const DeviceMesh* const mesh = options.mesh.get();
  Adapters adapters;
  std::vector<at::Tensor> tensors;
  LORA_RETURN_IF_ERROR(AgreedStep(
      mesh, absl::StrCat("loading of ", folder),
      absl::StrCat("loading ", folder), [&]() -> absl::Status {
        LORA_ASSIGN_OR_RETURN(adapters,
                              CollectAdapters(model, options.adapter_name, mesh,
                                              options.layouts, Purpose::kLoad));
        const std::string config_path = absl::StrCat(folder, "/", kConfigFile);
        LORA_ASSIGN_OR_RETURN(const internal::AdapterConfig config,
                              ReadConfig(config_path, adapters));
        LORA_RETURN_IF_ERROR(CheckConfig(config, adapters, config_path));
        LORA_ASSIGN_OR_RETURN(const distributed::SafetensorsFile file,
                              distributed::SafetensorsFile::Open(
                                  absl::StrCat(folder, "/", kTensorFile)));
        LORA_RETURN_IF_ERROR(CheckTensors(file, adapters));
        LORA_ASSIGN_OR_RETURN(
            tensors,
            ReadTensors(file, adapters, mesh == nullptr ? 0 : mesh->rank()));
        return absl::OkStatus();
      }));
  // Nothing that could fail on one rank alone is left.
  for (size_t i = 0; i < tensors.size(); ++i) {
    adapters.tensors[i].parameter.tensor.copy_(tensors[i]);
  }
  return absl::OkStatus();
}

}  // namespace trainer_lora::lora
