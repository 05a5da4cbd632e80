#include "distributed/checkpoint/load_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "config/internal/message_text.h"
#include "config/internal/status_macros.h"
#include "distributed/checkpoint/key_aliases.h"
#include "distributed/checkpoint/key_resolver.h"
#include "distributed/checkpoint/safetensors_checkpoint.h"
#include "distributed/checkpoint/safetensors_file.h"
#include "distributed/checkpoint/state_dict_mapping.h"
#include "distributed/tensor_slice.h"
#include "re2/re2.h"

namespace trainer_lora::distributed {
namespace {

// A gap of so many bytes is read along, as another read would cost as much:
// some 10 us from memory, some 100 us from a disk.
constexpr int64_t kReadCostBytes = 64 << 10;

std::string Describe(TensorDtype dtype, absl::Span<const int64_t> shape) {
  return absl::StrCat(TensorDtypeName(dtype), " [", absl::StrJoin(shape, ", "),
                      "]");
}

bool IsFloatingPoint(TensorDtype dtype) {
  switch (dtype) {
    case TensorDtype::kF8E5M2:
    case TensorDtype::kF8E4M3:
    case TensorDtype::kF8E4M3Fnuz:
    case TensorDtype::kF8E5M2Fnuz:
    case TensorDtype::kF16:
    case TensorDtype::kBF16:
    case TensorDtype::kF32:
    case TensorDtype::kF64:
      return true;
    default:  // F8_E8M0 holds scales, without a sign.
      return false;
  }
}

// Whether a value of type `from` may become one of type `to`.
bool IsConvertible(TensorDtype from, TensorDtype to) {
  return from == to || (IsFloatingPoint(from) && IsFloatingPoint(to));
}

// Regular expressions of which one must match from end to end.
class PatternList {
 public:
  static absl::StatusOr<PatternList> Compile(
      absl::string_view what, const std::vector<std::string>& patterns) {
    PatternList list;
    for (const std::string& pattern : patterns) {
      // Quiet: the status carries the error, RE2 need not log it too.
      auto compiled = std::make_unique<RE2>(pattern, RE2::Quiet);
      if (!compiled->ok()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the ", what, " pattern \"", pattern,
            "\" is not a regular expression: ", compiled->error()));
      }
      list.patterns_.push_back(std::move(compiled));
    }
    return list;
  }

  bool Matches(const std::string& text) const {
    return std::any_of(
        patterns_.begin(), patterns_.end(),
        [&](const auto& pattern) { return RE2::FullMatch(text, *pattern); });
  }

 private:
  std::vector<std::unique_ptr<RE2>> patterns_;
};

// The keys that lead to one name of the model, by their part.
struct Assignment {
  static constexpr size_t kNoSource = -1;

  std::string name;
  size_t target;
  std::vector<size_t> sources;  // One a part.
};

// The elements of `slice` of a source of `source_shape`, which begin at row
// `local_row` of a local tensor whose other dimensions are the slice's.
PlannedCopy MakeCopy(absl::Span<const int64_t> source_shape,
                     const TensorSlice& slice, int64_t local_row) {
  PlannedCopy copy = {};
  // The dimension within which a run lies: those after it are whole.
  int64_t run_dim = static_cast<int64_t>(slice.sizes.size()) - 1;
  while (run_dim > 0 && slice.sizes[run_dim] == source_shape[run_dim]) {
    --run_dim;
  }
  int64_t source_stride = 1;
  int64_t local_stride = 1;
  copy.run_elements = 1;
  copy.num_runs = 1;
  for (int64_t dim = static_cast<int64_t>(slice.sizes.size()) - 1; dim >= 0;
       --dim) {
    copy.source_begin += slice.offsets[dim] * source_stride;
    if (dim == 0) copy.local_begin = local_row * local_stride;
    if (dim >= run_dim) {
      copy.run_elements *= slice.sizes[dim];
    } else if (slice.sizes[dim] > 1) {
      copy.num_runs *= slice.sizes[dim];
      copy.loops.insert(copy.loops.begin(),
                        {slice.sizes[dim], source_stride, local_stride});
    }
    source_stride *= source_shape[dim];
    local_stride *= slice.sizes[dim];
  }
  return copy;
}

// Decides how many runs a read takes, and counts the bytes.
void PlanReads(int64_t element_size, PlannedCopy& copy) {
  const int64_t run_bytes = copy.run_elements * element_size;
  copy.runs_per_read = 1;
  copy.bytes_read = copy.num_runs * run_bytes;
  if (copy.loops.empty()) return;
  const PlannedCopy::Loop& inner = copy.loops.back();
  const int64_t stride_bytes = inner.source_stride * element_size;
  if (stride_bytes - run_bytes >= kReadCostBytes ||
      run_bytes >= kMaxSpannedBytes) {
    return;
  }
  copy.runs_per_read =
      std::min(inner.count, 1 + (kMaxSpannedBytes - run_bytes) / stride_bytes);
  const int64_t reads_per_loop =
      (inner.count + copy.runs_per_read - 1) / copy.runs_per_read;
  copy.bytes_read += copy.num_runs / inner.count *
                     (inner.count - reads_per_loop) *
                     (stride_bytes - run_bytes);
}

class Planner {
 public:
  Planner(absl::Span<const TargetTensor> targets,
          absl::Span<const CheckpointTensor> sources,
          const LoadPlanOptions& options, PatternList ignored,
          PatternList zeros)
      : targets_(targets),
        sources_(sources),
        options_(options),
        ignored_(std::move(ignored)),
        zeros_(std::move(zeros)),
        first_assignments_(targets.size(), Assignment::kNoSource),
        alias_of_source_(sources.size()) {
    target_of_name_.reserve(targets.size());
    assignment_of_name_.reserve(targets.size());
    assignments_.reserve(targets.size());
    for (size_t i = 0; i < targets.size(); ++i) {
      for (const std::string& name : targets[i].names) {
        target_of_name_.emplace(name, i);
      }
    }
  }

  absl::StatusOr<LoadPlan> MakePlan() {
    AssignSources();
    for (const Assignment& assignment : assignments_) {
      CheckAssignment(assignment);
    }
    LORA_RETURN_IF_ERROR(FindValues());
    plan_.sources.resize(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      if (plan_.value_sources[i] == ValueSource::kCheckpoint) SetSources(i);
    }
    plan_.copies = CopiesFor(plan_, targets_, sources_);
    for (const PlannedCopy& copy : plan_.copies) {
      plan_.bytes_read += copy.bytes_read;
    }
    return std::move(plan_);
  }

 private:
  void AssignSources() {
    std::vector<std::string> names;
    names.reserve(targets_.size());
    for (const TargetTensor& target : targets_) {
      names.insert(names.end(), target.names.begin(), target.names.end());
    }
    const KeyResolver resolver(options_.mapping, options_.aliases, names);
    for (size_t i = 0; i < sources_.size(); ++i) {
      const std::string& key = sources_[i].info->name;
      if (absl::EndsWith(key, "_extra_state") || ignored_.Matches(key)) {
        plan_.ignored.push_back(key);
        continue;
      }
      std::optional<MappedKey> mapped = resolver.Resolve(key);
      if (mapped.has_value()) {
        Assign(i, *std::move(mapped));
      } else {
        plan_.unexpected.push_back(key);
        const std::string name = resolver.NameFor(key);
        no_place_.push_back(config::Printable(
            name == key ? key : absl::StrCat(key, " (as ", name, ")")));
      }
    }
  }

  void Assign(size_t source, MappedKey mapped) {
    alias_of_source_[source] = std::move(mapped.alias);
    const auto [found, is_new] =
        assignment_of_name_.try_emplace(mapped.name, assignments_.size());
    if (is_new) {
      const size_t target = target_of_name_.at(mapped.name);
      if (first_assignments_[target] == Assignment::kNoSource) {
        first_assignments_[target] = assignments_.size();
      }
      assignments_.push_back(
          {std::move(mapped.name), target,
           std::vector<size_t>(mapped.num_parts, Assignment::kNoSource)});
    }
    Assignment& assignment = assignments_[found->second];
    if (assignment.sources.size() != mapped.num_parts) {
      given_twice_.push_back(absl::StrCat(
          assignment.name, " (by ", PrintableKey(source), ", one of ",
          mapped.num_parts, ", beside others that are of ",
          assignment.sources.size(), ")"));
      return;
    }
    size_t& place = assignment.sources[mapped.part];
    if (place == Assignment::kNoSource) {
      place = source;
    } else if (!HaveAliases(place, source)) {
      given_twice_.push_back(absl::StrCat(assignment.name, " (by the keys ",
                                          PrintableKey(place), " and ",
                                          PrintableKey(source), ")"));
    }
  }

  // Whether each of two sources has an alias of its own. These are a layer that
  // the checkpoint holds twice; of other keys it can't be known which one is
  // meant.
  bool HaveAliases(size_t a, size_t b) const {
    return !alias_of_source_[a].empty() && !alias_of_source_[b].empty() &&
           alias_of_source_[a] != alias_of_source_[b];
  }

  std::string PrintableKey(size_t source) const {
    return config::Printable(sources_[source].info->name);
  }

  // That the parts are there, and what the target is made of.
  void CheckAssignment(const Assignment& assignment) {
    const TargetTensor& target = targets_[assignment.target];
    const std::vector<int64_t>& wanted = target.global_shape;
    std::vector<std::string> found;
    bool fits = true;
    int64_t rows = 0;
    for (size_t part = 0; part < assignment.sources.size(); ++part) {
      const size_t source = assignment.sources[part];
      if (source == Assignment::kNoSource) {
        incomplete_.push_back(absl::StrCat(assignment.name, " (part ", part,
                                           " of ", assignment.sources.size(),
                                           ", counted from 0)"));
        return;
      }
      const TensorInfo& info = *sources_[source].info;
      fits = fits && IsConvertible(info.dtype, target.dtype);
      if (assignment.sources.size() == 1) {
        fits = fits && info.shape == wanted;
      } else {
        fits = fits && !wanted.empty() && info.shape.size() == wanted.size() &&
               std::equal(wanted.begin() + 1, wanted.end(),
                          info.shape.begin() + 1);
        if (fits) rows += info.shape[0];
      }
      found.push_back(Describe(info.dtype, info.shape));
    }
    if (assignment.sources.size() > 1) fits = fits && rows == wanted[0];
    if (fits) return;
    mismatched_.push_back(
        absl::StrCat(assignment.name, " is ", absl::StrJoin(found, " + "),
                     " in the checkpoint and ", Describe(target.dtype, wanted),
                     " in the model"));
  }

  // Decides where each target's value comes from, or fails with all problems.
  absl::Status FindValues() {
    for (size_t i = 0; i < targets_.size(); ++i) {
      plan_.value_sources.push_back(FindValue(i));
    }
    std::vector<std::string> problems;
    const auto add = [&](absl::string_view what,
                         const std::vector<std::string>& names) {
      if (names.empty()) return;
      problems.push_back(absl::StrCat(what, ": ", absl::StrJoin(names, ", ")));
    };
    if (options_.strict) {
      add("keys that the model has no place for (see ignored_patterns)",
          no_place_);
    }
    add("missing, and not known to the initializer", missing_);
    add("missing a part", incomplete_);
    add("given twice", given_twice_);
    add("of another shape or type", mismatched_);
    if (problems.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrJoin(problems, "; "));
  }

  ValueSource FindValue(size_t target) {
    if (first_assignments_[target] != Assignment::kNoSource) {
      return ValueSource::kCheckpoint;
    }
    const std::vector<std::string>& names = targets_[target].names;
    if (options_.is_initializable != nullptr &&
        std::any_of(names.begin(), names.end(), options_.is_initializable)) {
      return ValueSource::kInitializer;
    }
    if (std::any_of(names.begin(), names.end(), [&](const std::string& name) {
          return zeros_.Matches(name);
        })) {
      return ValueSource::kZero;
    }
    const absl::string_view key = options_.aliases.Reverse(names[0]);
    missing_.push_back(key == names[0]
                           ? names[0]
                           : absl::StrCat(names[0], " (key ", key, ")"));
    return ValueSource::kZero;
  }

  void SetSources(size_t target) {
    plan_.sources[target] =
        std::move(assignments_[first_assignments_[target]].sources);
    std::vector<KeyPart>& origin = plan_.origins[targets_[target].names[0]];
    for (const size_t source : plan_.sources[target]) {
      const TensorInfo& info = *sources_[source].info;
      origin.push_back({info.name, info.shape.empty() ? -1 : info.shape[0]});
    }
  }

  const absl::Span<const TargetTensor> targets_;
  const absl::Span<const CheckpointTensor> sources_;
  const LoadPlanOptions& options_;
  const PatternList ignored_;
  const PatternList zeros_;

  LoadPlan plan_;
  absl::flat_hash_map<std::string, size_t> target_of_name_;
  std::vector<Assignment> assignments_;
  absl::flat_hash_map<std::string, size_t> assignment_of_name_;
  std::vector<size_t> first_assignments_;     // By target; kNoSource if none.
  std::vector<std::string> alias_of_source_;  // Empty for a key without one.
  std::vector<std::string> no_place_;
  std::vector<std::string> missing_;
  std::vector<std::string> incomplete_;
  std::vector<std::string> given_twice_;
  std::vector<std::string> mismatched_;
};

}  // namespace

std::vector<int64_t> LocalShape(const TargetTensor& target) {
  return ConcatenatedShape(target.slices);
}

int64_t PlannedCopy::SourceBegin(int64_t run) const {
  int64_t begin = source_begin;
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    begin += run % loop->count * loop->source_stride;
    run /= loop->count;
  }
  return begin;
}

int64_t PlannedCopy::LocalBegin(int64_t run) const {
  int64_t begin = local_begin;
  for (auto loop = loops.rbegin(); loop != loops.rend(); ++loop) {
    begin += run % loop->count * loop->local_stride;
    run /= loop->count;
  }
  return begin;
}

int64_t PlannedCopy::ReadEnd(int64_t begin) const {
  if (runs_per_read == 1) return begin + 1;
  const int64_t loop_begin = begin / loops.back().count * loops.back().count;
  return std::min(begin + runs_per_read, loop_begin + loops.back().count);
}

std::vector<PlannedCopy> CopiesFor(const LoadPlan& plan,
                                   absl::Span<const TargetTensor> targets,
                                   absl::Span<const CheckpointTensor> sources) {
  std::vector<PlannedCopy> copies;
  copies.reserve(targets.size());
  for (size_t target = 0; target < targets.size(); ++target) {
    const std::vector<TensorSlice>& slices = targets[target].slices;
    int64_t first_row = 0;  // Of the part, in the whole tensor.
    for (const size_t source : plan.sources[target]) {
      const TensorInfo& info = *sources[source].info;
      const auto add = [&](const TensorSlice& slice, int64_t local_row) {
        PlannedCopy copy = MakeCopy(info.shape, slice, local_row);
        copy.source = source;
        copy.target = target;
        PlanReads(TensorDtypeBits(info.dtype) / 8, copy);
        copies.push_back(std::move(copy));
      };
      if (info.shape.empty()) {
        add(slices[0], 0);
        continue;
      }
      for (const HeldRows& held :
           RowsWithin(slices, first_row, info.shape[0])) {
        add(held.slice, held.local_row);
      }
      first_row += info.shape[0];
    }
  }
  std::sort(copies.begin(), copies.end(),
            [](const PlannedCopy& a, const PlannedCopy& b) {
              return std::tie(a.source, a.source_begin, a.target) <
                     std::tie(b.source, b.source_begin, b.target);
            });
  return copies;
}

std::string LoadPlan::ToString(
    absl::Span<const TargetTensor> targets,
    absl::Span<const CheckpointTensor> sources) const {
  // The copies of each target, in the order of its parts and slices.
  std::vector<std::vector<const PlannedCopy*>> copies_of(targets.size());
  for (const PlannedCopy& copy : copies) {
    copies_of[copy.target].push_back(&copy);
  }
  std::string text = absl::StrCat(
      "load plan: ", targets.size(), " tensors from ", sources.size(),
      " in the checkpoint, ", bytes_read, " bytes to read\n");
  for (size_t i = 0; i < targets.size(); ++i) {
    const TargetTensor& target = targets[i];
    absl::StrAppend(
        &text, "  ", target.names[0], " ",
        Describe(target.dtype, target.global_shape), ", here ",
        absl::StrJoin(target.slices, " + ",
                      [](std::string* out, const TensorSlice& slice) {
                        out->append(slice.ToString());
                      }));
    switch (value_sources[i]) {
      case ValueSource::kCheckpoint:
        absl::StrAppend(&text, copies_of[i].empty() ? " <- nothing" : "");
        break;
      case ValueSource::kInitializer:
        absl::StrAppend(&text, " <- the initializer");
        break;
      case ValueSource::kZero:
        absl::StrAppend(&text, " <- zeros");
        break;
    }
    for (const PlannedCopy* copy : copies_of[i]) {
      const CheckpointTensor& source = sources[copy->source];
      absl::StrAppend(&text, " <- ", config::Printable(source.info->name), " (",
                      TensorDtypeName(source.info->dtype), ", file ",
                      source.file, ": ", copy->num_runs, " x ",
                      copy->run_elements, " elements from ", copy->source_begin,
                      " to ", copy->local_begin, ", ", copy->bytes_read,
                      " bytes read)");
    }
    text.push_back('\n');
  }
  const auto add_keys = [&](absl::string_view what,
                            const std::vector<std::string>& keys) {
    for (const std::string& key : keys) {
      absl::StrAppend(&text, "  ", what, ": ", config::Printable(key), "\n");
    }
  };
  add_keys("ignored", ignored);
  add_keys("no place", unexpected);
  return text;
}

absl::StatusOr<LoadPlan> MakeLoadPlan(
    absl::Span<const TargetTensor> targets,
    absl::Span<const CheckpointTensor> sources,
    const LoadPlanOptions& options) {
  LORA_ASSIGN_OR_RETURN(
      PatternList ignored,
      PatternList::Compile("ignored", options.ignored_patterns));
  LORA_ASSIGN_OR_RETURN(PatternList zeros,
                        PatternList::Compile("zero", options.zero_patterns));
  return Planner(targets, sources, options, std::move(ignored),
                 std::move(zeros))
      .MakePlan();
}

}  // namespace trainer_lora::distributed
