#include "distributed/internal/rank_agreement.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "config/internal/fnv1a.h"
#include "config/internal/status_macros.h"
#include "distributed/internal/run_collective.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"

namespace trainer_lora::distributed::internal {
namespace {

// A rank may lack thousands of parameters; these are enough to see which.
constexpr int kMaxLinesListed = 10;

// The rows that the ranks contribute, as a CPU tensor [size, row.numel()]. The
// row must have one shape on all ranks.
absl::StatusOr<at::Tensor> AllGatherRows(c10d::ProcessGroup& group,
                                         const at::Tensor& row,
                                         const std::string& what) {
  const int64_t size = group.getSize();
  at::Tensor input = row.to(MetadataDevice(group));
  at::Tensor output = at::empty({size * row.numel()}, input.options());
  LORA_RETURN_IF_ERROR(RunCollective(
      group, what, [&] { return group._allgather_base(output, input); }));
  LORA_ASSIGN_OR_RETURN(const at::Tensor rows, ReadResult(group, what, output));
  return rows.view({size, row.numel()});
}

// The text that each rank contributes. `lengths` has an entry a rank.
absl::StatusOr<std::vector<std::string>> AllGatherTexts(
    c10d::ProcessGroup& group, const std::string& text,
    const at::Tensor& lengths, const std::string& what) {
  // Padded to one length, as Gloo gathers equal sizes alone.
  const int64_t length =
      std::max({lengths.max().item<int64_t>(),
                static_cast<int64_t>(text.size()), int64_t{1}});
  at::Tensor padded = at::zeros({length}, at::kByte);
  std::memcpy(padded.data_ptr(), text.data(), text.size());
  LORA_ASSIGN_OR_RETURN(const at::Tensor rows,
                        AllGatherRows(group, padded, what));
  std::vector<std::string> texts;
  for (int64_t rank = 0; rank < group.getSize(); ++rank) {
    texts.emplace_back(reinterpret_cast<const char*>(rows[rank].data_ptr()),
                       lengths[rank].item<int64_t>());
  }
  return texts;
}

// Who wanted what, for the errors of a collective.
std::string Context(int64_t rank, const std::string& group_name,
                    const std::string& what) {
  return absl::StrCat(group_name, ", rank ", rank, ": ", what);
}

// `names` has an entry for each rank there is.
std::string RankNames(const std::vector<int64_t>& ranks,
                      const std::vector<int64_t>& names) {
  return absl::StrCat(
      ranks.size() == 1 ? "rank " : "ranks ",
      absl::StrJoin(ranks, ", ", [&names](std::string* out, int64_t rank) {
        absl::StrAppend(out, names[rank]);
      }));
}

std::string ListLines(const std::vector<std::string>& lines) {
  const auto listed_end =
      lines.begin() + std::min<size_t>(lines.size(), kMaxLinesListed);
  std::string text = absl::StrJoin(lines.begin(), listed_end, ", ");
  if (listed_end != lines.end()) {
    absl::StrAppend(&text, " and ", lines.end() - listed_end, " more");
  }
  return text;
}

// What to say of ranks whose lines differ. `lines` and `names` have an entry a
// rank.
std::string DescribeDifference(
    const std::vector<std::vector<std::string>>& lines,
    const std::vector<int64_t>& names) {
  const int64_t size = lines.size();
  std::map<std::string, std::vector<int64_t>> ranks_of_line;
  for (int64_t rank = 0; rank < size; ++rank) {
    for (const std::string& line : lines[rank]) {
      std::vector<int64_t>& ranks = ranks_of_line[line];
      if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
    }
  }

  // In each rank's own order, under the set of ranks that has the line.
  std::map<std::vector<int64_t>, std::vector<std::string>> lines_of_ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    for (const std::string& line : lines[rank]) {
      const std::vector<int64_t>& ranks = ranks_of_line[line];
      if (ranks.size() < size && ranks.front() == rank) {
        lines_of_ranks[ranks].push_back(line);
      }
    }
  }
  if (!lines_of_ranks.empty()) {
    return absl::StrJoin(
        lines_of_ranks, "; ", [&names](std::string* out, const auto& entry) {
          absl::StrAppend(out, "only on ", RankNames(entry.first, names), ": ",
                          ListLines(entry.second));
        });
  }

  // The same lines in another order, or one of them more than once.
  for (int64_t rank = 1; rank < size; ++rank) {
    if (lines[rank] == lines[0]) continue;
    const auto [first, other] =
        std::mismatch(lines[0].begin(), lines[0].end(), lines[rank].begin(),
                      lines[rank].end());
    const std::string end = "the end";
    return absl::StrCat(
        "the order differs from entry ", first - lines[0].begin(), ": rank ",
        names[0], " has ", first == lines[0].end() ? end : *first, ", rank ",
        names[rank], " has ", other == lines[rank].end() ? end : *other);
  }
  return "";
}

}  // namespace

absl::Status CheckRanksAgree(c10d::ProcessGroup& group,
                             const std::string& group_name,
                             const std::string& what,
                             const std::vector<std::string>& lines,
                             std::vector<int64_t> names) {
  if (names.empty()) {
    names.resize(group.getSize());
    std::iota(names.begin(), names.end(), 0);
  }
  const std::string context =
      Context(names.at(group.getRank()), group_name, what);
  const std::string text = absl::StrJoin(lines, "\n");

  at::Tensor digest = at::empty({2}, at::kLong);
  digest[0] = static_cast<int64_t>(config::Fnv1a64(text));
  digest[1] = static_cast<int64_t>(text.size());
  LORA_ASSIGN_OR_RETURN(const at::Tensor digests,
                        AllGatherRows(group, digest, context));
  if (digests.eq(digests[0]).all().item<bool>()) return absl::OkStatus();

  LORA_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      AllGatherTexts(group, text, digests.select(1, 1), context));
  std::vector<std::vector<std::string>> lines_of_rank;
  for (const std::string& rank_text : texts) {
    lines_of_rank.push_back(absl::StrSplit(rank_text, '\n'));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      group_name, ": the ranks must make the same call, with the same ",
      "parameters in the same order; ",
      DescribeDifference(lines_of_rank, names)));
}

absl::StatusOr<bool> IsTrueOnAnyRank(c10d::ProcessGroup& group,
                                     const std::string& group_name,
                                     const std::string& what, bool value) {
  LORA_ASSIGN_OR_RETURN(
      const at::Tensor rows,
      AllGatherRows(group, at::full({1}, value, at::kByte),
                    Context(group.getRank(), group_name, what)));
  return rows.any().item<bool>();
}

absl::Status AgreeOnStatus(c10d::ProcessGroup& group,
                           const std::string& group_name,
                           const std::string& what,
                           const absl::Status& status) {
  const std::string context = Context(group.getRank(), group_name, what);
  const std::string text(status.message());
  at::Tensor code_and_length = at::empty({2}, at::kLong);
  code_and_length[0] = static_cast<int64_t>(status.code());
  code_and_length[1] = static_cast<int64_t>(text.size());
  LORA_ASSIGN_OR_RETURN(const at::Tensor rows,
                        AllGatherRows(group, code_and_length, context));

  // Ranks with an error of their own; without any, those that only stopped.
  std::vector<int64_t> failed;
  std::vector<int64_t> stopped;
  std::vector<absl::StatusCode> codes;
  for (int64_t rank = 0; rank < group.getSize(); ++rank) {
    codes.push_back(
        static_cast<absl::StatusCode>(rows[rank][0].item<int64_t>()));
    if (codes.back() == absl::StatusCode::kAborted) {
      stopped.push_back(rank);
    } else if (codes.back() != absl::StatusCode::kOk) {
      failed.push_back(rank);
    }
  }
  if (failed.empty()) failed = stopped;
  if (failed.empty()) return absl::OkStatus();

  LORA_ASSIGN_OR_RETURN(
      const std::vector<std::string> texts,
      AllGatherTexts(group, text, rows.select(1, 1), context));
  const int64_t first = failed.front();
  if (group.getSize() == 1) return absl::Status(codes[first], texts[first]);
  std::string message = absl::StrCat("rank ", first, ": ", texts[first]);
  if (failed.size() > 1) {
    absl::StrAppend(&message, " (", failed.size(), " ranks failed)");
  }
  return absl::Status(codes[first], message);
}

}  // namespace trainer_lora::distributed::internal
