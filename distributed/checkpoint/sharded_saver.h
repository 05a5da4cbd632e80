// Writes a model whose tensors are spread over ranks as one checkpoint, under
// the names that it came with:
//
//   SaveCheckpointOptions options;
//   options.mesh = mesh;
//   options.layouts = layouts;          // Those of the load.
//   options.origins = report.origins;   // LoadCheckpoint() gave them.
//   options.left_out = {"in.lora_A", "in.lora_B"};
//   absl::Status status = SaveCheckpoint(*model, "out/merged", options);
//
// In Python: from_pretrained("out/merged") of transformers, or of diffusers
// with a file_stem of "diffusion_pytorch_model"; the configuration's JSON files
// are the caller's to add.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_SAVER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_SAVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "config/language_version.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/device_mesh.h"
#include "distributed/state_layout.h"

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace trainer_lora::distributed {

// What is written in place of a tensor.
struct SaveTransform {
  // Names of further parameters and buffers of the model that it takes.
  std::vector<std::string> inputs;
  // From the whole tensor and the whole inputs, which are on the CPU and not to
  // be changed, the tensor to write: of the same shape and dtype. Called on
  // rank 0 alone, without autograd; more than once for a tensor that is written
  // in several parts. May throw.
  std::function<at::Tensor(const at::Tensor& value,
                           const std::vector<at::Tensor>& inputs)>
      apply;
};

// What is written, and how.
struct SaveCheckpointOptions {
  // The ranks that save together; null: this process alone.
  std::shared_ptr<const DeviceMesh> mesh;

  // What each rank holds, as in LoadCheckpointOptions. Of a tensor without a
  // layout rank 0's is written.
  StateLayouts layouts;

  // Under which keys a tensor is written, by its name: those that it was loaded
  // from. One of several keys gets its rows. A tensor that is not here is
  // written under its own name.
  std::map<std::string, std::vector<KeyPart>> origins;

  // By name.
  std::map<std::string, SaveTransform> transforms;

  // Names that are not written.
  std::set<std::string> left_out;

  // Of tensor data. A file has at least one tensor, however large.
  int64_t max_file_bytes = 5'000'000'000;

  // The name of the one file is <stem>.safetensors; several are
  // <stem>-00001-of-00002.safetensors and so on, beside the index
  // <stem>.safetensors.index.json. Neither empty nor with a slash.
  std::string file_stem = "model";

  // Of each file. The default is what transformers asks for.
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

// Writes the parameters and buffers of `model`, each once (a shared one under
// its first name), in their dtypes to the new folder `folder`, whose parent
// must exist. The folder is written aside and renamed: it appears whole or not
// at all. With a mesh the call is collective: rank 0 writes, and gets one
// tensor after the other from the ranks that hold it; it alone needs room for a
// whole tensor, twice that for one that is not sharded along dimension 0, and
// the inputs of its transform. An error on one rank is the same error on all:
//   kInvalidArgument     layouts, origins, transforms or names left out don't
//                        fit the model; two tensors get one key; a key or an
//                        entry of the metadata is not UTF-8; a bad file_stem
//   kAlreadyExists       something is at `folder`
//   kFailedPrecondition  a tensor is on the meta device, of another shape than
//                        its layout says, or of a type that files don't have;
//                        the ranks differ in what they save; a transform gave
//                        another shape or type
//   kResourceExhausted   the file system has too little room, which is checked
//                        before anything is written
//   kUnavailable, kDeadlineExceeded  the folder can't be written; a peer is
//                        lost or does not answer
//   kInternal            a transform threw
// If a peer is lost after the rename, before the ranks agree, or if the last
// step fails, flushing the parent, the complete folder is in its place in spite
// of the error.
absl::Status SaveCheckpoint(const torch::nn::Module& model,
                            const std::string& folder,
                            const SaveCheckpointOptions& options);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_SAVER_H_
