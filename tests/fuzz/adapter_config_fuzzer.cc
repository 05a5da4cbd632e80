// adapter_config.json, which may come from anywhere. The input has lines: the
// names of layers; an empty line; the file.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "lora/internal/adapter_config.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_input.h"

namespace trainer_lora::lora::internal {
namespace {

using ::trainer_lora::fuzz::IsLine;
using ::trainer_lora::fuzz::IsUtf8;

void CheckError(const absl::Status& status) {
  FUZZ_CHECK(status.code() == absl::StatusCode::kDataLoss ||
             status.code() == absl::StatusCode::kFailedPrecondition)
      << status;
  FUZZ_CHECK(IsLine(status.message())) << status;
}

// An adapter that has these numbers: a file gives each layer its own back.
void CheckReadsBack(const AdapterDescription& description) {
  bool can_be_written = true;
  for (const AdapterLayer& layer : description.layers) {
    can_be_written = can_be_written && IsUtf8(layer.name) &&
                     layer.name.size() <= kMaxLayerNameSize;
  }
  const absl::StatusOr<std::string> json = AdapterConfigJson(description);
  FUZZ_CHECK(json.ok() == can_be_written) << json.status();
  if (!json.ok()) {
    FUZZ_CHECK(json.status().code() == absl::StatusCode::kInvalidArgument);
    FUZZ_CHECK(IsLine(json.status().message()));
    return;
  }
  std::vector<std::string> names;
  for (const AdapterLayer& layer : description.layers) {
    names.push_back(layer.name);
  }
  const absl::StatusOr<AdapterConfig> again =
      AdapterConfig::Parse(*json, names);
  FUZZ_CHECK(again.ok()) << again.status() << " in\n" << *json;
  FUZZ_CHECK(again->use_dora() == description.use_dora);
  FUZZ_CHECK(again->use_rslora() == description.use_rslora);
  for (size_t i = 0; i < names.size(); ++i) {
    FUZZ_CHECK(again->ranks()[i] == description.layers[i].rank &&
               again->alphas()[i] == description.layers[i].alpha)
        << names[i] << " in\n"
        << *json;
  }
}

void TestConfig(const std::vector<std::string>& names, absl::string_view json) {
  const absl::StatusOr<AdapterConfig> config =
      AdapterConfig::Parse(json, names);
  if (!config.ok()) return CheckError(config.status());
  AdapterDescription description;
  description.use_dora = config->use_dora();
  description.use_rslora = config->use_rslora();
  std::set<std::string> seen;
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string& name = names[i];
    const double rank = config->ranks()[i];
    const double alpha = config->alphas()[i];
    FUZZ_CHECK(std::isfinite(rank) && std::isfinite(alpha)) << name;
    // A model has neither two layers of one name nor others than these.
    if (seen.insert(name).second && rank >= 1 && rank <= INT32_MAX &&
        rank == std::trunc(rank) && alpha > 0) {
      description.layers.push_back({name, static_cast<int64_t>(rank), alpha});
    }
  }
  if (!description.layers.empty()) CheckReadsBack(description);
}

}  // namespace
}  // namespace trainer_lora::lora::internal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::string_view input(reinterpret_cast<const char*>(data), size);
  const std::vector<std::string> names =
      trainer_lora::fuzz::ConsumeLines(input);
  trainer_lora::lora::internal::TestConfig(names, input);
  return 0;
}
