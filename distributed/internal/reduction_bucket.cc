#include "distributed/internal/reduction_bucket.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "ATen/record_function.h"
#include "absl/strings/str_cat.h"
#include "c10/core/Event.h"
#include "c10/core/Stream.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/run_collective.h"
#include "distributed/placement.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"
#include "torch/csrc/distributed/c10d/Work.hpp"

namespace trainer_lora::distributed::internal {
namespace {

using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

// One group over all of `dims`, if the mesh has it.
bool AppendOneGroup(const DeviceMesh& mesh, const std::vector<int64_t>& dims,
                    Groups& groups) {
  if (dims.empty()) return true;
  auto group = mesh.GroupOver(dims);
  if (!group.ok()) return false;
  groups.push_back(*std::move(group));
  return true;
}

// Else a group a dimension.
void AppendGroups(const DeviceMesh& mesh, const std::vector<int64_t>& dims,
                  Groups& groups) {
  if (AppendOneGroup(mesh, dims, groups)) return;
  for (const int64_t dim : dims) groups.push_back(mesh.group(dim));
}

// Such as ", averaged over data, summed over tensor".
std::string DescribeReduction(const GradientBucketKey& key) {
  std::string text;
  if (!key.average_over.empty()) {
    absl::StrAppend(&text, ", averaged over ", key.average_over);
  }
  if (!key.sum_over.empty()) {
    absl::StrAppend(&text, ", summed over ", key.sum_over);
  }
  return text;
}

bool IsPowerOfTwo(int64_t number) { return (number & (number - 1)) == 0; }

c10::Stream CurrentStream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

bool IsNarrow(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf;
}

}  // namespace

Reduction ReductionOf(const ParameterLayout& layout) {
  const DeviceMesh& mesh = *layout.mesh;
  const auto averaged = layout.ReducedDims(GradientReduction::kAverage);
  const auto summed = layout.ReducedDims(GradientReduction::kSum);
  std::vector<int64_t> all = averaged;
  all.insert(all.end(), summed.begin(), summed.end());

  Groups groups;
  if (!AppendOneGroup(mesh, all, groups)) {
    AppendGroups(mesh, summed, groups);
    AppendGroups(mesh, averaged, groups);
  }
  Reduction reduction;
  for (auto& group : groups) {
    if (group->getSize() > 1) reduction.groups.push_back(std::move(group));
  }
  for (const int64_t dim : averaged) reduction.divisor *= mesh.size(dim);
  return reduction;
}

std::vector<at::Tensor> SliceViews(const GradientBucket& bucket,
                                   const at::Tensor& flat,
                                   const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> views;
  views.reserve(bucket.slices.size());
  for (const GradientSlice& slice : bucket.slices) {
    views.push_back(flat.narrow(0, slice.offset, slice.numel)
                        .view(like[slice.index].sizes()));
  }
  return views;
}

ReductionBucket::ReductionBucket(size_t index, GradientBucket bucket,
                                 Reduction reduction,
                                 const std::vector<at::Tensor>& like,
                                 bool reduce_in_float32,
                                 const std::string& context)
    : bucket_(std::move(bucket)),
      reduction_(std::move(reduction)),
      what_(absl::StrCat(context, ": gradient all-reduce of ",
                         bucket_.slices.size(), " parameters, the first ",
                         bucket_.slices.front().name, " (bucket ", index,
                         DescribeReduction(bucket_.key), ")")) {
  const at::TensorOptions options =
      like[bucket_.slices.front().index].options().requires_grad(false);
  // The flag has a cache line of its own, as every gradient.
  const int64_t numel =
      bucket_.numel + kGradientAlignmentBytes / bucket_.key.element_size;
  flat_ = at::zeros({numel}, options);
  views_ = SliceViews(bucket_, flat_, like);
  reduced_ = reduce_in_float32 && IsNarrow(flat_.scalar_type())
                 ? at::zeros({numel}, options.dtype(at::kFloat))
                 : flat_;
  unhealthy_ranks_ = reduced_.narrow(0, bucket_.numel, 1);
  divisor_before_ = reduced_.is_same(flat_) &&
                            flat_.scalar_type() != at::kHalf &&
                            IsPowerOfTwo(reduction_.divisor)
                        ? reduction_.divisor
                        : 1;
  if (flat_.is_cuda()) {
    if (divisor_before_ > 1 && reduction_.groups.size() == 1 &&
        reduction_.groups[0]->getSize() == divisor_before_ &&
        HasNccl(*reduction_.groups[0])) {
      is_averaged_by_nccl_ = true;
      divisor_before_ = 1;
      reduction_.divisor = 1;
    }
    host_unhealthy_ranks_ =
        at::zeros({1}, reduced_.options().device(at::kCPU).pinned_memory(true));
  }
}

absl::Status ReductionBucket::Start(bool healthy, bool is_divided) {
  RECORD_FUNCTION("trainer_lora::gradient_sync::start", {});
  if (!is_divided && divisor_before_ > 1) flat_.div_(divisor_before_);
  if (!reduced_.is_same(flat_)) reduced_.copy_(flat_);
  // The other ranks read the number a step late: until then they see NaN.
  if (!healthy && flat_.is_cuda()) {
    reduced_.fill_(std::numeric_limits<double>::quiet_NaN());
  }
  unhealthy_ranks_.fill_(healthy ? 0 : 1);
  return reduction_.groups.empty() ? absl::OkStatus() : StartStage(0);
}

absl::Status ReductionBucket::StartStage(size_t stage) {
  c10d::ProcessGroup& group = *reduction_.groups[stage];
  return CallCollective(what_, [&] {
    std::vector<at::Tensor> tensors = {reduced_};
    c10d::AllreduceOptions options;
    if (is_averaged_by_nccl_) options.reduceOp = c10d::ReduceOp::AVG;
    work_ = StartCollective(group,
                            [&] { return group.allreduce(tensors, options); });
  });
}

absl::StatusOr<bool> ReductionBucket::Finish() {
  RECORD_FUNCTION("trainer_lora::gradient_sync::finish", {});
  for (size_t stage = 0; stage < reduction_.groups.size(); ++stage) {
    if (stage > 0) LORA_RETURN_IF_ERROR(StartStage(stage));
    LORA_RETURN_IF_ERROR(CallCollective(what_, [&] { work_->wait(); }));
  }
  bool healthy = true;
  if (flat_.is_cuda()) {
    host_unhealthy_ranks_.copy_(unhealthy_ranks_, /*non_blocking=*/true);
    if (!answered_.has_value()) answered_.emplace(flat_.device().type());
    answered_->record(CurrentStream(flat_.device()));
  } else {
    healthy = unhealthy_ranks_.item<double>() == 0;
  }
  // Division and sum, not c10d's AVG where that rounds more often: two ranks
  // then give the bits of one that accumulated both gradients and divided.
  const int64_t divisor = reduction_.divisor / divisor_before_;
  if (divisor > 1) reduced_.div_(divisor);
  if (!reduced_.is_same(flat_)) flat_.copy_(reduced_);
  return healthy;
}

absl::StatusOr<bool> ReductionBucket::LastFinish() {
  if (!answered_.has_value()) return true;
  LORA_RETURN_IF_ERROR(
      CallCollective(what_, [&] { answered_->synchronize(); }));
  // A collective that was aborted also comes to an end.
  for (const auto& group : reduction_.groups) {
    LORA_RETURN_IF_ERROR(CheckCudaBackend(*group, what_));
  }
  return host_unhealthy_ranks_.item<double>() == 0;
}

void ReductionBucket::NoteStream() {
  if (!flat_.is_cuda()) return;
  const c10::Stream stream = CurrentStream(flat_.device());
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
    streams_.push_back(stream);
  }
}

void ReductionBucket::WaitForStreams() {
  if (streams_.empty()) return;
  const c10::Stream current = CurrentStream(flat_.device());
  for (const c10::Stream& stream : streams_) {
    if (stream == current) continue;
    c10::Event written(flat_.device().type());
    written.record(stream);
    written.block(current);
  }
  streams_.clear();
}

}  // namespace trainer_lora::distributed::internal
