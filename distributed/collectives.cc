#include "distributed/collectives.h"

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/full.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/Types.hpp"

namespace trainer_lora::distributed {
namespace {

absl::StatusOr<double> AllReduceNumber(const DeviceMesh& mesh, double value,
                                       c10d::ReduceOp::RedOpType op,
                                       const std::string& what) {
  c10d::ProcessGroup& group = *mesh.group();
  std::vector<at::Tensor> tensors = {
      at::full({1}, value,
               at::TensorOptions()
                   .dtype(at::kDouble)
                   .device(internal::MetadataDevice(group)))};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  const std::string context = absl::StrCat(mesh.RankString(), ": ", what);
  LORA_RETURN_IF_ERROR(internal::RunCollective(
      group, context, [&] { return group.allreduce(tensors, options); }));
  LORA_ASSIGN_OR_RETURN(const at::Tensor result,
                        internal::ReadResult(group, context, tensors[0]));
  return result.item<double>();
}

}  // namespace

absl::StatusOr<double> AllReduce(const DeviceMesh& mesh, double value,
                                 ReduceOp op) {
  return op == ReduceOp::kSum
             ? AllReduceNumber(mesh, value, c10d::ReduceOp::SUM,
                               "all-reduce (sum) of a number")
             : AllReduceNumber(mesh, value, c10d::ReduceOp::MAX,
                               "all-reduce (max) of a number");
}

absl::Status Barrier(const DeviceMesh& mesh) {
  // Nobody has the sum before everybody has called.
  return AllReduceNumber(mesh, 0, c10d::ReduceOp::SUM, "barrier").status();
}

}  // namespace trainer_lora::distributed
