// The header of a safetensors file, which may come from anywhere. The input is
// the number of bytes of tensor data that follow the header, in decimal digits,
// a newline, and the header's JSON.
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/internal/safetensors_header.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "nlohmann/json.hpp"
#include "tests/fuzz/fuzz_check.h"

namespace trainer_lora::distributed::internal {
namespace {

using ::trainer_lora::fuzz::IsLine;

// The tensors fill the data one after the other, each with what its type and
// its shape take.
void CheckTensors(const SafetensorsHeader& header, uint64_t data_begin,
                  uint64_t data_size) {
  std::set<std::string> names;
  uint64_t end = data_begin;
  for (const TensorInfo& tensor : header.tensors) {
    FUZZ_CHECK(names.insert(tensor.name).second) << tensor.name;
    FUZZ_CHECK(tensor.name != "__metadata__");
    FUZZ_CHECK(tensor.byte_offset == end) << tensor.name;
    // Zeros first: what is beside them may be as large as it likes.
    unsigned __int128 bits = TensorDtypeBits(tensor.dtype);
    for (const int64_t dimension : tensor.shape) {
      FUZZ_CHECK(dimension >= 0) << tensor.name;
      if (dimension == 0) bits = 0;
    }
    for (const int64_t dimension : tensor.shape) {
      bits *= static_cast<uint64_t>(dimension);
      FUZZ_CHECK(bits >> 66 == 0) << tensor.name;
    }
    FUZZ_CHECK(bits % 8 == 0 && tensor.byte_size == bits / 8) << tensor.name;
    end += tensor.byte_size;
  }
  FUZZ_CHECK(end == data_begin + data_size);
}

std::string Write(const SafetensorsHeader& header, uint64_t data_begin) {
  nlohmann::json json = nlohmann::json::object();
  for (const TensorInfo& tensor : header.tensors) {
    const uint64_t begin = tensor.byte_offset - data_begin;
    json[tensor.name] = {{"dtype", std::string(TensorDtypeName(tensor.dtype))},
                         {"shape", tensor.shape},
                         {"data_offsets", {begin, begin + tensor.byte_size}}};
  }
  if (!header.metadata.empty()) json["__metadata__"] = header.metadata;
  return json.dump();
}

void CheckEqual(const SafetensorsHeader& a, const SafetensorsHeader& b) {
  FUZZ_CHECK(a.metadata == b.metadata);
  FUZZ_CHECK(a.tensors.size() == b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    const TensorInfo& left = a.tensors[i];
    const TensorInfo& right = b.tensors[i];
    FUZZ_CHECK(left.name == right.name && left.dtype == right.dtype &&
               left.shape == right.shape &&
               left.byte_offset == right.byte_offset &&
               left.byte_size == right.byte_size)
        << left.name << " and " << right.name;
  }
}

void TestHeader(absl::string_view json, uint64_t data_size) {
  // As of a file whose header is written anew below.
  constexpr uint64_t kDataBegin = kSafetensorsPrefixSize;
  const absl::StatusOr<SafetensorsHeader> header =
      ParseSafetensorsHeader(json, kDataBegin, data_size);
  if (!header.ok()) {
    FUZZ_CHECK(header.status().code() == absl::StatusCode::kDataLoss);
    FUZZ_CHECK(IsLine(header.status().message()));
    return;
  }
  CheckTensors(*header, kDataBegin, data_size);
  const absl::StatusOr<SafetensorsHeader> again =
      ParseSafetensorsHeader(Write(*header, kDataBegin), kDataBegin, data_size);
  FUZZ_CHECK(again.ok()) << again.status();
  CheckEqual(*header, *again);
}

}  // namespace
}  // namespace trainer_lora::distributed::internal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t newline = input.find('\n');
  uint64_t data_size = 0;
  if (newline == input.npos ||
      !absl::SimpleAtoi(input.substr(0, newline), &data_size) ||
      data_size > INT64_MAX) {
    return -1;  // Not worth keeping: it tests nothing.
  }
  trainer_lora::distributed::internal::TestHeader(input.substr(newline + 1),
                                                  data_size);
  return 0;
}
