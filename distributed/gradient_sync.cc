#include "distributed/gradient_sync.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/record_function.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "c10/core/DeviceType.h"
#include "c10/core/ScalarType.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/gradient_bucket.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/layout_check.h"
#include "distributed/internal/rank_agreement.h"
#include "distributed/internal/reduction_bucket.h"
#include "distributed/internal/run_collective.h"
#include "distributed/internal/write_problem.h"
#include "distributed/parameter_layout.h"
#include "distributed/placement.h"
#include "torch/csrc/autograd/function_hook.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace trainer_lora::distributed {
namespace {

using internal::ReductionBucket;
using Parameters = std::vector<DistributedParameter>;

// --- Which parameters, and are they the same everywhere ----------------------

bool IsReplicated(const Placement& placement) {
  return placement.is_replicate();
}

bool IsReduced(const Placement& placement) {
  return placement.gradient_reduction() != GradientReduction::kNone;
}

bool IsSharded(const Placement& placement) { return !placement.is_replicate(); }

template <typename Predicate>
bool AnyPlacement(const DistributedParameter& parameter, Predicate predicate) {
  return parameter.layout.mesh != nullptr &&
         std::any_of(parameter.layout.placements.begin(),
                     parameter.layout.placements.end(), predicate);
}

bool HasReducedGradient(const DistributedParameter& parameter) {
  return AnyPlacement(parameter, IsReduced) ||
         parameter.layout.HasReplicatedParts();
}

bool HasSummedGradient(const DistributedParameter& parameter) {
  return !parameter.layout.ReducedDims(GradientReduction::kSum).empty() ||
         parameter.layout.HasReplicatedParts();
}

// Those whose gradient is reduced, each once.
Parameters WithReducedGradient(
    absl::Span<const DistributedParameter> parameters) {
  Parameters reduced;
  std::set<const c10::TensorImpl*> seen;
  for (const DistributedParameter& parameter : parameters) {
    if (parameter.layout.mesh != nullptr && HasReducedGradient(parameter) &&
        parameter.parameter.requires_grad() &&
        seen.insert(parameter.parameter.unsafeGetTensorImpl()).second) {
      reduced.push_back(parameter);
    }
  }
  return reduced;
}

Parameters Replicated(absl::Span<const DistributedParameter> parameters) {
  Parameters replicated;
  for (const DistributedParameter& parameter : parameters) {
    if (AnyPlacement(parameter, IsReplicated)) replicated.push_back(parameter);
  }
  return replicated;
}

std::string ShapeString(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

std::string ShapeString(const at::Tensor& tensor) {
  return ShapeString(tensor.sizes());
}

// Such as "broadcast of 2 parameters, the first to_q.lora_A".
std::string NameCollective(const std::string& collective, size_t count,
                           const std::string& first) {
  return absl::StrCat(collective, " of ", count, " parameters",
                      count == 0 ? "" : ", the first " + first);
}

std::string NameCollective(const std::string& collective,
                           const Parameters& parameters) {
  return NameCollective(collective, parameters.size(),
                        parameters.empty() ? "" : parameters[0].name);
}

bool IsAveraged(const Placement& placement) {
  return placement.gradient_reduction() == GradientReduction::kAverage;
}

// What has to be the same on every rank of the mesh. The shards of a parameter
// may differ in shape.
std::string Describe(const DistributedParameter& parameter) {
  const at::Tensor& tensor = parameter.parameter;
  const std::vector<Placement>& placements = parameter.layout.placements;
  const bool is_averaged_everywhere =
      std::all_of(placements.begin(), placements.end(), IsAveraged);
  return absl::StrCat(
      parameter.name, " (", c10::toString(tensor.scalar_type()), " ",
      AnyPlacement(parameter, IsSharded) ? "shard" : ShapeString(tensor),
      " on ", c10::DeviceTypeName(tensor.device().type(), /*lower_case=*/true),
      is_averaged_everywhere ? "" : ", " + parameter.layout.ToString(), ")");
}

absl::Status CheckLiesOn(const DeviceMesh& mesh,
                         const DistributedParameter& parameter) {
  const ParameterLayout& layout = parameter.layout;
  if (layout.mesh.get() != &mesh) {
    return absl::InvalidArgumentError(
        absl::StrCat(parameter.name, " lies on another mesh, ",
                     layout.mesh->ToString(), "; pass the mesh of its layout"));
  }
  if (parameter.parameter.is_meta() ||
      parameter.parameter.layout() != at::kStrided) {
    return absl::InvalidArgumentError(
        absl::StrCat(parameter.name, " must be a dense tensor with values; ",
                     "load or materialize it first"));
  }
  return internal::CheckLayout(parameter.name, parameter.parameter, layout);
}

absl::Status CheckIsWhole(const DistributedParameter& parameter) {
  if (!AnyPlacement(parameter, IsSharded)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      parameter.name, " must be replicated over all of ",
      parameter.layout.mesh->ToString(), ", is ", parameter.layout.ToString()));
}

absl::Status CheckGradient(const std::string& name,
                           const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return absl::OkStatus();
  if (gradient.layout() != at::kStrided || gradient.is_meta() ||
      gradient.sizes() != parameter.sizes()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the gradient of ", name, " must be a dense tensor of shape ",
        ShapeString(parameter)));
  }
  return absl::OkStatus();
}

// Collective. A rank whose own check failed tells the others, which would
// otherwise wait for it in the collective that it never joins.
absl::Status AgreeOn(const DeviceMesh& mesh, std::string operation,
                     const Parameters& parameters,
                     const absl::Status& local_check) {
  std::vector<std::string> lines = {std::move(operation)};
  for (const DistributedParameter& parameter : parameters) {
    lines.push_back(Describe(parameter));
  }
  if (!local_check.ok()) lines.push_back(std::string(local_check.message()));
  LORA_RETURN_IF_ERROR(internal::CheckRanksAgree(
      *mesh.group(), mesh.ToString(), NameCollective("comparison", parameters),
      lines));
  return local_check;
}

// The mesh dimension that shards the rows. The layout has replicated parts.
int64_t RowShardDim(const ParameterLayout& layout) {
  return std::find_if(layout.placements.begin(), layout.placements.end(),
                      [](const Placement& placement) {
                        return placement.shard_dim() == 0;
                      }) -
         layout.placements.begin();
}

// Collective, and called by all ranks of the mesh with the same parameters in
// all but the shapes of shards: these have to be the same on the ranks that
// reduce them with each other. Ranks that sum replicated rows may have other
// rows beside, of the same shape.
absl::Status AgreeOnShards(const DeviceMesh& mesh,
                           const Parameters& parameters) {
  std::vector<std::string> layouts;  // In the order of the parameters.
  std::map<std::string, Parameters> by_layout;
  for (const DistributedParameter& parameter : parameters) {
    if (!AnyPlacement(parameter, IsSharded)) continue;
    Parameters& same = by_layout[parameter.layout.ToString()];
    if (same.empty()) layouts.push_back(parameter.layout.ToString());
    same.push_back(parameter);
  }
  if (layouts.empty()) return absl::OkStatus();
  // Ranks that differ from their peers in one group join the other groups all
  // the same, whose ranks would wait for them.
  absl::Status status;
  for (const std::string& layout : layouts) {
    const Parameters& same = by_layout[layout];
    std::vector<std::string> shapes;
    std::vector<std::string> row_shapes;
    for (const DistributedParameter& parameter : same) {
      const at::Tensor& tensor = parameter.parameter;
      shapes.push_back(
          absl::StrCat(parameter.name, " (", ShapeString(tensor), ")"));
      if (!parameter.layout.HasReplicatedParts()) continue;
      row_shapes.push_back(absl::StrCat(parameter.name, " (rows of ",
                                        ShapeString(tensor.sizes().slice(1)),
                                        ")"));
    }
    const auto compare = [&](int64_t dim,
                             const std::vector<std::string>& lines) {
      if (mesh.size(dim) == 1) return;
      status.Update(internal::CheckRanksAgree(
          *mesh.group(dim), mesh.ToString(), NameCollective("comparison", same),
          lines, mesh.RanksOver({dim})));
    };
    for (const GradientReduction reduction :
         {GradientReduction::kAverage, GradientReduction::kSum}) {
      for (const int64_t dim : same[0].layout.ReducedDims(reduction)) {
        compare(dim, shapes);
      }
    }
    if (same[0].layout.HasReplicatedParts()) {
      compare(RowShardDim(same[0].layout), row_shapes);
    }
  }
  return internal::AgreeOnStatus(*mesh.group(), mesh.ToString(),
                                 NameCollective("comparison", parameters),
                                 status);
}

// --- Buffers -----------------------------------------------------------------

std::string DimNames(const ParameterLayout& layout,
                     GradientReduction reduction) {
  return absl::StrJoin(layout.ReducedDims(reduction), ",",
                       [&layout](std::string* out, int64_t dim) {
                         out->append(layout.mesh->dim_names()[dim]);
                       });
}

GradientSpec SpecOf(const std::string& name, const at::Tensor& tensor,
                    std::string average_over, std::string sum_over) {
  return {name,
          tensor.numel(),
          {std::move(average_over), std::move(sum_over),
           c10::toString(tensor.scalar_type()),
           static_cast<int64_t>(tensor.element_size()), tensor.device().str()}};
}

// For errors, `first_index` is the index of the first bucket.
absl::StatusOr<std::vector<ReductionBucket>> MakeBuckets(
    const DeviceMesh& mesh, const Parameters& parameters,
    const GradientSyncOptions& options, size_t first_index) {
  std::vector<GradientSpec> specs;
  std::vector<at::Tensor> tensors;
  for (const DistributedParameter& parameter : parameters) {
    specs.push_back(
        SpecOf(parameter.name, parameter.parameter,
               DimNames(parameter.layout, GradientReduction::kAverage),
               DimNames(parameter.layout, GradientReduction::kSum)));
    tensors.push_back(parameter.parameter);
  }
  LORA_ASSIGN_OR_RETURN(GradientBucketPlan plan,
                        PlanGradientBuckets(specs, options.bucket_bytes));
  std::vector<ReductionBucket> buckets;
  for (GradientBucket& bucket : plan.buckets) {
    const ParameterLayout& layout =
        parameters[bucket.slices.front().index].layout;
    buckets.emplace_back(first_index + buckets.size(), std::move(bucket),
                         internal::ReductionOf(layout), tensors,
                         options.reduce_in_float32, mesh.RankString());
  }
  return buckets;
}

// The parts of `parameters` that several ranks hold, each as a parameter of its
// own. Whole, it is replicated over the ranks that shard the rows, and its
// gradient, which is zero but for the rank's own chunk, is summed over them:
// this completes the chunk of all its replicas without a group of theirs.
Parameters WholeReplicatedParts(const Parameters& parameters) {
  Parameters wholes;
  for (const DistributedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.parameter;
    ParameterLayout layout = parameter.layout;
    layout.parts.clear();
    int64_t begin = 0;
    for (const ShardedPart& part : parameter.layout.parts) {
      const int64_t end = begin + part.size;
      if (part.replicas > 1) {
        layout.placements[RowShardDim(parameter.layout)] =
            Placement::Replicate(GradientReduction::kSum);
        std::vector<int64_t> shape = tensor.sizes().vec();
        shape[0] = part.size;
        // It says shape, dtype and device, and has no memory.
        const at::Tensor like =
            at::empty({1}, tensor.options().requires_grad(false)).expand(shape);
        wholes.push_back(
            {absl::StrCat(parameter.name, "[", begin, ":", end, "]"), like,
             layout});
      }
      begin = end;
    }
  }
  return wholes;
}

// What the parameters were when the ranks compared them.
struct ParameterState {
  explicit ParameterState(const at::Tensor& parameter)
      : sizes(parameter.sizes().vec()),
        dtype(parameter.scalar_type()),
        device(parameter.device()),
        requires_grad(parameter.requires_grad()) {}

  bool IsThatOf(const at::Tensor& parameter) const {
    return parameter.sizes() == at::IntArrayRef(sizes) &&
           parameter.scalar_type() == dtype && parameter.device() == device &&
           parameter.requires_grad() == requires_grad;
  }

  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  at::Device device;
  bool requires_grad;
};

// A parameter, and the place of its gradient.
struct Entry {
  explicit Entry(const DistributedParameter& parameter)
      : name(parameter.name),
        parameter(parameter.parameter),
        state(parameter.parameter) {}

  std::string name;
  at::Tensor parameter;
  ParameterState state;
  at::Tensor view;
  size_t bucket = 0;
  // Its gradient holds a sum over ranks, which must not be summed again.
  bool is_summed = false;
  // While overlap is on: its gradient of this step came, and was divided if
  // gradients of its bucket are on arrival.
  bool is_ready = false;
};

// A part of a gradient that several ranks hold.
struct ReplicatedPart {
  // The bucket of the gradient, in which the part comes along for nothing.
  size_t bucket;
  // This rank's rows, in the view of the gradient.
  at::Tensor rows;
  // Their place in the whole part, in a bucket of such parts.
  at::Tensor chunk;
  // That of the chunk's bucket.
  int64_t divisor_before;
};

bool HasView(const Entry& entry) {
  return entry.parameter.grad().is_same(entry.view);
}

}  // namespace

// --- GradientSync ------------------------------------------------------------

class GradientSync::Impl {
 public:
  // Collective. Leaves the parameters alone until Install(), which may replace
  // the hooks of `previous`, if there is one, and no others.
  static absl::StatusOr<std::unique_ptr<Impl>> Build(
      std::shared_ptr<const DeviceMesh> mesh,
      absl::Span<const DistributedParameter> parameters,
      const GradientSyncOptions& options, Impl* previous);

  ~Impl() { RemoveHooks(); }

  // Takes over what the next Sync() has to know of `previous`, in whose views
  // the gradients still are.
  void Continue(const Impl& previous);
  void Install();
  void RemoveHooks();

  absl::StatusOr<int64_t> Sync();
  // Sync() for gradients that stay where they are.
  absl::StatusOr<int64_t> ReduceOnce();
  void ZeroGrad();
  std::string ToString() const;

  const std::shared_ptr<const DeviceMesh>& mesh() const { return mesh_; }
  const GradientSyncOptions& options() const { return options_; }
  const GradientSyncStatistics& statistics() const { return statistics_; }
  int& no_sync_depth() { return no_sync_depth_; }

 private:
  class ReadyHook;

  explicit Impl(std::shared_ptr<const DeviceMesh> mesh,
                const GradientSyncOptions& options)
      : mesh_(std::move(mesh)), options_(options) {}

  // Whether the parameter's hook for accumulated gradients is of this object.
  bool HasHookOn(const at::Tensor& parameter) const;

  // Makes the entries of `parameters`, and the buckets. No collective.
  absl::Status MakeBuffers(const Parameters& parameters);
  // Makes the buckets in which the replicated parts of the entries, which are
  // `parameters`, are summed.
  absl::Status AddReplicatedParts(const Parameters& parameters);

  // Called when the gradient of an entry is accumulated.
  void OnAccumulated(size_t index);
  // Whether this rank can answer for the gradients of a bucket.
  absl::Status Check(const ReductionBucket& bucket) const;
  absl::Status Check(const Entry& entry) const;
  // Brings a gradient that was checked into its view, zeros where there is
  // none.
  void Collect(Entry& entry);
  // Whether gradients are divided one by one as they come, which pays where
  // they are large, and not with the whole buffer.
  bool DividesOnArrival(const ReductionBucket& bucket) const {
    constexpr int64_t kLargeNumel = 1 << 14;
    const auto& slices = bucket.bucket().slices;
    return options_.overlap_backward && bucket.divisor_before() > 1 &&
           bucket.bucket().numel / static_cast<int64_t>(slices.size()) >=
               kLargeNumel;
  }
  // Collects the gradients of the next bucket on the current stream, and starts
  // it. `healthy` as in Start().
  absl::Status StartNext(bool healthy);
  // Starts the buckets that are left, those of replicated parts last. `error`
  // is what this rank can't answer for, also in them.
  absl::Status StartRest(absl::Status& error);
  absl::Status Start(ReductionBucket& bucket, bool healthy, bool is_divided);
  // Whether all ranks answered for their gradients; true on CUDA, where
  // LastFinish() has the answer.
  absl::StatusOr<bool> FinishAll();
  // What the last FinishAll() would have returned if it had waited for the
  // device, for which this waits.
  absl::StatusOr<bool> LastFinish();
  // The same for the step before, as an error of this one.
  absl::Status CheckLastStep();
  void StartOver();

  std::shared_ptr<const DeviceMesh> mesh_;
  GradientSyncOptions options_;
  std::vector<Entry> entries_;
  std::vector<Entry*> sums_;  // Those whose gradient is a sum.
  std::vector<ReductionBucket> buckets_;
  std::vector<ReplicatedPart> replicated_parts_;
  // Their whole parts, zero between synchronizations.
  std::vector<ReductionBucket> part_buckets_;

  // The backward pass may run on several threads.
  std::mutex mutex_;
  int no_sync_depth_ = 0;
  // Gradients that a bucket still waits for.
  std::vector<size_t> missing_;
  // The buckets before it have been started.
  size_t next_bucket_ = 0;
  // Those of the started buckets whose gradient was no view, and becomes one.
  // With very many parameters, touching each of them is what a synchronization
  // costs over its collectives: it happens once.
  std::vector<Entry*> without_view_;
  // What went wrong during the backward pass.
  absl::Status backward_error_;
  // After an error the ranks may be at different places.
  absl::Status broken_;
  // Statistics of the step that is under way.
  GradientSyncStatistics current_;
  GradientSyncStatistics statistics_;
};

class GradientSync::Impl::ReadyHook
    : public torch::autograd::PostAccumulateGradHook {
 public:
  ReadyHook(Impl* impl, size_t index) : impl_(impl), index_(index) {}
  void operator()(const torch::autograd::Variable&) override {
    impl_->OnAccumulated(index_);
  }
  const Impl* impl() const { return impl_; }

 private:
  Impl* impl_;  // Removes the hook before it goes.
  size_t index_;
};

absl::StatusOr<std::unique_ptr<GradientSync::Impl>> GradientSync::Impl::Build(
    std::shared_ptr<const DeviceMesh> mesh,
    absl::Span<const DistributedParameter> parameters,
    const GradientSyncOptions& options, Impl* previous) {
  if (mesh == nullptr) {
    return absl::InvalidArgumentError(
        "gradients cannot be reduced over a null mesh");
  }
  const at::NoGradGuard no_grad;
  const Parameters reduced = WithReducedGradient(parameters);

  absl::Status local_check;
  if (previous != nullptr && previous->broken_.ok()) {
    local_check = previous->broken_ = previous->CheckLastStep();
  }
  if (options.bucket_bytes < 1) {
    local_check.Update(absl::InvalidArgumentError(absl::StrCat(
        "bucket_bytes must be at least 1, got ", options.bucket_bytes)));
  }
  // A parameter may have another shape now than its view there.
  std::set<const c10::TensorImpl*> previous_views;
  if (previous != nullptr) {
    for (const Entry& entry : previous->entries_) {
      previous_views.insert(entry.view.unsafeGetTensorImpl());
    }
  }
  for (const DistributedParameter& parameter : reduced) {
    local_check.Update(CheckLiesOn(*mesh, parameter));
    if (previous_views.count(
            parameter.parameter.grad().unsafeGetTensorImpl()) == 0) {
      local_check.Update(CheckGradient(parameter.name, parameter.parameter));
    }
    if (options.overlap_backward &&
        torch::autograd::impl::post_acc_grad_hooks(parameter.parameter) !=
            nullptr &&
        (previous == nullptr || !previous->HasHookOn(parameter.parameter))) {
      local_check.Update(absl::InvalidArgumentError(
          absl::StrCat(parameter.name,
                       " has a hook for accumulated gradients already, of "
                       "which a tensor holds one: remove it, or do without "
                       "overlap_backward")));
    }
  }
  std::unique_ptr<Impl> impl(new Impl(mesh, options));
  // Where memory runs out on one rank, the others must not start without it.
  if (local_check.ok()) {
    local_check = internal::GuardedStep(
        "making the buffers for gradients",
        [&impl, &reduced] { return impl->MakeBuffers(reduced); });
  }
  LORA_RETURN_IF_ERROR(
      AgreeOn(*mesh,
              absl::StrCat("the reduction of gradients in buckets of ",
                           options.bucket_bytes, " bytes",
                           options.reduce_in_float32 ? " in float32" : "",
                           options.overlap_backward ? " with overlap" : ""),
              reduced, local_check));
  LORA_RETURN_IF_ERROR(AgreeOnShards(*mesh, reduced));
  return impl;
}

absl::Status GradientSync::Impl::MakeBuffers(const Parameters& parameters) {
  LORA_ASSIGN_OR_RETURN(
      buckets_, MakeBuckets(*mesh_, parameters, options_, /*first_index=*/0));
  for (const DistributedParameter& parameter : parameters) {
    entries_.emplace_back(parameter);
  }
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const std::vector<GradientSlice>& slices = buckets_[bucket].bucket().slices;
    for (size_t i = 0; i < slices.size(); ++i) {
      Entry& entry = entries_[slices[i].index];
      entry.view = buckets_[bucket].views()[i];
      entry.bucket = bucket;
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (HasSummedGradient(parameters[i])) sums_.push_back(&entries_[i]);
  }
  LORA_RETURN_IF_ERROR(AddReplicatedParts(parameters));
  StartOver();
  return absl::OkStatus();
}

absl::Status GradientSync::Impl::AddReplicatedParts(
    const Parameters& parameters) {
  const Parameters wholes = WholeReplicatedParts(parameters);
  LORA_ASSIGN_OR_RETURN(part_buckets_,
                        MakeBuckets(*mesh_, wholes, options_, buckets_.size()));
  std::vector<ReplicatedPart> parts(wholes.size());
  for (const ReductionBucket& bucket : part_buckets_) {
    const std::vector<GradientSlice>& slices = bucket.bucket().slices;
    for (size_t i = 0; i < slices.size(); ++i) {
      parts[slices[i].index].chunk = bucket.views()[i];
      parts[slices[i].index].divisor_before = bucket.divisor_before();
    }
  }
  auto part = parts.begin();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterLayout& layout = parameters[i].layout;
    if (!layout.HasReplicatedParts()) continue;
    const std::vector<Chunk> chunks = layout.LocalParts();
    int64_t row = 0;
    for (size_t j = 0; j < chunks.size(); ++j) {
      if (layout.parts[j].replicas > 1) {
        part->bucket = entries_[i].bucket;
        part->rows = entries_[i].view.narrow(0, row, chunks[j].size);
        part->chunk = part->chunk.narrow(0, chunks[j].offset, chunks[j].size);
        ++part;
      }
      row += chunks[j].size;
    }
  }
  replicated_parts_ = std::move(parts);
  return absl::OkStatus();
}

void GradientSync::Impl::Continue(const Impl& previous) {
  no_sync_depth_ = previous.no_sync_depth_;
  statistics_ = previous.statistics_;
  std::set<const c10::TensorImpl*> summed;
  for (const Entry* entry : previous.sums_) {
    if (entry->is_summed && HasView(*entry) &&
        entry->view.sizes() == entry->parameter.sizes()) {
      summed.insert(entry->parameter.unsafeGetTensorImpl());
    }
  }
  for (Entry* entry : sums_) {
    entry->is_summed = summed.count(entry->parameter.unsafeGetTensorImpl()) > 0;
  }
}

void GradientSync::Impl::Install() {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    at::Tensor& gradient = entry.parameter.mutable_grad();
    // Of another shape is only a view from before the parameter changed.
    if (gradient.defined() && gradient.sizes() == entry.view.sizes()) {
      entry.view.copy_(gradient);
    }
    gradient = entry.view;
    if (options_.overlap_backward) {
      torch::autograd::impl::set_post_acc_grad_hooks(
          entry.parameter, std::make_unique<ReadyHook>(this, i));
    }
  }
}

bool GradientSync::Impl::HasHookOn(const at::Tensor& parameter) const {
  const auto* hook = dynamic_cast<const ReadyHook*>(
      torch::autograd::impl::post_acc_grad_hooks(parameter).get());
  return hook != nullptr && hook->impl() == this;
}

void GradientSync::Impl::RemoveHooks() {
  if (!options_.overlap_backward) return;
  for (const Entry& entry : entries_) {
    if (HasHookOn(entry.parameter)) {
      torch::autograd::impl::post_acc_grad_hooks(entry.parameter) = nullptr;
    }
  }
}

void GradientSync::Impl::StartOver() {
  missing_.clear();
  for (const ReductionBucket& bucket : buckets_) {
    missing_.push_back(bucket.bucket().slices.size());
  }
  if (options_.overlap_backward) {
    for (Entry& entry : entries_) entry.is_ready = false;
  }
  for (ReductionBucket& bucket : part_buckets_) bucket.Zero();
  next_bucket_ = 0;
  without_view_.clear();
  backward_error_ = absl::OkStatus();
  current_ = GradientSyncStatistics();
}

void GradientSync::Impl::OnAccumulated(size_t index) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (no_sync_depth_ > 0 || !broken_.ok()) return;
  Entry& entry = entries_[index];
  if (entry.is_ready) {
    backward_error_.Update(absl::FailedPreconditionError(absl::StrCat(
        mesh_->RankString(), ": a second backward pass reached ", entry.name,
        " before Sync(); with overlap_backward, all but the last belong into a "
        "NoSyncScope")));
    return;
  }
  entry.is_ready = true;
  --missing_[entry.bucket];
  const at::NoGradGuard no_grad;
  // Autograd made a new gradient where there was none, as after an optimizer's
  // zero_grad(). What can't be copied is for Check() to say.
  if (!HasView(entry) && entry.state.IsThatOf(entry.parameter) &&
      CheckGradient(entry.name, entry.parameter).ok()) {
    entry.view.copy_(entry.parameter.grad());
    entry.parameter.mutable_grad() = entry.view;
    entry.is_summed = false;
    ++current_.copied_gradients;
  }
  ReductionBucket& bucket = buckets_[entry.bucket];
  bucket.NoteStream();
  if (DividesOnArrival(bucket)) entry.view.div_(bucket.divisor_before());
  while (next_bucket_ < buckets_.size() && missing_[next_bucket_] == 0) {
    // A rank that failed then joins nothing before Replace(), and would pair
    // what is started here with another reduction.
    if (next_bucket_ == 0 && !CheckLastStep().ok()) return;
    ++current_.overlapped_buckets;
    backward_error_.Update(Check(buckets_[next_bucket_]));
    broken_ = StartNext(backward_error_.ok());
    if (!broken_.ok()) return;
  }
}

absl::Status GradientSync::Impl::Check(const ReductionBucket& bucket) const {
  for (const GradientSlice& slice : bucket.bucket().slices) {
    LORA_RETURN_IF_ERROR(Check(entries_[slice.index]));
  }
  return absl::OkStatus();
}

absl::Status GradientSync::Impl::Check(const Entry& entry) const {
  if (!entry.state.IsThatOf(entry.parameter)) {
    return absl::FailedPreconditionError(absl::StrCat(
        mesh_->RankString(), ": ", entry.name,
        " has changed its shape, dtype, device or requires_grad since the "
        "ranks compared it: call GradientSync::Replace on every rank"));
  }
  if (!HasView(entry)) return CheckGradient(entry.name, entry.parameter);
  if (entry.is_summed) {
    return absl::FailedPreconditionError(absl::StrCat(
        mesh_->RankString(), ": the gradient of ", entry.name,
        " is a sum over ranks already, and would be summed twice: call "
        "ZeroGrad() before the next backward pass"));
  }
  return absl::OkStatus();
}

void GradientSync::Impl::Collect(Entry& entry) {
  if (HasView(entry)) return;
  without_view_.push_back(&entry);
  entry.is_ready = false;  // Nor divided.
  const at::Tensor& gradient = entry.parameter.grad();
  if (gradient.defined()) {
    entry.view.copy_(gradient);
    ++current_.copied_gradients;
  } else {
    entry.view.zero_();
    current_.zero_filled.push_back(entry.name);
  }
}

absl::Status GradientSync::Impl::StartNext(bool healthy) {
  const size_t index = next_bucket_++;
  ReductionBucket& bucket = buckets_[index];
  const bool divides_on_arrival = DividesOnArrival(bucket);
  bucket.WaitForStreams();
  for (const GradientSlice& slice : bucket.bucket().slices) {
    Entry& entry = entries_[slice.index];
    // Of an error all ranks learn, and none uses the values.
    if (healthy) Collect(entry);
    if (divides_on_arrival && !entry.is_ready) {
      entry.view.div_(bucket.divisor_before());
    }
  }
  // Before the reduction of the bucket writes over them.
  for (const ReplicatedPart& part : replicated_parts_) {
    if (part.bucket != index) continue;
    part.chunk.copy_(part.rows);
    if (!divides_on_arrival && part.divisor_before > 1) {
      part.chunk.div_(part.divisor_before);
    }
  }
  return Start(bucket, healthy, divides_on_arrival);
}

absl::Status GradientSync::Impl::StartRest(absl::Status& error) {
  // The ranks that reduce another bucket with this one have to learn of an
  // error in any.
  for (size_t i = next_bucket_; i < buckets_.size(); ++i) {
    error.Update(Check(buckets_[i]));
  }
  while (next_bucket_ < buckets_.size()) {
    LORA_RETURN_IF_ERROR(StartNext(error.ok()));
  }
  for (ReductionBucket& bucket : part_buckets_) {
    LORA_RETURN_IF_ERROR(Start(bucket, error.ok(), /*is_divided=*/true));
  }
  return absl::OkStatus();
}

absl::Status GradientSync::Impl::Start(ReductionBucket& bucket, bool healthy,
                                       bool is_divided) {
  current_.collectives += bucket.num_collectives();
  current_.bytes += bucket.num_collectives() * bucket.bytes();
  return bucket.Start(healthy, is_divided);
}

absl::StatusOr<bool> GradientSync::Impl::FinishAll() {
  bool all_healthy = true;
  for (std::vector<ReductionBucket>* buckets : {&buckets_, &part_buckets_}) {
    for (ReductionBucket& bucket : *buckets) {
      LORA_ASSIGN_OR_RETURN(const bool healthy, bucket.Finish());
      all_healthy = all_healthy && healthy;
    }
  }
  for (const ReplicatedPart& part : replicated_parts_) {
    part.rows.copy_(part.chunk);
  }
  return all_healthy;
}

absl::StatusOr<bool> GradientSync::Impl::LastFinish() {
  bool all_healthy = true;
  for (std::vector<ReductionBucket>* buckets : {&buckets_, &part_buckets_}) {
    for (ReductionBucket& bucket : *buckets) {
      LORA_ASSIGN_OR_RETURN(const bool healthy, bucket.LastFinish());
      all_healthy = all_healthy && healthy;
    }
  }
  return all_healthy;
}

absl::Status GradientSync::Impl::CheckLastStep() {
  LORA_ASSIGN_OR_RETURN(const bool healthy, LastFinish());
  if (healthy) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(mesh_->RankString(),
                   ": another rank could not answer for its gradients in the "
                   "synchronization before this one; its error says why"));
}

absl::StatusOr<int64_t> GradientSync::Impl::ReduceOnce() {
  const at::NoGradGuard no_grad;
  absl::Status error;
  LORA_RETURN_IF_ERROR(StartRest(error));
  LORA_ASSIGN_OR_RETURN(const bool finished_healthy, FinishAll());
  // Nothing is written before every collective went through, on the device
  // too.
  LORA_ASSIGN_OR_RETURN(const bool last_healthy, LastFinish());
  LORA_RETURN_IF_ERROR(error);
  if (!finished_healthy || !last_healthy) {
    return absl::FailedPreconditionError("another rank failed");
  }
  for (Entry& entry : entries_) {
    at::Tensor& gradient = entry.parameter.mutable_grad();
    // One that can't be written, such as an expanded one, is replaced.
    if (!gradient.defined() || internal::WriteProblem(gradient) != nullptr) {
      gradient = at::empty_like(entry.parameter);
    }
    gradient.copy_(entry.view);
  }
  return static_cast<int64_t>(entries_.size());
}

absl::StatusOr<int64_t> GradientSync::Impl::Sync() {
  RECORD_FUNCTION("trainer_lora::gradient_sync", {});
  const auto begin = std::chrono::steady_clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  if (!broken_.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the gradients can't be reduced after an error: ", broken_.message()));
  }
  broken_ = CheckLastStep();
  LORA_RETURN_IF_ERROR(broken_);
  // Taken out, so that whatever ends this call early leaves it broken.
  broken_ = absl::UnknownError("an exception");
  absl::Status error = backward_error_;
  for (size_t bucket = 0; bucket < next_bucket_; ++bucket) {
    for (const GradientSlice& slice : buckets_[bucket].bucket().slices) {
      const Entry& entry = entries_[slice.index];
      if (HasView(entry)) continue;
      error.Update(absl::FailedPreconditionError(
          absl::StrCat(mesh_->RankString(), ": the gradient of ", entry.name,
                       " was replaced after its reduction had started")));
    }
  }
  absl::Status status = StartRest(error);
  bool all_healthy = true;
  if (status.ok()) {
    const absl::StatusOr<bool> finished = FinishAll();
    status = finished.status();
    all_healthy = finished.value_or(false);
  }
  status.Update(error);
  if (status.ok() && !all_healthy) {
    status = absl::FailedPreconditionError(absl::StrCat(
        mesh_->RankString(),
        ": another rank could not answer for its gradients; its error says "
        "why"));
  }
  broken_ = status;
  if (!status.ok()) return status;

  for (Entry* entry : without_view_) {
    entry->parameter.mutable_grad() = entry->view;
  }
  for (Entry* entry : sums_) entry->is_summed = true;
  current_.parameters = static_cast<int64_t>(entries_.size());
  current_.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  statistics_ = std::move(current_);
  StartOver();
  return statistics_.parameters;
}

void GradientSync::Impl::ZeroGrad() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const at::NoGradGuard no_grad;
  if (next_bucket_ > 0) {
    // The other ranks may or may not come to Sync(). After an error, that stays
    // the reason.
    broken_.Update(absl::FailedPreconditionError(
        absl::StrCat(mesh_->RankString(),
                     ": ZeroGrad() was called between a backward pass "
                     "that started a reduction and Sync()")));
    return;
  }
  for (ReductionBucket& bucket : buckets_) bucket.Zero();
  for (Entry& entry : entries_) {
    if (!HasView(entry)) entry.parameter.mutable_grad() = entry.view;
    entry.is_summed = false;
  }
  StartOver();
}

std::string GradientSync::Impl::ToString() const {
  GradientBucketPlan plan;
  for (const auto* buckets : {&buckets_, &part_buckets_}) {
    for (const ReductionBucket& bucket : *buckets) {
      plan.buckets.push_back(bucket.bucket());
    }
  }
  return plan.ToString();
}

GradientSync::GradientSync(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}

GradientSync::~GradientSync() = default;

absl::StatusOr<std::unique_ptr<GradientSync>> GradientSync::Create(
    std::shared_ptr<const DeviceMesh> mesh,
    absl::Span<const DistributedParameter> parameters,
    const GradientSyncOptions& options) {
  LORA_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                        Impl::Build(std::move(mesh), parameters, options,
                                    /*previous=*/nullptr));
  impl->Install();
  return std::unique_ptr<GradientSync>(new GradientSync(std::move(impl)));
}

absl::Status GradientSync::Replace(
    absl::Span<const DistributedParameter> parameters) {
  LORA_ASSIGN_OR_RETURN(
      std::unique_ptr<Impl> impl,
      Impl::Build(impl_->mesh(), parameters, impl_->options(), impl_.get()));
  impl->Continue(*impl_);
  impl_->RemoveHooks();
  impl->Install();
  impl_ = std::move(impl);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> GradientSync::Sync() { return impl_->Sync(); }

void GradientSync::ZeroGrad() { impl_->ZeroGrad(); }

const GradientSyncStatistics& GradientSync::statistics() const {
  return impl_->statistics();
}

std::string GradientSync::ToString() const { return impl_->ToString(); }

GradientSync::NoSyncScope::NoSyncScope(GradientSync& sync) : sync_(sync) {
  ++sync_.impl_->no_sync_depth();
}

GradientSync::NoSyncScope::~NoSyncScope() { --sync_.impl_->no_sync_depth(); }

// --- Once --------------------------------------------------------------------

namespace {

// Parameters that one collective broadcasts.
struct BroadcastBuffer {
  std::string what;              // For errors.
  std::vector<at::Tensor> flat;  // One tensor.
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> views;  // Of `flat`, one a parameter.
};

// With the values of `parameters`.
absl::Status MakeBroadcastBuffers(const DeviceMesh& mesh,
                                  const Parameters& parameters,
                                  std::vector<BroadcastBuffer>& buffers) {
  std::vector<GradientSpec> specs;
  std::vector<at::Tensor> tensors;
  for (const DistributedParameter& parameter : parameters) {
    specs.push_back(SpecOf(parameter.name, parameter.parameter, "", ""));
    tensors.push_back(parameter.parameter);
  }
  LORA_ASSIGN_OR_RETURN(const GradientBucketPlan plan,
                        PlanGradientBuckets(specs));
  for (const GradientBucket& bucket : plan.buckets) {
    const std::vector<GradientSlice>& slices = bucket.slices;
    BroadcastBuffer buffer;
    buffer.what = absl::StrCat(
        mesh.RankString(), ": ",
        NameCollective("broadcast", slices.size(), slices[0].name));
    buffer.flat = {
        at::empty({bucket.numel},
                  tensors[slices[0].index].options().requires_grad(false))};
    buffer.views = internal::SliceViews(bucket, buffer.flat[0], tensors);
    for (size_t i = 0; i < slices.size(); ++i) {
      buffer.parameters.push_back(tensors[slices[i].index]);
      buffer.views[i].copy_(buffer.parameters[i]);
    }
    buffers.push_back(std::move(buffer));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int64_t> ReduceGradients(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters) {
  // The caller keeps the mesh; this does not outlive the call.
  const std::shared_ptr<const DeviceMesh> borrowed(
      std::shared_ptr<const DeviceMesh>(), &mesh);
  LORA_ASSIGN_OR_RETURN(
      const std::unique_ptr<GradientSync::Impl> impl,
      GradientSync::Impl::Build(borrowed, parameters, GradientSyncOptions(),
                                /*previous=*/nullptr));
  return impl->ReduceOnce();
}

absl::Status BroadcastParameters(
    const DeviceMesh& mesh, absl::Span<const DistributedParameter> parameters,
    int root) {
  const at::NoGradGuard no_grad;
  const Parameters replicated = Replicated(parameters);
  absl::Status local_check;
  if (root < 0 || root >= mesh.size()) {
    local_check = absl::InvalidArgumentError(absl::StrCat(
        "root must be a rank of ", mesh.ToString(), ", got ", root));
  }
  for (const DistributedParameter& parameter : replicated) {
    local_check.Update(CheckLiesOn(mesh, parameter));
    local_check.Update(CheckIsWhole(parameter));
    local_check.Update(
        internal::CheckCanWrite(parameter.name, parameter.parameter));
  }
  std::vector<BroadcastBuffer> buffers;
  if (local_check.ok()) {
    local_check = internal::GuardedStep(
        "making the buffers for the broadcast",
        [&] { return MakeBroadcastBuffers(mesh, replicated, buffers); });
  }
  LORA_RETURN_IF_ERROR(AgreeOn(mesh,
                               absl::StrCat("the broadcast from rank ", root),
                               replicated, local_check));

  c10d::ProcessGroup& group = *mesh.group();
  c10d::BroadcastOptions options;
  options.rootRank = root;
  for (BroadcastBuffer& buffer : buffers) {
    LORA_RETURN_IF_ERROR(internal::RunCollective(group, buffer.what, [&] {
      return group.broadcast(buffer.flat, options);
    }));
  }
  // Nothing is written before every collective went through, on the device
  // too.
  for (const BroadcastBuffer& buffer : buffers) {
    LORA_RETURN_IF_ERROR(
        internal::ReadResult(group, buffer.what, buffer.flat[0].slice(0, 0, 1))
            .status());
  }
  for (const BroadcastBuffer& buffer : buffers) {
    for (size_t i = 0; i < buffer.views.size(); ++i) {
      buffer.parameters[i].copy_(buffer.views[i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace trainer_lora::distributed
