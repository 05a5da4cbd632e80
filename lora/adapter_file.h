// Saves and loads adapters in the format of the Python library PEFT: a folder
// with adapter_model.safetensors and adapter_config.json.
//
//   if (mesh->rank() == 0) {
//     LORA_RETURN_IF_ERROR(SaveAdapter(*model, "out/adapter"));
//   }
//
// In Python:
//
//   from peft import PeftModel
//   model = PeftModel.from_pretrained(base_model, "out/adapter")
#ifndef TRAINER_LORA_LORA_ADAPTER_FILE_H_
#define TRAINER_LORA_LORA_ADAPTER_FILE_H_

#include <string>

#include "absl/status/status.h"
#include "config/language_version.h"
#include "lora/lora_adapter.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::lora {

// What adapter_config.json says of the model; empty entries become null.
struct SaveAdapterOptions {
  // Where the base model is to be found.
  std::string base_model_name_or_path;
  // One of PEFT's, such as "CAUSAL_LM" or "FEATURE_EXTRACTION".
  std::string task_type;
  // Which of the model's adapters; a file has one, without its name.
  std::string adapter_name = kDefaultAdapter;
};

// Writes the adapters of `model`, in their dtype, to the new folder `folder`,
// whose parent must exist. The folder is written aside and renamed: it appears
// whole or not at all. With several ranks one calls, as all hold the same.
// Layers of another LoRA rank or alpha than the first are entries of
// rank_pattern and alpha_pattern.
// Adapters that have started from their base weight (PiSSA, OLoRA) are written
// for the original one, with twice the rank. kAlreadyExists if something is at
// `folder`; kFailedPrecondition if the model has no adapter, or a factor is on
// the meta device; kUnimplemented for a layer that is split over ranks;
// kUnavailable or kResourceExhausted if the folder cannot be written.
absl::Status SaveAdapter(const torch::nn::Module& model,
                         const std::string& folder,
                         const SaveAdapterOptions& options = {});

// Reads `folder` into the adapters of `model`, on which EnableLoraTraining()
// was called, converting to their dtype and device. After an error the model is
// as it was:
//   kNotFound            the folder or one of its files is missing
//   kDataLoss            a file is broken
//   kInvalidArgument     the adapter is not one for this model: a tensor is
//                        missing, unexpected or of another shape (all are
//                        named)
//   kFailedPrecondition  the LoRA rank or alpha of a layer or the kind of
//                        adapter differ from the model's, or the model has no
//                        adapter
absl::Status LoadAdapter(torch::nn::Module& model, const std::string& folder,
                         const std::string& adapter_name = kDefaultAdapter);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_ADAPTER_FILE_H_
