// What loading a checkpoint will do, before a byte of its data is read: which
// bytes of which file go where, what is made anew, and everything that stands
// in the way.
//
//   LORA_ASSIGN_OR_RETURN(SafetensorsCheckpoint checkpoint,
//                         SafetensorsCheckpoint::Open("model.safetensors"));
//   std::vector<TargetTensor> targets = {
//       {{"in.weight"}, TensorDtype::kBF16, {8, 4}, {{{2, 0}, {2, 4}}}}};
//   LORA_ASSIGN_OR_RETURN(LoadPlan plan,
//                         MakeLoadPlan(targets, checkpoint.tensors(), {}));
//   std::cout << plan.ToString(targets, checkpoint.tensors());
//
// distributed/checkpoint/sharded_loader.h makes and executes one.
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_LOAD_PLAN_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_LOAD_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/tensor_slice.h"

namespace trainer_lora::distributed {

// A parameter or buffer of a model, and the part of it that a rank holds.
struct TargetTensor {
  // One for each place in the model that it hangs at; the first is used in
  // messages. Not empty.
  std::vector<std::string> names;
  // The type to which the checkpoint's elements are converted.
  TensorDtype dtype;
  // Over all ranks.
  std::vector<int64_t> global_shape;
  // What lies one after the other along dimension 0 of the rank's own,
  // row-major tensor; they differ in dimension 0 alone. Not empty.
  std::vector<TensorSlice> slices;
};

// The shape of the rank's own tensor.
std::vector<int64_t> LocalShape(const TargetTensor& target);

// What a checkpoint's keys stand for, and what may be missing.
struct LoadPlanOptions {
  // From the checkpoint's keys to the model's names. KeyResolver says how
  // wrappers' prefixes are treated.
  StateDictMapping mapping;
  // From the names that `mapping` gives to those that the model has by now.
  KeyAliases aliases;

  // Regular expressions (RE2). A key that one matches from end to end is
  // treated as if it were not there.
  std::vector<std::string> ignored_patterns;

  // Regular expressions (RE2). A target that the checkpoint lacks becomes zero
  // if one matches one of its names from end to end.
  std::vector<std::string> zero_patterns;

  // Whether a target that the checkpoint lacks can be made by its name; may be
  // null. Asked before zero_patterns.
  std::function<bool(absl::string_view name)> is_initializable;

  // Whether a key that the model has no place for is an error.
  bool strict = true;
};

// The elements of a source tensor that go to a target, as runs that are
// contiguous in both, in the order of their places in the file.
struct PlannedCopy {
  // A dimension over which runs repeat: `count` times, with these distances in
  // elements.
  struct Loop {
    // At least 2.
    int64_t count;
    // In the source.
    int64_t source_stride;
    // In the target's local tensor.
    int64_t local_stride;
  };

  // Where run `run`, in [0, num_runs), begins in the source: in elements from
  // its start.
  int64_t SourceBegin(int64_t run) const;
  // Where it begins in the target's local tensor, likewise.
  int64_t LocalBegin(int64_t run) const;

  // A read takes all from the beginning of run `begin` to the end of the run
  // before this one: one run, or several with what lies between them. Reads
  // follow each other from run 0 to num_runs.
  int64_t ReadEnd(int64_t begin) const;

  size_t source;            // An index into the checkpoint's tensors.
  size_t target;            // An index into the targets.
  int64_t source_begin;     // SourceBegin(0).
  int64_t local_begin;      // LocalBegin(0).
  int64_t run_elements;     // Of each run.
  int64_t num_runs;         // The product of the loops' counts.
  std::vector<Loop> loops;  // Outermost first.
  // The most runs that a read takes: 1 where the gaps are large.
  int64_t runs_per_read;
  // What all reads take together.
  uint64_t bytes_read;
};

// Where a target's value comes from.
enum class ValueSource { kCheckpoint, kInitializer, kZero };

// A checkpoint's tensor that is all, or a run of the rows, of a model's.
struct KeyPart {
  // The checkpoint's.
  std::string key;
  // Of dimension 0; -1 for a scalar.
  int64_t rows;
};

// The whole of it, for one rank.
struct LoadPlan {
  // One a target.
  std::vector<ValueSource> value_sources;
  // The checkpoint's tensors that are the parts of each target, in their order;
  // none for a target that it lacks.
  std::vector<std::vector<size_t>> sources;
  // In the order of their first bytes in the checkpoint.
  std::vector<PlannedCopy> copies;
  // Keys that are left out as asked for, in the checkpoint's order.
  std::vector<std::string> ignored;
  // Keys that the model has no place for, likewise; empty when strict.
  std::vector<std::string> unexpected;
  // Under which keys the checkpoint has the targets, by their first names: what
  // a saver needs to write a model back as it was.
  std::map<std::string, std::vector<KeyPart>> origins;
  // Of all copies.
  uint64_t bytes_read = 0;

  // For people: totals, and a line for each target and each key that has none.
  // The arguments are those of MakeLoadPlan().
  std::string ToString(absl::Span<const TargetTensor> targets,
                       absl::Span<const CheckpointTensor> sources) const;
};

// Finds a value for every target. A read spans the gaps between runs where they
// are cheaper than a read for each run, but never more than
// kMaxSpannedBytes.
//
// Of two keys for one target, under its different names or both by an alias of
// their own (a shared layer that the checkpoint has twice), the first is read.
// Keys that end in "_extra_state" are ignored.
//
// kInvalidArgument for a pattern that is no regular expression;
// kFailedPrecondition, with all problems in one message, if a key has no place
// (when strict), a target no value, or one two; if parts of a concatenation are
// missing; if shapes differ, or types where one is not a floating point type.
absl::StatusOr<LoadPlan> MakeLoadPlan(
    absl::Span<const TargetTensor> targets,
    absl::Span<const CheckpointTensor> sources, const LoadPlanOptions& options);

// What a rank copies that holds other slices of the same targets, by a plan for
// these: LoadPlan::copies of its own plan, without finding each key's place
// again.
std::vector<PlannedCopy> CopiesFor(const LoadPlan& plan,
                                   absl::Span<const TargetTensor> targets,
                                   absl::Span<const CheckpointTensor> sources);

// The most that one read takes for several runs, in bytes.
inline constexpr int64_t kMaxSpannedBytes = 4 << 20;

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_LOAD_PLAN_H_
