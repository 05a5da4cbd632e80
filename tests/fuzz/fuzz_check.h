// What fuzz targets check their subject with:
//
//   FUZZ_CHECK(tensor.byte_size == size) << tensor.name;
//   FUZZ_CHECK(IsLine(status.message()));
//
// The messages of errors go into logs and terminals, so they must be UTF-8, and
// not look like further lines, whatever was in the input.
#ifndef TRAINER_LORA_TESTS_FUZZ_FUZZ_CHECK_H_
#define TRAINER_LORA_TESTS_FUZZ_FUZZ_CHECK_H_

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

// Ends the program, saying where and what else is streamed into it, unless
// `condition` holds.
#define FUZZ_CHECK(condition) \
  while (!(condition))        \
  ::trainer_lora::fuzz::FailedCheck(__FILE__, __LINE__, #condition).stream()

namespace trainer_lora::fuzz {

class FailedCheck {
 public:
  FailedCheck(const char* file, int line, const char* condition) {
    std::cerr << file << ":" << line << ": " << condition << " does not hold: ";
  }
  ~FailedCheck() {
    std::cerr << std::endl;
    std::abort();
  }

  std::ostream& stream() { return std::cerr; }
};

inline bool IsUtf8(absl::string_view text) {
  try {
    nlohmann::json(std::string(text)).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

// Whether `text` is a line of UTF-8: not empty, without control characters.
inline bool IsLine(absl::string_view text) {
  return !text.empty() && IsUtf8(text) &&
         std::none_of(text.begin(), text.end(),
                      [](unsigned char c) { return absl::ascii_iscntrl(c); });
}

}  // namespace trainer_lora::fuzz

#endif  // TRAINER_LORA_TESTS_FUZZ_FUZZ_CHECK_H_
