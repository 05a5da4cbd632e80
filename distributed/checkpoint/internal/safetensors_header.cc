#include "distributed/checkpoint/internal/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed::internal {
namespace {

constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

std::optional<TensorDtype> ParseDtype(absl::string_view name) {
  for (const TensorDtype dtype : {TensorDtype::kF16, TensorDtype::kBF16,
                                  TensorDtype::kF32, TensorDtype::kI64}) {
    if (name == TensorDtypeName(dtype)) return dtype;
  }
  return std::nullopt;
}

// Receives the JSON header as events: a DOM would keep the last of two equal
// keys in silence, and would follow any nesting.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  HeaderHandler(uint64_t data_begin, uint64_t data_size)
      : data_begin_(data_begin), data_size_(data_size) {}

  // Why parsing stopped.
  const absl::Status& status() const { return status_; }

  SafetensorsHeader& header() { return header_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool value) override {
    return Unexpected(value ? "true" : "false");
  }
  bool number_integer(int64_t value) override {
    return Unexpected(absl::StrCat(value));
  }
  bool number_float(double, const std::string& text) override {
    return Unexpected(text);
  }
  bool binary(nlohmann::json::binary_t&) override {
    return Unexpected("binary data");
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kNumbers || value > kMaxInt64) {
      return Unexpected(absl::StrCat(value));
    }
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[metadata_key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kTensor || field_ != "dtype") {
      return Unexpected("a string");
    }
    dtype_ = ParseDtype(value);
    if (!dtype_.has_value()) {
      return TensorError(absl::StrCat(
          "the type \"", value, "\" is not supported: it must be F32, F16, ",
          "BF16 or I64"));
    }
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kHeader;
        return true;
      case Place::kHeader:
        place_ = name_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
        dtype_.reset();
        shape_.reset();
        data_offsets_.reset();
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(std::string& key) override {
    switch (place_) {
      case Place::kHeader:
        name_ = std::move(key);
        if (!names_.insert(name_).second) {
          return Error(absl::StrCat("the header has \"", name_, "\" twice"));
        }
        return true;
      case Place::kMetadata:
        metadata_key_ = std::move(key);
        if (header_.metadata.count(metadata_key_) != 0) {
          return Error(
              absl::StrCat("__metadata__ has \"", metadata_key_, "\" twice"));
        }
        return true;
      default:
        return StartField(std::move(key));
    }
  }

  bool end_object() override {
    const Place ended = place_;
    place_ = Place::kHeader;
    return ended != Place::kTensor || AddTensor();
  }

  bool start_array(size_t) override {
    if (place_ != Place::kTensor || field_ == "dtype") {
      return Unexpected("an array");
    }
    place_ = Place::kNumbers;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    (field_ == "shape" ? shape_ : data_offsets_) = std::move(numbers_);
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    return Error(
        absl::StrCat("the header is not valid JSON at its byte ", position));
  }

 private:
  enum class Place { kStart, kHeader, kMetadata, kTensor, kNumbers };

  bool Error(std::string message) {
    status_ = absl::DataLossError(std::move(message));
    return false;
  }

  bool TensorError(absl::string_view message) {
    return Error(absl::StrCat("tensor \"", name_, "\": ", message));
  }

  // What is wrong with meeting `value` at this place.
  bool Unexpected(absl::string_view value) {
    switch (place_) {
      case Place::kStart:
        return Error(
            absl::StrCat("the header must be a JSON object, got ", value));
      case Place::kHeader:
        return Error(
            absl::StrCat("\"", name_, "\" must be an object, got ", value));
      case Place::kMetadata:
        return Error(absl::StrCat("__metadata__ \"", metadata_key_,
                                  "\" must be a string, got ", value));
      case Place::kTensor:
        return TensorError(absl::StrCat(
            field_, " must be ", field_ == "dtype" ? "a string" : "an array",
            ", got ", value));
      case Place::kNumbers:
        return TensorError(absl::StrCat(
            field_, " must hold integers from 0 to 2^63 - 1, got ", value));
    }
    return false;
  }

  bool StartField(std::string field) {
    field_ = std::move(field);
    if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") {
      return TensorError(absl::StrCat("unknown field \"", field_, "\""));
    }
    if ((field_ == "dtype" && dtype_.has_value()) ||
        (field_ == "shape" && shape_.has_value()) ||
        (field_ == "data_offsets" && data_offsets_.has_value())) {
      return TensorError(absl::StrCat("it has ", field_, " twice"));
    }
    return true;
  }

  // Checks the tensor whose fields are complete against itself; its place
  // among the others is checked when all are known.
  bool AddTensor() {
    if (!dtype_.has_value()) return TensorError("it has no dtype");
    if (!shape_.has_value()) return TensorError("it has no shape");
    if (!data_offsets_.has_value())
      return TensorError("it has no data_offsets");
    if (data_offsets_->size() != 2) {
      return TensorError(absl::StrCat("data_offsets must be 2 numbers, got ",
                                      data_offsets_->size()));
    }
    const uint64_t begin = (*data_offsets_)[0];
    const uint64_t end = (*data_offsets_)[1];
    if (begin > end || end > data_size_) {
      return TensorError(absl::StrCat("data_offsets [", begin, ", ", end,
                                      "] are not a range of the file's ",
                                      data_size_, " bytes of data"));
    }
    const std::string shape = absl::StrJoin(*shape_, ", ");
    const std::optional<uint64_t> size = TensorByteSize(*dtype_, *shape_);
    if (!size.has_value()) {
      return TensorError(absl::StrCat("the shape [", shape, "] is too large"));
    }
    if (*size != end - begin) {
      return TensorError(
          absl::StrCat("the shape [", shape, "] of ", TensorDtypeName(*dtype_),
                       " takes ", *size, " bytes, but data_offsets [", begin,
                       ", ", end, "] give it ", end - begin));
    }
    header_.tensors.push_back(
        {name_, *dtype_, *std::move(shape_), data_begin_ + begin, end - begin});
    return true;
  }

  const uint64_t data_begin_;
  const uint64_t data_size_;
  SafetensorsHeader header_;
  std::set<std::string> names_;
  absl::Status status_;

  Place place_ = Place::kStart;
  std::string name_;          // The key of kHeader's current entry.
  std::string metadata_key_;  // The key of kMetadata's current entry.
  std::string field_;         // The key of kTensor's current entry.
  std::vector<int64_t> numbers_;
  std::optional<TensorDtype> dtype_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::vector<int64_t>> data_offsets_;
};

// That `tensors`, sorted, fill [begin, end) without gap or overlap.
absl::Status CheckLayout(const std::vector<TensorInfo>& tensors,
                         uint64_t data_begin, uint64_t data_size) {
  uint64_t filled = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : tensors) {
    const uint64_t begin = tensor.byte_offset - data_begin;
    if (begin < filled) {
      return absl::DataLossError(
          absl::StrCat("tensor \"", tensor.name, "\" begins at byte ", begin,
                       " of the data, inside tensor \"", previous->name, "\""));
    }
    if (begin > filled) {
      return absl::DataLossError(absl::StrCat(
          "the bytes ", filled, " to ", begin, " of the data, before tensor \"",
          tensor.name, "\", belong to no tensor"));
    }
    filled += tensor.byte_size;
    previous = &tensor;
  }
  if (filled != data_size) {
    return absl::DataLossError(absl::StrCat("the tensors take ", filled,
                                            " bytes, but the file has ",
                                            data_size, " bytes of data"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view json,
                                                         uint64_t data_begin,
                                                         uint64_t data_size) {
  // The format asks for it; the JSON parser would skip a byte order mark.
  if (json.empty() || json.front() != '{') {
    return absl::DataLossError("the header does not begin with {");
  }
  // The JSON parser takes a zero byte for the end.
  if (const size_t zero = json.find('\0'); zero != json.npos) {
    return absl::DataLossError(
        absl::StrCat("the header has a zero byte at its byte ", zero));
  }
  HeaderHandler handler(data_begin, data_size);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &handler)) {
    return handler.status();
  }
  SafetensorsHeader header = std::move(handler.header());
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.byte_offset, a.byte_size, a.name) <
                     std::tie(b.byte_offset, b.byte_size, b.name);
            });
  if (absl::Status status = CheckLayout(header.tensors, data_begin, data_size);
      !status.ok()) {
    return status;
  }
  return header;
}

std::optional<uint64_t> TensorByteSize(TensorDtype dtype,
                                       const std::vector<int64_t>& shape) {
  uint64_t bytes = TensorDtypeSize(dtype);
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) return std::nullopt;
    if (size == 0) {
      is_empty = true;
      continue;
    }
    if (static_cast<uint64_t>(size) > kMaxInt64 / bytes) return std::nullopt;
    bytes *= size;
  }
  return is_empty ? 0 : bytes;
}

}  // namespace trainer_lora::distributed::internal
