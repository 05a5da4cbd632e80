#include "distributed/checkpoint/internal/json_handler.h"

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/internal/message_text.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed::internal {

absl::Status JsonHandler::Parse(absl::string_view json) {
  // The parser would skip a byte order mark, and take a zero byte for the end.
  if (absl::StartsWith(json, "\xef\xbb\xbf")) {
    return absl::DataLossError(
        absl::StrCat(document_, " begins with a byte order mark"));
  }
  if (const size_t zero = json.find('\0'); zero != json.npos) {
    return absl::DataLossError(
        absl::StrCat(document_, " has a zero byte at its byte ", zero));
  }
  nlohmann::json::sax_parse(json.begin(), json.end(), this);
  return status_;
}

bool JsonHandler::number_integer(int64_t value) {
  return Unexpected(absl::StrCat(value));
}

bool JsonHandler::number_float(double, const std::string& text) {
  return Unexpected(config::Shorten(text));
}

bool JsonHandler::binary(nlohmann::json::binary_t&) {
  return Unexpected("binary data");
}

bool JsonHandler::parse_error(size_t position, const std::string&,
                              const nlohmann::json::exception&) {
  return Error(
      absl::StrCat(document_, " is not valid JSON at its byte ", position));
}

std::string QuoteName(absl::string_view name) {
  return absl::StrCat("\"", config::Printable(config::Shorten(name, 200)),
                      "\"");
}

}  // namespace trainer_lora::distributed::internal
