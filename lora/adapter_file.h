// Saves and loads adapters in the format of the Python library PEFT: a folder
// with adapter_model.safetensors and adapter_config.json.
//
//   if (mesh->rank() == 0) {
//     LORA_RETURN_IF_ERROR(SaveAdapter(*model, "out/adapter"));
//   }
//
// Or, for layers that are split over ranks, by all of them together:
//
//   SaveAdapterOptions options;
//   options.mesh = mesh;
//   options.layouts = TensorParallelLayouts(*model);
//   LORA_RETURN_IF_ERROR(SaveAdapter(*model, "out/adapter", options));
//
// In Python:
//
//   from peft import PeftModel
//   model = PeftModel.from_pretrained(base_model, "out/adapter")
#ifndef TRAINER_LORA_LORA_ADAPTER_FILE_H_
#define TRAINER_LORA_LORA_ADAPTER_FILE_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "config/language_version.h"
#include "distributed/device_mesh.h"
#include "distributed/state_layout.h"
#include "lora/lora_adapter.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// What is saved, and what adapter_config.json says of it.
struct SaveAdapterOptions {
  // Where the base model is to be found; null in the file if it is empty.
  std::string base_model_name_or_path;
  // One of PEFT's, such as "CAUSAL_LM" or "FEATURE_EXTRACTION"; null in the
  // file if it is empty.
  std::string task_type;
  // Which of the model's adapters; a file has one, without its name.
  std::string adapter_name = kDefaultAdapter;
  // The ranks that save together; null: this process alone.
  std::shared_ptr<const distributed::DeviceMesh> mesh = nullptr;
  // What each rank holds, by the names of the model's parameters, over the
  // ranks of `mesh`: those of TensorParallelLayouts(), or of a sharded load. A
  // parameter without one is whole on every rank.
  distributed::StateLayouts layouts = {};
};

// Writes the adapters of `model`, in their dtype, to the new folder `folder`,
// whose parent must exist. The folder is written aside and renamed: it appears
// whole or not at all. Without a mesh one rank calls, as all hold the same.
// With one, the call is collective: rank 0 writes, with room for the whole
// adapter, and an error on one rank is the same error on all.
//
// Layers of another LoRA rank or alpha than the first are entries of
// rank_pattern and alpha_pattern. Adapters that have started from their base
// weight (PiSSA, OLoRA) are written for the original one, with twice the rank,
// by the process in which they started.
//   kAlreadyExists       something is at `folder`
//   kInvalidArgument     layouts don't fit the model, or there is none for a
//                        layer that is split over ranks; a text of the options
//                        is not UTF-8
//   kFailedPrecondition  the model has no adapter; a factor is on the meta
//                        device, or of another shape than its layout says; the
//                        ranks differ in what they save; an adapter has started
//                        from its base weight in another process
//   kUnimplemented       a layout for an adapter that has started from its base
//                        weight
//   kUnavailable, kResourceExhausted, kDeadlineExceeded
//                        the folder cannot be written; a peer is lost
// If a peer is lost after the rename, before the ranks agree, or if the last
// step fails, flushing the parent, the complete folder is in its place in spite
// of the error.
absl::Status SaveAdapter(const torch::nn::Module& model,
                         const std::string& folder,
                         const SaveAdapterOptions& options = {});

// Where the adapter goes.
struct LoadAdapterOptions {
  // Into which of the model's adapters.
  std::string adapter_name = kDefaultAdapter;
  // The ranks that load together; null: this process alone.
  std::shared_ptr<const distributed::DeviceMesh> mesh = nullptr;
  // What each rank holds, as in SaveAdapterOptions.
  distributed::StateLayouts layouts = {};
};

// Reads `folder` into the adapters of `model`, on which EnableLoraTraining()
// was called, converting to their dtype and device. Each rank reads the whole
// files, and keeps its part. With a mesh, an error on one rank is the same
// error on all. After an error the model is as it was:
//   kNotFound            the folder or one of its files is missing
//   kDataLoss            a file is broken
//   kInvalidArgument     the adapter is not one for this model: a tensor is
//                        missing, unexpected or of another shape (all are
//                        named); layouts as in SaveAdapter()
//   kFailedPrecondition  the LoRA rank or alpha of a layer or the kind of
//                        adapter differ from the model's, the model has no
//                        adapter, or one that starts from the base weights, or
//                        a layer of it is merged (UnmergeAdapters first), or a
//                        factor is expanded or was made in inference mode
absl::Status LoadAdapter(torch::nn::Module& model, const std::string& folder,
                         const LoadAdapterOptions& options = {});

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_ADAPTER_FILE_H_
