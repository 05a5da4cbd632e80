#include "lora/internal/adapter_config.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/internal/json_handler.h"
#include "nlohmann/json.hpp"
#include "re2/re2.h"
#include "re2/stringpiece.h"

namespace trainer_lora::lora::internal {
namespace {

constexpr size_t kMaxPatterns = 100'000;

// Of a pattern: its bytes, of which RE2 makes up to ten thousand times as many
// (\pL is a list of ranges), and its instructions in RE2, far more of which
// than this would not fit into its cache.
constexpr size_t kMaxPatternSize = 10'000;

// The instructions of all patterns. A short one can repeat itself a thousand
// times.
constexpr int64_t kMaxProgramSize = 10'000'000;

// What is left alone may be nested, but need not be followed without end.
constexpr size_t kMaxDepth = 64;

// --- Reading -----------------------------------------------------------------

using Json = nlohmann::json;

// The entries of a rank_pattern or alpha_pattern, as Python keeps them: of two
// equal keys the last value, at the place of the first.
class Patterns {
 public:
  // What is no number is an error only if the object counts.
  using Entry = std::pair<std::string, std::optional<double>>;

  void Set(const std::string& key, std::optional<double> number) {
    if (IsFull()) return;
    const auto [place, is_new] = places_.try_emplace(key, entries_.size());
    if (is_new) {
      entries_.emplace_back(key, number);
    } else {
      entries_[place->second].second = number;
    }
  }

  // Whether there are more than may be.
  bool IsFull() const { return entries_.size() > kMaxPatterns; }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
  std::map<std::string, size_t> places_;  // Indices of entries_.
};

// What a file has under the keys that are read: of two equal ones the last.
struct Document {
  // Null if there is none; of an object or array the kind alone.
  std::map<std::string, Json, std::less<>> values = {
      {"peft_type", nullptr},
      {"use_qalora", nullptr},
      {"use_dora", nullptr},
      {"use_rslora", nullptr},
      {"r", nullptr},
      {"lora_alpha", nullptr},
      {"rank_pattern", nullptr},
      {"alpha_pattern", nullptr}};
  std::map<std::string, Patterns, std::less<>> patterns = {
      {"rank_pattern", {}}, {"alpha_pattern", {}}};
};

class ConfigHandler : public distributed::internal::JsonHandler {
 public:
  ConfigHandler() : JsonHandler("it") {}

  Document& document() { return document_; }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(int64_t value) override { return Add(value); }
  bool number_unsigned(uint64_t value) override { return Add(value); }
  bool number_float(double value, const std::string&) override {
    return Add(value);
  }
  bool string(std::string& value) override { return Add(std::move(value)); }

  bool start_object(size_t) override { return Start(Json::object()); }
  bool end_object() override { return End(); }
  bool start_array(size_t) override { return Start(Json::array()); }
  bool end_array() override { return End(); }

  bool key(std::string& key) override {
    if (depth_ == 1) {
      const auto value = document_.values.find(key);
      value_ = value == document_.values.end() ? nullptr : &value->second;
      const auto patterns = document_.patterns.find(key);
      patterns_ =
          patterns == document_.patterns.end() ? nullptr : &patterns->second;
    } else if (depth_ == 2) {
      pattern_ = std::move(key);
    }
    return true;
  }

  bool parse_error(size_t position, const std::string& token,
                   const Json::exception& error) override {
    if (dynamic_cast<const Json::out_of_range*>(&error) != nullptr) {
      return Error("it has a number that is out of range");
    }
    return JsonHandler::parse_error(position, token, error);
  }

 private:
  bool Add(Json value) {
    if (depth_ == 0 && !value.is_object()) return Error("not a JSON object");
    if (depth_ == 1 && value_ != nullptr) {
      *value_ = std::move(value);
      if (patterns_ != nullptr) *patterns_ = {};
    } else if (depth_ == 2 && patterns_ != nullptr && value_->is_object()) {
      patterns_->Set(pattern_, value.is_number()
                                   ? std::make_optional(value.get<double>())
                                   : std::nullopt);
    }
    return true;
  }

  bool Start(Json empty) {
    if (!Add(std::move(empty))) return false;
    if (++depth_ <= kMaxDepth) return true;
    return Error(
        absl::StrCat("it is nested more than ", kMaxDepth, " levels deep"));
  }

  bool End() {
    --depth_;
    return true;
  }

  bool Unexpected(absl::string_view) override { return true; }

  Document document_;
  size_t depth_ = 0;
  // Those of the current key of the file; null if it is not read.
  Json* value_ = nullptr;
  Patterns* patterns_ = nullptr;
  std::string pattern_;  // The current key of an object in the file.
};

absl::StatusOr<Document> ParseObject(absl::string_view json) {
  if (json.size() > kMaxAdapterConfigBytes) {
    return absl::DataLossError(absl::StrCat(
        "it is larger than ", kMaxAdapterConfigBytes >> 20, " MiB"));
  }
  ConfigHandler handler;
  LORA_RETURN_IF_ERROR(handler.Parse(json));
  return std::move(handler.document());
}

absl::StatusOr<bool> ReadFlag(const Document& file, const char* key) {
  const Json& value = file.values.at(key);
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  return absl::DataLossError(absl::StrCat(key, " must be true or false"));
}

// `key` of `pattern_key`, for messages.
std::string EntryName(const char* pattern_key, const std::string& key) {
  return absl::StrCat(pattern_key, ".",
                      config::Printable(config::Shorten(key, 200)));
}

// The numbers of layers, as PEFT resolves them. One pattern after the other:
// each takes memory when it matches. `program_size` is that of the patterns so
// far.
absl::StatusOr<std::vector<double>> ReadNumbers(
    const Document& file, const char* common_key, const char* pattern_key,
    absl::Span<const std::string> layer_names, int64_t& program_size) {
  const Json& common = file.values.at(common_key);
  if (!common.is_number()) {
    return absl::DataLossError(absl::StrCat(common_key, " must be a number"));
  }
  std::vector<double> numbers(layer_names.size(), common.get<double>());
  const Json& value = file.values.at(pattern_key);
  if (!value.is_null() && !value.is_object()) {
    return absl::DataLossError(absl::StrCat(pattern_key, " must be an object"));
  }
  const Patterns& patterns = file.patterns.at(pattern_key);
  if (patterns.IsFull()) {
    return absl::DataLossError(absl::StrCat(pattern_key, " has more than ",
                                            kMaxPatterns, " patterns"));
  }
  std::vector<size_t> unmatched(layer_names.size());
  std::iota(unmatched.begin(), unmatched.end(), 0);
  for (const auto& [key, number] : patterns.entries()) {
    if (!number.has_value()) {
      return absl::DataLossError(
          absl::StrCat(EntryName(pattern_key, key), " must be a number"));
    }
    const auto error = [&, &key = key](absl::string_view what) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the pattern ", EntryName(pattern_key, key), " is ", what));
    };
    if (key.size() > kMaxPatternSize) return error("too long");
    const RE2 pattern(absl::StrCat("(?:.*\\.)?(?:", key, ")"), RE2::Quiet);
    if (!pattern.ok()) {
      return error(
          absl::StrCat("not supported: ", config::Printable(pattern.error())));
    }
    program_size += pattern.ProgramSize();
    if (pattern.ProgramSize() > kMaxPatternSize) return error("too complex");
    if (program_size > kMaxProgramSize) {
      return error("too complex, together with those before it");
    }
    const auto take = [&, &number = number](size_t layer) {
      const re2::StringPiece name(layer_names[layer]);
      if (!RE2::FullMatch(name, pattern)) return false;
      numbers[layer] = *number;
      return true;
    };
    unmatched.erase(std::remove_if(unmatched.begin(), unmatched.end(), take),
                    unmatched.end());
  }
  return numbers;
}

// --- Writing -----------------------------------------------------------------

// In PEFT's order.
using OrderedJson = nlohmann::ordered_json;

const char* BiasName(config::BiasTraining bias) {
  switch (bias) {
    case config::BiasTraining::kNone:
      return "none";
    case config::BiasTraining::kLoraOnly:
      return "lora_only";
    case config::BiasTraining::kAll:
      return "all";
  }
  return "none";
}

// PEFT matches a list of names as suffixes, and would adapt `b.a.q` for `a.q`;
// a string is a regular expression for the full name.
std::string ExactTargetPattern(const std::vector<AdapterLayer>& layers) {
  return absl::StrJoin(layers, "|",
                       [](std::string* out, const AdapterLayer& layer) {
                         out->append(RE2::QuoteMeta(layer.name));
                       });
}

// PEFT's own type for alpha is an integer; a fraction works all the same.
OrderedJson NumberOf(double value) {
  if (value == std::floor(value) && value < 1e15) {
    return static_cast<int64_t>(value);
  }
  return value;
}

// A rank_pattern or alpha_pattern: what the layers have that the first does
// not. PEFT lets a key match at the end of a name, so each is anchored.
template <typename T>
OrderedJson PatternOf(const std::vector<AdapterLayer>& layers,
                      T AdapterLayer::*number) {
  OrderedJson pattern = OrderedJson::object();
  for (const AdapterLayer& layer : layers) {
    if (layer.*number == layers.front().*number) continue;
    pattern["^" + RE2::QuoteMeta(layer.name)] = NumberOf(layer.*number);
  }
  return pattern;
}

OrderedJson StringOrNull(const std::string& text) {
  return text.empty() ? OrderedJson(nullptr) : OrderedJson(text);
}

}  // namespace

absl::StatusOr<AdapterConfig> AdapterConfig::Parse(
    absl::string_view json, absl::Span<const std::string> layer_names) {
  LORA_ASSIGN_OR_RETURN(const Document file, ParseObject(json));
  if (file.values.at("peft_type") != "LORA") {
    return absl::FailedPreconditionError("peft_type is not LORA");
  }
  LORA_ASSIGN_OR_RETURN(const bool use_qalora, ReadFlag(file, "use_qalora"));
  if (use_qalora) {
    return absl::FailedPreconditionError("use_qalora is not supported");
  }
  AdapterConfig config;
  LORA_ASSIGN_OR_RETURN(config.use_dora_, ReadFlag(file, "use_dora"));
  LORA_ASSIGN_OR_RETURN(config.use_rslora_, ReadFlag(file, "use_rslora"));
  int64_t program_size = 0;
  LORA_ASSIGN_OR_RETURN(config.ranks_, ReadNumbers(file, "r", "rank_pattern",
                                                   layer_names, program_size));
  LORA_ASSIGN_OR_RETURN(config.alphas_,
                        ReadNumbers(file, "lora_alpha", "alpha_pattern",
                                    layer_names, program_size));
  return config;
}

absl::StatusOr<std::string> AdapterConfigJson(
    const AdapterDescription& description) {
  const std::vector<AdapterLayer>& layers = description.layers;
  for (const AdapterLayer& layer : layers) {
    if (layer.name.size() > kMaxLayerNameSize) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the name of a layer, ",
          config::Shorten(config::Printable(layer.name)), ", has ",
          layer.name.size(), " bytes, where adapter_config.json takes ",
          kMaxLayerNameSize));
    }
  }
  OrderedJson config;
  config["peft_type"] = "LORA";
  config["task_type"] = StringOrNull(description.task_type);
  config["base_model_name_or_path"] =
      StringOrNull(description.base_model_name_or_path);
  config["inference_mode"] = true;
  config["r"] = layers.front().rank;
  config["lora_alpha"] = NumberOf(layers.front().alpha);
  config["target_modules"] = ExactTargetPattern(layers);
  config["lora_dropout"] = description.dropout;
  config["bias"] = BiasName(description.bias);
  config["fan_in_fan_out"] = false;
  config["init_lora_weights"] = true;
  config["modules_to_save"] = nullptr;
  config["rank_pattern"] = PatternOf(layers, &AdapterLayer::rank);
  config["alpha_pattern"] = PatternOf(layers, &AdapterLayer::alpha);
  config["use_dora"] = description.use_dora;
  config["use_rslora"] = description.use_rslora;
  try {
    return config.dump(2) + "\n";
  } catch (const OrderedJson::type_error&) {
    return absl::InvalidArgumentError(
        "the name of a layer, the task_type or the base_model_name_or_path is "
        "not UTF-8, which JSON must be");
  }
}

}  // namespace trainer_lora::lora::internal
