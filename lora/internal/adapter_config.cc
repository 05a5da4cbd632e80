#include "lora/internal/adapter_config.h"

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "nlohmann/json.hpp"
#include "re2/re2.h"
#include "re2/stringpiece.h"

namespace trainer_lora::lora::internal {
namespace {

// Each becomes a regular expression of some kilobytes.
constexpr size_t kMaxPatterns = 100'000;

// --- Reading -----------------------------------------------------------------

using Json = nlohmann::json;

// A JSON object, and the keys of the objects in it in the order of the text,
// which Json forgets. (ordered_json takes quadratic time.)
struct Document {
  Json root;
  std::map<std::string, std::vector<std::string>, std::less<>> keys;
};

// The value of `key`; null if there is none.
const Json& ValueOf(const Document& document, const char* key) {
  static const auto& null = *new Json(nullptr);
  const auto found = document.root.find(key);
  return found == document.root.end() ? null : *found;
}

absl::StatusOr<Document> ParseObject(absl::string_view json) {
  if (json.size() > kMaxAdapterConfigBytes) {
    return absl::DataLossError(absl::StrCat(
        "it is larger than ", kMaxAdapterConfigBytes >> 20, " MiB"));
  }
  // The parser would skip a byte order mark, and take a zero byte for the end.
  if (absl::StartsWith(json, "\xef\xbb\xbf")) {
    return absl::DataLossError("it begins with a byte order mark");
  }
  if (const size_t zero = json.find('\0'); zero != json.npos) {
    return absl::DataLossError(
        absl::StrCat("it has a zero byte at its byte ", zero));
  }
  Document document;
  // Of the object in the root; null if that is an array.
  std::vector<std::string>* keys = nullptr;
  const auto note_key = [&](int depth, Json::parse_event_t event,
                            const Json& key) {
    if (event != Json::parse_event_t::key) return true;
    if (depth == 1) {
      keys = &document.keys[key.get<std::string>()];
      keys->clear();  // Of two equal keys the last counts.
    } else if (depth == 2 && keys != nullptr) {
      keys->push_back(key.get<std::string>());
    }
    return true;
  };
  try {
    document.root = Json::parse(json.begin(), json.end(), note_key);
  } catch (const Json::parse_error& error) {
    return absl::DataLossError(
        absl::StrCat("not valid JSON at its byte ", error.byte));
  } catch (const Json::exception&) {
    return absl::DataLossError("it has a number that is out of range");
  }
  if (!document.root.is_object()) {
    return absl::DataLossError("not a JSON object");
  }
  return document;
}

absl::StatusOr<bool> ReadFlag(const Document& file, const char* key) {
  const Json& value = ValueOf(file, key);
  if (value.is_null()) return false;
  if (value.is_boolean()) return value.get<bool>();
  return absl::DataLossError(absl::StrCat(key, " must be true or false"));
}

// `key` of `pattern_key`, for messages.
std::string EntryName(const char* pattern_key, const std::string& key) {
  return absl::StrCat(pattern_key, ".",
                      config::Printable(config::Shorten(key, 200)));
}

absl::StatusOr<std::unique_ptr<const RE2>> CompilePattern(
    const char* pattern_key, const std::string& key) {
  auto pattern = std::make_unique<const RE2>(
      absl::StrCat("(?:.*\\.)?(?:", key, ")"), RE2::Quiet);
  if (pattern->ok()) return pattern;
  return absl::FailedPreconditionError(
      absl::StrCat("the pattern ", EntryName(pattern_key, key),
                   " is not supported: ", config::Printable(pattern->error())));
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

// The numbers of one kind, as PEFT resolves them.
struct AdapterConfig::PerLayerNumber {
  static absl::StatusOr<PerLayerNumber> Read(const Document& file,
                                             const char* common_key,
                                             const char* pattern_key) {
    PerLayerNumber number;
    const Json& common = ValueOf(file, common_key);
    if (!common.is_number()) {
      return absl::DataLossError(absl::StrCat(common_key, " must be a number"));
    }
    number.common = common.get<double>();
    const Json& entries = ValueOf(file, pattern_key);
    if (entries.is_null()) return number;
    if (!entries.is_object()) {
      return absl::DataLossError(
          absl::StrCat(pattern_key, " must be an object"));
    }
    const auto& keys = file.keys.find(pattern_key)->second;
    if (keys.size() > kMaxPatterns) {
      return absl::DataLossError(absl::StrCat(pattern_key, " has more than ",
                                              kMaxPatterns, " patterns"));
    }
    for (const std::string& key : keys) {
      const Json& value = entries.at(key);
      if (!value.is_number()) {
        return absl::DataLossError(
            absl::StrCat(EntryName(pattern_key, key), " must be a number"));
      }
      LORA_ASSIGN_OR_RETURN(std::unique_ptr<const RE2> pattern,
                            CompilePattern(pattern_key, key));
      number.patterns.emplace_back(std::move(pattern), value.get<double>());
    }
    return number;
  }

  double For(absl::string_view layer_name) const {
    const re2::StringPiece name(layer_name.data(), layer_name.size());
    for (const auto& [pattern, value] : patterns) {
      if (RE2::FullMatch(name, *pattern)) return value;
    }
    return common;
  }

  double common = 0;
  std::vector<std::pair<std::unique_ptr<const RE2>, double>> patterns;
};

absl::StatusOr<AdapterConfig> AdapterConfig::Parse(absl::string_view json) {
  LORA_ASSIGN_OR_RETURN(const Document file, ParseObject(json));
  if (ValueOf(file, "peft_type") != "LORA") {
    return absl::FailedPreconditionError("peft_type is not LORA");
  }
  LORA_ASSIGN_OR_RETURN(const bool use_qalora, ReadFlag(file, "use_qalora"));
  if (use_qalora) {
    return absl::FailedPreconditionError("use_qalora is not supported");
  }
  AdapterConfig config;
  LORA_ASSIGN_OR_RETURN(config.use_dora_, ReadFlag(file, "use_dora"));
  LORA_ASSIGN_OR_RETURN(config.use_rslora_, ReadFlag(file, "use_rslora"));
  LORA_ASSIGN_OR_RETURN(PerLayerNumber rank,
                        PerLayerNumber::Read(file, "r", "rank_pattern"));
  LORA_ASSIGN_OR_RETURN(
      PerLayerNumber alpha,
      PerLayerNumber::Read(file, "lora_alpha", "alpha_pattern"));
  config.rank_ = std::make_shared<const PerLayerNumber>(std::move(rank));
  config.alpha_ = std::make_shared<const PerLayerNumber>(std::move(alpha));
  return config;
}

double AdapterConfig::RankOf(absl::string_view layer_name) const {
  return rank_->For(layer_name);
}

double AdapterConfig::AlphaOf(absl::string_view layer_name) const {
  return alpha_->For(layer_name);
}

absl::StatusOr<std::string> AdapterConfigJson(
    const AdapterDescription& description) {
  const std::vector<AdapterLayer>& layers = description.layers;
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
