// Overrides of single values of a YAML file, as a command line gives them:
//
//   models.student.lora.rank=32
//   models.student.lora.target_modules=[to_q, to_k]
//   training.checkpoint.resume_from=null
//
// The path is the keys from the root on, with dots between them; the value
// after the first = is YAML, by the rules of the file, and none at all is null.
// A mapping that is missing on the way is made; a key that is there keeps its
// place. TrainerConfig::Load() takes such overrides; for other files:
//
//   YamlErrors errors("other.yaml");
//   root = ApplyOverrides(root, {"steps=100"}, /*file_lines=*/12,
//                         /*closed_mapping=*/"", &errors);
#ifndef TRAINER_LORA_CONFIG_YAML_OVERRIDES_H_
#define TRAINER_LORA_CONFIG_YAML_OVERRIDES_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/yaml_reader.h"
#include "yaml-cpp/yaml.h"

namespace trainer_lora::config {

// A copy of `root` with `overrides`, of which the later win; the other users of
// an alias on the way keep their value. `file_lines` is the number of lines of
// the file. `closed_mapping` is a key of the root whose mapping gets no new
// keys that way: there, a typo is an error.
// Adds to `errors` the text of each override as a source
// (YamlErrors::AddSource) and what is wrong with it: no =, an empty part of the
// path, a path through something that is no mapping, a value that is no valid
// YAML. Such an override is left out of the result.
YAML::Node ApplyOverrides(const YAML::Node& root,
                          const std::vector<std::string>& overrides,
                          int file_lines, absl::string_view closed_mapping,
                          YamlErrors* errors);

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_YAML_OVERRIDES_H_
