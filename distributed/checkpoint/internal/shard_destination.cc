#include "distributed/checkpoint/internal/shard_destination.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ATen/core/Tensor.h"
#include "ATen/ops/from_blob.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"

namespace trainer_lora::distributed::internal {
namespace {

// Below the size from which ATen starts threads of its own: the reading threads
// are there already.
constexpr int64_t kConvertedAtOnce = 32'000;

// Copies `source`, which is one-dimensional, to as many elements of `target`,
// row-major, from `begin` on.
void CopyElements(const at::Tensor& source, const at::Tensor& target,
                  int64_t begin) {
  if (target.dim() == 0) {
    target.copy_(source[0]);
    return;
  }
  const int64_t row_size = target.numel() / target.size(0);
  for (int64_t i = 0; i < source.numel();) {
    const int64_t row = (begin + i) / row_size;
    const int64_t column = (begin + i) % row_size;
    const int64_t num_rows = column > 0 ? 0 : (source.numel() - i) / row_size;
    if (num_rows > 0) {
      const at::Tensor rows = target.narrow(0, row, num_rows);
      rows.copy_(source.narrow(0, i, num_rows * row_size).view(rows.sizes()));
      i += num_rows * row_size;
    } else {
      const int64_t count = std::min(row_size - column, source.numel() - i);
      CopyElements(source.narrow(0, i, count), target.select(0, row), column);
      i += count;
    }
  }
}

}  // namespace

ShardDestination::ShardDestination(const at::Tensor& tensor)
    : tensor_(tensor.is_contiguous() ? tensor.detach().view({-1})
                                     : tensor.detach()) {}

char* ShardDestination::DirectPointer(TensorDtype dtype, int64_t begin) const {
  if (!tensor_.is_cpu() || !tensor_.is_contiguous() ||
      ToScalarType(dtype) != tensor_.scalar_type()) {
    return nullptr;
  }
  return static_cast<char*>(tensor_.mutable_data_ptr()) +
         begin * tensor_.element_size();
}

void ShardDestination::Write(TensorDtype dtype, const char* bytes,
                             int64_t begin, int64_t count) const {
  if (char* const direct = DirectPointer(dtype, begin); direct != nullptr) {
    std::memcpy(direct, bytes, count * tensor_.element_size());
    return;
  }
  const at::Tensor source =
      at::from_blob(const_cast<char*>(bytes), {count},
                    at::TensorOptions(ToScalarType(dtype).value()));
  const int64_t step = tensor_.is_cpu() ? kConvertedAtOnce : count;
  for (int64_t i = 0; i < count; i += step) {
    CopyElements(source.narrow(0, i, std::min(step, count - i)), tensor_,
                 begin + i);
  }
}

}  // namespace trainer_lora::distributed::internal
