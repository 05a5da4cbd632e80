// Reads a JSON document that somebody else wrote, as events: a DOM would keep
// the last of two equal keys in silence, and would take many times the memory.
//
//   class HeaderHandler : public JsonHandler { ... };
//   HeaderHandler handler;  // JsonHandler("the header")
//   LORA_RETURN_IF_ERROR(handler.Parse(json));
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_JSON_HANDLER_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_JSON_HANDLER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed::internal {

// A subclass handles the objects and arrays, the strings and the unsigned
// numbers; all else is Unexpected() unless it says otherwise. A handler that
// returns false, as Error() does, ends the parsing.
class JsonHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  // Once. kDataLoss where Error() was called, or if `json` is not one JSON
  // value in UTF-8.
  absl::Status Parse(absl::string_view json);

  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override {
    return Unexpected(value ? "true" : "false");
  }
  bool number_integer(int64_t value) override;
  bool number_float(double value, const std::string& text) override;
  bool binary(nlohmann::json::binary_t& value) override;
  bool parse_error(size_t position, const std::string& token,
                   const nlohmann::json::exception& error) override;

 protected:
  // `document` is what messages call it.
  explicit JsonHandler(std::string document) : document_(std::move(document)) {}

  bool Error(absl::string_view message) {
    status_ = absl::DataLossError(message);
    return false;
  }

  // Calls Error() with what is wrong with meeting `value` at this place; or
  // returns true, if nothing is.
  virtual bool Unexpected(absl::string_view value) = 0;

 private:
  const std::string document_;
  absl::Status status_;
};

// `name`, which may be as long as the document and have any character, for a
// message: in quotes, cut after 200 bytes, and printable.
std::string QuoteName(absl::string_view name);

}  // namespace trainer_lora::distributed::internal

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_INTERNAL_JSON_HANDLER_H_
