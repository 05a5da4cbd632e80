#include "distributed/checkpoint/internal/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/json_handler.h"
#include "distributed/checkpoint/safetensors_file.h"

namespace trainer_lora::distributed::internal {
namespace {

constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// The first dimensions of a shape, with its type.
std::string DescribeShape(TensorDtype dtype,
                          const std::vector<int64_t>& shape) {
  constexpr size_t kMaxShown = 16;
  const absl::Span<const int64_t> shown =
      absl::MakeConstSpan(shape).subspan(0, kMaxShown);
  return absl::StrCat("the shape [", absl::StrJoin(shown, ", "),
                      shown.size() < shape.size() ? ", ...] of " : "] of ",
                      TensorDtypeName(dtype));
}

class HeaderHandler : public JsonHandler {
 public:
  HeaderHandler(uint64_t data_begin, uint64_t data_size)
      : JsonHandler("the header"),
        data_begin_(data_begin),
        data_size_(data_size) {}

  SafetensorsHeader& header() { return header_; }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kNumbers || value > kMaxInt64) {
      return Unexpected(absl::StrCat(value));
    }
    if (field_ == "data_offsets" && numbers_.size() == 2) {
      return TensorError("data_offsets must be 2 numbers, got more");
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
    dtype_ = ParseTensorDtype(value);
    if (!dtype_.has_value()) {
      return TensorError(absl::StrCat(
          "the type ", QuoteName(value), " is not one of ",
          absl::StrJoin(AllTensorDtypes(), ", ",
                        [](std::string* out, TensorDtype dtype) {
                          absl::StrAppend(out, TensorDtypeName(dtype));
                        })));
    }
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::kStart:
        place_ = Place::kHeader;
        return true;
      case Place::kHeader:
        if (name_ == kMetadataName) return StartMetadata();
        place_ = Place::kTensor;
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
        return true;
      case Place::kMetadata:
        metadata_key_ = std::move(key);
        if (header_.metadata.count(metadata_key_) != 0) {
          return Error(absl::StrCat("__metadata__ has ",
                                    QuoteName(metadata_key_), " twice"));
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
    // Copies: numbers_ keeps its room for the next array, and a shape takes no
    // more than it needs.
    if (field_ == "shape") {
      shape_ = numbers_;
      return true;
    }
    if (numbers_.size() != 2) {
      return TensorError(absl::StrCat("data_offsets must be 2 numbers, got ",
                                      numbers_.size()));
    }
    data_offsets_ = {numbers_[0], numbers_[1]};
    return true;
  }

 private:
  enum class Place { kStart, kHeader, kMetadata, kTensor, kNumbers };

  bool TensorError(absl::string_view message) {
    return Error(absl::StrCat("tensor ", QuoteName(name_), ": ", message));
  }

  bool Unexpected(absl::string_view value) override {
    switch (place_) {
      case Place::kStart:
        return Error(
            absl::StrCat("the header must be a JSON object, got ", value));
      case Place::kHeader:
        return Error(
            absl::StrCat(QuoteName(name_), " must be an object, got ", value));
      case Place::kMetadata:
        return Error(absl::StrCat("__metadata__ ", QuoteName(metadata_key_),
                                  " must be a string, got ", value));
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

  bool StartMetadata() {
    if (std::exchange(has_metadata_, true)) {
      return Error(
          absl::StrCat("the header has \"", kMetadataName, "\" twice"));
    }
    place_ = Place::kMetadata;
    return true;
  }

  bool StartField(std::string field) {
    field_ = std::move(field);
    if (field_ != "dtype" && field_ != "shape" && field_ != "data_offsets") {
      return TensorError(absl::StrCat("unknown field ", QuoteName(field_)));
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
    if (!data_offsets_.has_value()) {
      return TensorError("it has no data_offsets");
    }
    const uint64_t begin = (*data_offsets_)[0];
    const uint64_t end = (*data_offsets_)[1];
    if (begin > end || end > data_size_) {
      return TensorError(absl::StrCat("data_offsets [", begin, ", ", end,
                                      "] are not a range of the file's ",
                                      data_size_, " bytes of data"));
    }
    const absl::StatusOr<uint64_t> size = TensorByteSize(*dtype_, *shape_);
    if (!size.ok()) return TensorError(size.status().message());
    if (*size != end - begin) {
      return TensorError(absl::StrCat(DescribeShape(*dtype_, *shape_),
                                      " takes ", *size,
                                      " bytes, but data_offsets [", begin, ", ",
                                      end, "] give it ", end - begin));
    }
    header_.tensors.push_back({std::move(name_), *dtype_, *std::move(shape_),
                               data_begin_ + begin, end - begin});
    return true;
  }

  const uint64_t data_begin_;
  const uint64_t data_size_;
  SafetensorsHeader header_;
  bool has_metadata_ = false;

  Place place_ = Place::kStart;
  std::string name_;          // The key of kHeader's current entry.
  std::string metadata_key_;  // The key of kMetadata's current entry.
  std::string field_;         // The key of kTensor's current entry.
  std::vector<int64_t> numbers_;
  std::optional<TensorDtype> dtype_;
  std::optional<std::vector<int64_t>> shape_;
  std::optional<std::array<int64_t, 2>> data_offsets_;
};

// The indices of `tensors`, sorted by name, of which there must be no two
// alike.
absl::StatusOr<std::vector<size_t>> SortByName(
    const std::vector<TensorInfo>& tensors) {
  std::vector<size_t> by_name(tensors.size());
  std::iota(by_name.begin(), by_name.end(), size_t{0});
  std::sort(by_name.begin(), by_name.end(), [&tensors](size_t a, size_t b) {
    return tensors[a].name < tensors[b].name;
  });
  const auto twice = std::adjacent_find(
      by_name.begin(), by_name.end(), [&tensors](size_t a, size_t b) {
        return tensors[a].name == tensors[b].name;
      });
  if (twice == by_name.end()) return by_name;
  return absl::DataLossError(absl::StrCat(
      "the header has ", QuoteName(tensors[*twice].name), " twice"));
}

// That `tensors`, sorted, fill [begin, end) without gap or overlap.
absl::Status CheckLayout(const std::vector<TensorInfo>& tensors,
                         uint64_t data_begin, uint64_t data_size) {
  uint64_t filled = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& tensor : tensors) {
    const uint64_t begin = tensor.byte_offset - data_begin;
    if (begin < filled) {
      return absl::DataLossError(absl::StrCat(
          "tensor ", QuoteName(tensor.name), " begins at byte ", begin,
          " of the data, inside tensor ", QuoteName(previous->name)));
    }
    if (begin > filled) {
      return absl::DataLossError(absl::StrCat(
          "the bytes ", filled, " to ", begin, " of the data, before tensor ",
          QuoteName(tensor.name), ", belong to no tensor"));
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
  // The format asks for it: JSON may begin with a space.
  if (json.empty() || json.front() != '{') {
    return absl::DataLossError("the header does not begin with {");
  }
  HeaderHandler handler(data_begin, data_size);
  LORA_RETURN_IF_ERROR(handler.Parse(json));
  SafetensorsHeader header = std::move(handler.header());
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.byte_offset, a.byte_size, a.name) <
                     std::tie(b.byte_offset, b.byte_size, b.name);
            });
  LORA_ASSIGN_OR_RETURN(header.by_name, SortByName(header.tensors));
  LORA_RETURN_IF_ERROR(CheckLayout(header.tensors, data_begin, data_size));
  return header;
}

absl::StatusOr<uint64_t> TensorByteSize(TensorDtype dtype,
                                        const std::vector<int64_t>& shape) {
  uint64_t bits = TensorDtypeBits(dtype);
  bool is_empty = false;
  for (const int64_t size : shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          DescribeShape(dtype, shape), " has a negative dimension"));
    }
    if (size == 0) {
      is_empty = true;
      continue;
    }
    if (static_cast<uint64_t>(size) > kMaxInt64 / bits) {
      return absl::InvalidArgumentError(
          absl::StrCat(DescribeShape(dtype, shape), " is too large"));
    }
    bits *= size;
  }
  if (is_empty) return 0;
  if (bits % 8 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(DescribeShape(dtype, shape), " takes ", bits,
                     " bits, which do not fill whole bytes"));
  }
  return bits / 8;
}

}  // namespace trainer_lora::distributed::internal
