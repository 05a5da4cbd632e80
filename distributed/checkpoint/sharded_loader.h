// Loads a checkpoint into a model: each rank its own shards, through mapping
// and aliases, and what the checkpoint lacks from an initializer.
//
//   // The model is on the meta device, its adapters in place.
//   LoadCheckpointOptions options;
//   options.mesh = mesh;
//   options.layouts = ShardedLayouts(
//       *model, mesh, {Placement::Replicate(), Placement::Shard(0)});
//   options.aliases = training.checkpoint_key_aliases;
//   options.missing_parameter_initializer =
//       training.missing_parameter_initializer;
//   absl::StatusOr<LoadCheckpointReport> report =
//       LoadCheckpoint(*model, "models/wan/transformer", options);
//   if (!report.ok()) return report.status();
//
// Without mesh and layouts the process loads all of the model by itself.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/core/Device.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/load_plan.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/device_mesh.h"
#include "distributed/state_layout.h"
#include "torch/nn/module.h"

namespace trainer_lora::distributed {

// How far this rank is with its data.
struct LoadProgress {
  // Of tensor data, that this rank has so far.
  int64_t bytes_done = 0;
  // That it gets in all.
  int64_t bytes_total = 0;
  // From the mean rate so far.
  absl::Duration time_left = absl::InfiniteDuration();
};

// What a load goes by. With a mesh, alike on every rank.
struct LoadCheckpointOptions {
  // From the checkpoint's keys to the model's names. Prefixes of wrappers need
  // no rule (see key_resolver.h).
  StateDictMapping mapping;
  // From the names that `mapping` gives to those that the model has by now:
  // LoraTraining::checkpoint_key_aliases.
  KeyAliases aliases;

  // Asked for each parameter and buffer that the checkpoint lacks; may be null.
  MissingParameterInitializer missing_parameter_initializer;

  // Regular expressions (RE2). A checkpoint key that one of them matches from
  // end to end is treated as if it were not there.
  std::vector<std::string> ignored_patterns;

  // Regular expressions (RE2). A parameter or buffer whose name one of them
  // matches from end to end becomes zero if the checkpoint lacks it, and the
  // initializer does not know it.
  std::vector<std::string> zero_patterns;

  // Whether a key that the model has no place for is an error, or a warning.
  // A parameter that gets no value is an error either way.
  bool strict = true;

  // Where parameters and buffers that are on the meta device go. All others
  // stay where they are.
  c10::Device device = c10::kCPU;

  // The ranks that load together; null: this process alone.
  std::shared_ptr<const DeviceMesh> mesh;

  // What each rank holds, on meshes of the same ranks as `mesh`. Of a tensor
  // with several names the first that has a layout counts; without one the
  // tensor is whole on every rank.
  StateLayouts layouts;

  // Dimensions of `mesh`. The ranks that differ in these alone read each byte
  // once and send it on, for file systems that are slower than the network:
  // all dimensions for once in the world, those within a node for once a node.
  // `mesh` must have a group over them (DeviceMesh::GroupOver), with a backend
  // for the CPU. Empty: every rank reads what it needs.
  std::vector<int64_t> read_once_dims;

  // The threads that read, where every rank reads for itself. At least 1.
  int num_threads = 4;

  // Called by one thread at a time, but not always by the same, some ten times
  // a second and when all is read; may be null.
  std::function<void(const LoadProgress&)> progress;
};

// What became of the model's tensors and the checkpoint's keys. A tensor that
// the model holds under several names is here once, under the first.
struct LoadCheckpointReport {
  std::vector<std::string> loaded;       // Model names, in the model's order.
  std::vector<std::string> initialized;  // Model names, in the model's order.
  std::vector<std::string> zeroed;       // Model names, in the model's order.
  std::vector<std::string> ignored;      // Checkpoint keys, in file order.
  std::vector<std::string> unexpected;   // Checkpoint keys; empty when strict.
  // The keys of the loaded tensors, by model name: what a saver needs to write
  // them back under the checkpoint's names.
  std::map<std::string, std::vector<KeyPart>> origins;
  int64_t bytes_read = 0;  // Of tensor data, from files, by this rank.
};

// Gives every parameter and buffer of `model` the value that the checkpoint at
// `path` (as SafetensorsCheckpoint::Open takes it) holds for it, or else the
// initializer's, or zeros. Only this rank's part is read, straight into the
// parameter's memory where type and layout allow; floating point types are
// converted into one another. A tensor on the meta device, of its global shape,
// gets memory and the shape of this rank's part (see meta_device.h): a module's
// typed handles stay valid, dtype and requires_grad stay as they were. One that
// has memory must have the shape of the part. If the checkpoint has several
// keys for one tensor of the model (a shared layer), one of them is enough, and
// the first in the file is read. Keys that end in "_extra_state" are left out
// with a warning.
//
// The whole load is planned before any data is read. With a mesh the call is
// collective, and an error on one rank is the same error on all. These leave
// the model untouched:
//   kInvalidArgument     a pattern is no regular expression, or mesh and
//                        layouts don't fit each other or the model
//   kNotFound            there is no such file
//   kDataLoss            a file is broken
//   kFailedPrecondition  checkpoint and model don't fit; one message lists all
//                        keys and names that are unexpected, missing, given
//                        twice, or of the wrong shape or type, or can't be
//                        written (made in inference mode, or expanded). Or the
//                        ranks have other models or checkpoints
//   kUnimplemented       read_once_dims over a group without a CPU backend
//   kResourceExhausted   no memory is left for the parameters
//   kUnavailable, kDeadlineExceeded  a peer is lost or does not answer
//   kInternal            the initializer threw
// An error while data is read leaves tensors on meta as they are; others hold
// anything then, as the message says; kInternal, too, if a callback threw.
//
// Beyond the parameters themselves a load takes a few MiB a thread, and room
// for a parameter that the initializer makes. With read_once_dims it takes
// 2 MiB for each rank of the group, of 16 of them at most (more where ranks
// share parts of a fused tensor), and keeps the plans of all its ranks: some
// 150 bytes for each tensor of each. Must not run while a MetaDeviceGuard lives
// in this thread, or while another thread uses the model.
absl::StatusOr<LoadCheckpointReport> LoadCheckpoint(
    torch::nn::Module& model, const std::string& path,
    const LoadCheckpointOptions& options);

// The plan of such a load on this rank, for people to read. Reads the headers
// alone, and makes no collective. Errors as above; kInternal if the initializer
// throws.
absl::StatusOr<std::string> DescribeLoad(const torch::nn::Module& model,
                                         const std::string& path,
                                         const LoadCheckpointOptions& options);

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_SHARDED_LOADER_H_
