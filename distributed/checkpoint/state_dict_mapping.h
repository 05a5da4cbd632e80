// Maps the keys of a checkpoint to the names that a model of another family
// has for the same tensors, by ordered rules. Several tensors may be the parts
// of one, as the three projections of a fused layer are:
//
//   absl::StatusOr<StateDictMapping> mapping = StateDictMapping::Create({
//       {R"((.*)\.attn1\.to_q\.(.*))", R"(\1.to_qkv.\2)", 0, 3},
//       {R"((.*)\.attn1\.to_k\.(.*))", R"(\1.to_qkv.\2)", 1, 3},
//       {R"((.*)\.attn1\.to_v\.(.*))", R"(\1.to_qkv.\2)", 2, 3},
//       {R"(proj_out\.(.*))", R"(head.\1)"},
//   });
//   if (!mapping.ok()) return mapping.status();
//   mapping->Map("proj_out.bias");            // head.bias
//   mapping->Map("blocks.0.attn1.to_k.bias");  // blocks.0.to_qkv.bias, 1 of 3
//   mapping->Map("norm.weight");              // itself: no rule matches
#ifndef TRAINER_LORA_DISTRIBUTED_CHECKPOINT_STATE_DICT_MAPPING_H_
#define TRAINER_LORA_DISTRIBUTED_CHECKPOINT_STATE_DICT_MAPPING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"

namespace trainer_lora::distributed {

// How the keys of one shape become names.
struct MappingRule {
  // A regular expression (RE2) that matches a key from end to end.
  std::string pattern;

  // The name, with \1 to \9 for what the pattern's groups matched, \0 for the
  // whole key and \\ for a backslash.
  std::string replacement;

  // The tensor is the `part`-th, from 0, of the `num_parts` that make the named
  // one when they are concatenated in this order along dimension 0.
  int64_t part = 0;
  // At least 1: the tensor is the whole one. At most kMaxParts.
  int64_t num_parts = 1;
};

// More parts of one tensor are taken for a mistake.
inline constexpr int64_t kMaxParts = 1 << 16;

// Where a key leads: the name of a tensor, and which part of it the key holds.
struct MappedKey {
  std::string name;       // Of the whole tensor.
  int64_t part = 0;       // As in MappingRule.
  int64_t num_parts = 1;  // As in MappingRule.
  // Of KeyResolver: the alias that led to the name; empty if none did.
  std::string alias = {};
};

// An immutable value; cheap to copy, safe to share between threads.
class StateDictMapping {
 public:
  // Without rules: each key is its own name.
  StateDictMapping() = default;

  // Of the rules that match a key the first applies, once: a name is not mapped
  // again. kInvalidArgument, naming the rule by its number from 1 and its
  // pattern, if either text is empty, the pattern is not a regular expression,
  // the replacement asks for a group that the pattern lacks, or the part is
  // none of num_parts, which are kMaxParts at most.
  static absl::StatusOr<StateDictMapping> Create(
      std::vector<MappingRule> rules);

  // The name for `key`: the key itself, whole, where no rule matches. Takes
  // time linear in the key, whatever the patterns.
  MappedKey Map(absl::string_view key) const;

 private:
  class Rules;

  explicit StateDictMapping(std::shared_ptr<const Rules> rules);

  std::shared_ptr<const Rules> rules_;  // Null without rules.
};

}  // namespace trainer_lora::distributed

#endif  // TRAINER_LORA_DISTRIBUTED_CHECKPOINT_STATE_DICT_MAPPING_H_
