// How fuzz targets take their input apart.
#ifndef TRAINER_LORA_TESTS_FUZZ_FUZZ_INPUT_H_
#define TRAINER_LORA_TESTS_FUZZ_FUZZ_INPUT_H_

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace trainer_lora::fuzz {

// Takes the lines up to the first empty one off `input`, and that one too.
inline std::vector<std::string> ConsumeLines(absl::string_view& input) {
  std::vector<std::string> lines;
  while (!input.empty()) {
    const size_t size = std::min(input.find('\n'), input.size());
    const absl::string_view line = input.substr(0, size);
    input.remove_prefix(std::min(size + 1, input.size()));
    if (line.empty()) break;
    lines.emplace_back(line);
  }
  return lines;
}

}  // namespace trainer_lora::fuzz

#endif  // TRAINER_LORA_TESTS_FUZZ_FUZZ_INPUT_H_
