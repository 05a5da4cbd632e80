#include "distributed/checkpoint/internal/shard_destination.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/from_blob.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/torch_dtype.h"

namespace trainer_lora::distributed::internal {
namespace {

// Below the size from which ATen starts threads of its own: the reading threads
// are there already.
constexpr int64_t kConvertedAtOnce = 32'000;

}  // namespace

ShardDestination::ShardDestination(const at::Tensor& tensor)
    : tensor_(tensor.detach()),
      flat_(tensor_.is_contiguous()
                ? tensor_.view({-1})
                : at::empty({tensor_.numel()},
                            tensor_.options().device(at::kCPU))) {}

char* ShardDestination::DirectPointer(TensorDtype dtype, int64_t begin) const {
  if (!flat_.is_cpu() || ToScalarType(dtype) != flat_.scalar_type()) {
    return nullptr;
  }
  return static_cast<char*>(flat_.mutable_data_ptr()) +
         begin * flat_.element_size();
}

void ShardDestination::Write(TensorDtype dtype, const char* bytes,
                             int64_t begin, int64_t count) const {
  if (char* const direct = DirectPointer(dtype, begin); direct != nullptr) {
    std::memcpy(direct, bytes, count * flat_.element_size());
    return;
  }
  const at::Tensor source =
      at::from_blob(const_cast<char*>(bytes), {count},
                    at::TensorOptions(ToScalarType(dtype).value()));
  const int64_t step = flat_.is_cpu() ? kConvertedAtOnce : count;
  for (int64_t i = 0; i < count; i += step) {
    const int64_t size = std::min(step, count - i);
    flat_.narrow(0, begin + i, size).copy_(source.narrow(0, i, size));
  }
}

void ShardDestination::Finish() const {
  if (!tensor_.is_contiguous()) {
    tensor_.copy_(flat_.view(tensor_.sizes()));
  }
}

}  // namespace trainer_lora::distributed::internal
