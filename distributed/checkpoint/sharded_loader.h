// Loads a checkpoint into a model, through key aliases, and gives what the
// checkpoint lacks to an initializer.
//
//   LoadCheckpointOptions options;
//   options.aliases = training.checkpoint_key_aliases;
//   options.missing_parameter_initializer =
//       training.missing_parameter_initializer;
//   options.ignored_patterns = {R"(pooler\..*)"};
//   absl::StatusOr<LoadCheckpointReport> report =
//       LoadCheckpoint(*model, "model.safetensors", options);
//   if (!report.ok()) return report.status();
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "c10/core/Device.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {

struct LoadCheckpointOptions {
  // From the checkpoint's keys to the model's names.
  KeyAliases aliases;

  // Asked for each parameter and buffer that the checkpoint lacks; may be null.
  MissingParameterInitializer missing_parameter_initializer;

  // Regular expressions (RE2). A checkpoint key that one of them matches from
  // end to end is treated as if it were not there.
  std::vector<std::string> ignored_patterns;

  // Whether a key that the model has no place for is an error, or a warning.
  // A parameter that gets no value is an error either way.
  bool strict = true;

  // Where parameters and buffers that are on the meta device go. All others
  // stay where they are.
  c10::Device device = c10::kCPU;
};

// What became of the model's tensors and the checkpoint's keys. A tensor that
// the model holds under several names is here once, under the first.
struct LoadCheckpointReport {
  std::vector<std::string> loaded;       // Model names, in the model's order.
  std::vector<std::string> initialized;  // Model names, in the model's order.
  std::vector<std::string> ignored;      // Checkpoint keys, in file order.
  std::vector<std::string> unexpected;   // Checkpoint keys; empty when strict.
  int64_t bytes_read = 0;                // Of tensor data.
};

// Gives every parameter and buffer of `model` the value that `path`, a
// safetensors file, holds for it, or else the initializer's. Each rank loads
// whole tensors. Values go straight into the parameter's memory where type and
// layout allow; floating point types are converted into one another. Tensors on
// the meta device are materialized in place (see meta_device.h), so a module's
// typed handles stay valid, and requires_grad stays as it was. If the
// checkpoint has several keys for one tensor of the model (a shared layer), one
// of them is enough, and the first in the file is read.
//
// The whole load is planned before any data is read. These leave the model
// untouched:
//   kInvalidArgument     a pattern is not a regular expression
//   kNotFound            there is no such file
//   kDataLoss            the file is broken
//   kFailedPrecondition  checkpoint and model don't fit; one message lists all
//                        keys and names that are unexpected, missing, given
//                        twice, or of the wrong shape or type
// kDataLoss for a failure to read afterwards: if the model had memory already
// it is partly loaded then, as the message says; tensors on meta stay there.
//
// Must not run while a MetaDeviceGuard lives in this thread, or while another
// thread uses the model.
absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
    torch::nn::Module& model, const std::string& path,
    const LoadCheckpointOptions& options);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_
