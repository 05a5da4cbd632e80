#include "distributed/internal/layout_check.h"

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace trainer_lora::distributed::internal {

absl::Status CheckLayout(const std::string& name, const at::Tensor& tensor,
                         const ParameterLayout& layout) {
  const absl::Status valid = layout.Validate();
  if (!valid.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", valid.message()));
  }
  if (!layout.HasReplicatedParts()) return absl::OkStatus();
  int64_t rows = 0;
  for (const Chunk& chunk : layout.LocalParts()) rows += chunk.size;
  if (tensor.dim() == 0 || tensor.size(0) != rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " of shape [", absl::StrJoin(tensor.sizes(), ", "),
        "] must have ", rows, " rows by its layout (", layout.ToString(), ")"));
  }
  return absl::OkStatus();
}

}  // namespace trainer_lora::distributed::internal
