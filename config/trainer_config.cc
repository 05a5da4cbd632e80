#include "config/trainer_config.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "config/yaml_overrides.h"
#include "config/yaml_reader.h"
#include "config/yaml_writer.h"

namespace trainer_lora::config {
namespace {

absl::StatusOr<std::string> ReadText(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status status =
      std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat(path, ": no such file"));
  }
  if (std::filesystem::is_directory(status)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is a directory, not a YAML file"));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::ErrnoToStatus(errno, absl::StrCat(path, ": can't be opened"));
  }
  // One byte more than allowed is enough for ParseYaml to refuse the rest.
  std::string text(kMaxYamlBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return absl::UnavailableError(absl::StrCat(path, ": can't be read"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

RoleConfig ReadRole(const YamlMapping::Entry& entry, YamlErrors* errors) {
  RoleConfig role;
  role.name = entry.key;
  role.node = entry.value;
  const std::string path =
      absl::StrCat("models.", Printable(Shorten(role.name)));
  YamlMapping mapping(entry.value, path, errors);
  mapping.Read("trainable", &role.trainable);
  const YAML::Node trainable = mapping.ReadNode("trainable");
  const YAML::Node lora = mapping.ReadNode("lora");
  role.lora = LoraConfig::Coerce(lora, absl::StrCat(path, ".lora"), errors);
  if (role.lora && role.lora->enable && !role.trainable) {
    // If an override is to blame, it is named.
    YAML::Mark mark = lora.Mark();
    for (const YAML::Node& cause : {trainable, lora["enable"]}) {
      if (!errors->IsInFile(cause.Mark())) mark = cause.Mark();
    }
    errors->Add(mark,
                absl::StrCat(path, ".lora is enabled but ", path,
                             ".trainable is false: set trainable to true, or "
                             "enable to false"));
  }
  return role;
}

// The tree of the whole config, with the roles as they were understood. It has
// no node of the config's: yaml-cpp would keep what is added to one as long as
// the other.
YAML::Node ResolvedTree(const TrainerConfig& config) {
  YAML::Node models(YAML::NodeType::Map);
  for (const RoleConfig& role : config.models) {
    YAML::Node node = WithField(YAML::Clone(role.node), "trainable",
                                YAML::Node(role.trainable));
    if (role.lora) node = WithField(node, "lora", role.lora->ToYaml());
    models.force_insert(YamlString(role.name), node);
  }
  return WithField(YAML::Clone(config.root), "models", models);
}

}  // namespace

absl::StatusOr<TrainerConfig> TrainerConfig::Load(
    const std::string& path, const std::vector<std::string>& overrides) {
  LORA_ASSIGN_OR_RETURN(const std::string text, ReadText(path));
  return Parse(text, path, overrides);
}

absl::StatusOr<TrainerConfig> TrainerConfig::Parse(
    absl::string_view text, absl::string_view file,
    const std::vector<std::string>& overrides) {
  TrainerConfig config;
  config.file = std::string(file);
  LORA_ASSIGN_OR_RETURN(const YAML::Node document, ParseYaml(text, file));

  YamlErrors errors(file);
  const int lines = 1 + std::count(text.begin(), text.end(), '\n');
  config.root = ApplyOverrides(document, overrides, lines, "models", &errors);
  LORA_RETURN_IF_ERROR(errors.ToStatus());
  config.errors = errors;

  YamlMapping root(config.root, "", &errors);
  YamlMapping models = root.ReadMapping("models");
  if (errors.size() == 0 && models.entries().empty()) {
    root.Refuse("models", "a mapping with at least one role");
  }
  for (const YamlMapping::Entry& entry : models.entries()) {
    if (entry.value.IsNull()) {
      models.Refuse(entry.key, "a mapping");
    } else {
      config.models.push_back(ReadRole(entry, &errors));
    }
  }
  LORA_RETURN_IF_ERROR(errors.ToStatus());
  return config;
}

std::string TrainerConfig::ToYaml() const {
  return WriteYaml(ResolvedTree(*this));
}

bool operator==(const TrainerConfig& a, const TrainerConfig& b) {
  return SameYaml(ResolvedTree(a), ResolvedTree(b));
}

}  // namespace trainer_lora::config
