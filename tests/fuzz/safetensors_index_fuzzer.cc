// The index of a checkpoint, which may come from anywhere. The input is its
// JSON.
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/internal/safetensors_index.h"
#include "tests/fuzz/fuzz_check.h"

namespace trainer_lora::distributed::internal {
namespace {

using ::trainer_lora::fuzz::IsLine;

void TestIndex(absl::string_view json) {
  const absl::StatusOr<SafetensorsIndex> index = ParseSafetensorsIndex(json);
  if (!index.ok()) {
    FUZZ_CHECK(index.status().code() == absl::StatusCode::kDataLoss);
    FUZZ_CHECK(IsLine(index.status().message()));
    return;
  }
  FUZZ_CHECK(!index->weight_map.empty());
  for (const auto& [tensor, file] : index->weight_map) {
    // No file leads out of the folder.
    FUZZ_CHECK(file.find('/') == file.npos) << file;
    FUZZ_CHECK(file != "" && file != "." && file != "..") << tensor;
  }
  const absl::StatusOr<std::string> text = SafetensorsIndexJson(*index);
  FUZZ_CHECK(text.ok()) << text.status();
  const absl::StatusOr<SafetensorsIndex> again = ParseSafetensorsIndex(*text);
  FUZZ_CHECK(again.ok()) << again.status();
  FUZZ_CHECK(again->weight_map == index->weight_map);
  FUZZ_CHECK(again->total_size == index->total_size);
}

}  // namespace
}  // namespace trainer_lora::distributed::internal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  trainer_lora::distributed::internal::TestIndex(
      absl::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
