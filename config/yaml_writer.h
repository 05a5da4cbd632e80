// Writes YAML that is read back as what it was: quoted text stays text, numbers
// keep their digits, keys their order.
//
//   YAML::Node optimizer(YAML::NodeType::Map);
//   optimizer["name"] = YamlString("16");       // Quoted, or it were a number.
//   optimizer["learning_rate"] = YamlNumber(2e-6);
//   std::cout << WriteYaml(optimizer);
#ifndef TRAINER_LORA_CONFIG_YAML_WRITER_H_
#define TRAINER_LORA_CONFIG_YAML_WRITER_H_

#include <string>

#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {

// One document for ParseYaml, which reads the same as `root` (see SameYaml) as
// long as the text keeps within its limits. What aliases share is written out
// at each place; comments are not kept.
std::string WriteYaml(const YAML::Node& root);

// A node that is read as exactly this text.
YAML::Node YamlString(absl::string_view text);
// A node that is read as exactly this number.
YAML::Node YamlNumber(double number);

// Whether two trees read the same: equal values of the same type, elements and
// keys in the same order.
bool SameYaml(const YAML::Node& a, const YAML::Node& b);

// A copy of `mapping` (a mapping, or null for none) with `value` under `key`:
// in the place of the value that was there, or else at the end. The other
// values are shared with `mapping`.
YAML::Node WithField(const YAML::Node& mapping, absl::string_view key,
                     const YAML::Node& value);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_YAML_WRITER_H_
