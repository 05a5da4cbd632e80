#include "distributed/checkpoint/internal/safetensors_index.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/json_handler.h"
#include "nlohmann/json.hpp"

namespace trainer_lora::distributed::internal {
namespace {

constexpr char kMetadata[] = "metadata";
constexpr char kTotalSize[] = "total_size";
constexpr char kWeightMap[] = "weight_map";

// What is left alone may be nested, but need not be followed without end.
constexpr size_t kMaxDepth = 64;

// Linux's limit.
constexpr size_t kMaxFileName = 255;

// Whether `name` can't lead out of its folder, and can be a file's.
bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name.size() <= kMaxFileName && name != "." &&
         name != ".." && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

std::string FileNameError(absl::string_view tensor, absl::string_view file) {
  return absl::StrCat(kWeightMap, " ", QuoteName(tensor),
                      " must be the name of a file beside the index, got ",
                      QuoteName(file));
}

std::string SizeError(uint64_t size) {
  return absl::StrCat("it has ", size, " bytes, more than the limit of ",
                      kMaxSafetensorsIndexSize);
}

class IndexHandler : public JsonHandler {
 public:
  IndexHandler() : JsonHandler("the index") {}

  SafetensorsIndex& index() { return index_; }

  bool number_unsigned(uint64_t value) override {
    if (!IsTotalSize()) return Unexpected(absl::StrCat(value));
    if (index_.total_size.has_value()) {
      return Error(absl::StrCat(kMetadata, " has ", kTotalSize, " twice"));
    }
    index_.total_size = value;
    return true;
  }

  bool number_integer(int64_t value) override {
    if (!IsTotalSize()) return Unexpected(absl::StrCat(value));
    return Error(
        absl::StrCat(kTotalSize, " must not be negative, got ", value));
  }

  bool string(std::string& value) override {
    if (place_ != Place::kWeightMap) return Unexpected("a string");
    if (!IsPlainFileName(value)) return Error(FileNameError(key_, value));
    const auto [tensor, is_new] =
        index_.weight_map.emplace(std::move(key_), std::move(value));
    if (is_new) return true;
    return Error(
        absl::StrCat(kWeightMap, " has ", QuoteName(tensor->first), " twice"));
  }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) return Enter(Place::kIndex);
    if (place_ == Place::kIndex && key_ == kMetadata) {
      return EnterOnce(Place::kMetadata, has_metadata_);
    }
    if (place_ == Place::kIndex && key_ == kWeightMap) {
      return EnterOnce(Place::kWeightMap, has_weight_map_);
    }
    return Unexpected("an object") && StartIgnored();
  }

  bool end_object() override {
    if (place_ == Place::kIgnored) return EndIgnored();
    place_ = Place::kIndex;
    return true;
  }

  bool start_array(size_t) override {
    return Unexpected("an array") && StartIgnored();
  }

  bool end_array() override { return EndIgnored(); }

  bool key(std::string& key) override {
    if (place_ != Place::kIgnored) key_ = std::move(key);
    return true;
  }

 private:
  enum class Place { kStart, kIndex, kMetadata, kWeightMap, kIgnored };

  bool IsTotalSize() const {
    return place_ == Place::kMetadata && key_ == kTotalSize;
  }

  bool Enter(Place place) {
    place_ = place;
    return true;
  }

  bool EnterOnce(Place place, bool& was_there) {
    if (!std::exchange(was_there, true)) return Enter(place);
    return Error(absl::StrCat("the index has ", QuoteName(key_), " twice"));
  }

  bool StartIgnored() {
    if (depth_ == 0) ignored_in_ = std::exchange(place_, Place::kIgnored);
    if (++depth_ <= kMaxDepth) return true;
    return Error(absl::StrCat("the index is nested more than ", kMaxDepth,
                              " levels deep"));
  }

  bool EndIgnored() {
    if (--depth_ == 0) place_ = ignored_in_;
    return true;
  }

  bool Unexpected(absl::string_view value) override {
    switch (place_) {
      case Place::kStart:
        return Error(
            absl::StrCat("the index must be a JSON object, got ", value));
      case Place::kIndex:
        if (key_ != kMetadata && key_ != kWeightMap) return true;
        return Error(
            absl::StrCat(QuoteName(key_), " must be an object, got ", value));
      case Place::kWeightMap:
        return Error(absl::StrCat(kWeightMap, " ", QuoteName(key_),
                                  " must be a string, got ", value));
      case Place::kMetadata:
      case Place::kIgnored:
        return true;
    }
    return false;
  }

  SafetensorsIndex index_;
  bool has_metadata_ = false;
  bool has_weight_map_ = false;

  Place place_ = Place::kStart;
  std::string key_;            // The current one of any place but kIgnored.
  size_t depth_ = 0;           // Of the current value in what is ignored.
  Place ignored_in_ = place_;  // Where what is ignored began.
};

}  // namespace

absl::StatusOr<SafetensorsIndex> ParseSafetensorsIndex(absl::string_view json) {
  if (json.size() > kMaxSafetensorsIndexSize) {
    return absl::DataLossError(SizeError(json.size()));
  }
  IndexHandler handler;
  LORA_RETURN_IF_ERROR(handler.Parse(json));
  if (handler.index().weight_map.empty()) {
    return absl::DataLossError(
        absl::StrCat("its ", kWeightMap, " names no tensor"));
  }
  return std::move(handler.index());
}

absl::StatusOr<std::string> SafetensorsIndexJson(
    const SafetensorsIndex& index) {
  if (index.weight_map.empty()) {
    return absl::InvalidArgumentError("an index must name a tensor");
  }
  nlohmann::json json;
  json[kMetadata] = nlohmann::json::object();
  if (index.total_size.has_value()) {
    json[kMetadata][kTotalSize] = *index.total_size;
  }
  for (const auto& [tensor, file] : index.weight_map) {
    if (!IsPlainFileName(file)) {
      return absl::InvalidArgumentError(FileNameError(tensor, file));
    }
    json[kWeightMap][tensor] = file;
  }
  std::string text;
  try {
    text = json.dump(/*indent=*/2, ' ', /*ensure_ascii=*/true) + "\n";
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the name of a tensor or a file is not UTF-8: ", error.what()));
  }
  if (text.size() > kMaxSafetensorsIndexSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("the index can't be written: ", SizeError(text.size())));
  }
  return text;
}

}  // namespace trainer_lora::distributed::internal
