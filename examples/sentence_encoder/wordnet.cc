#include "examples/sentence_encoder/wordnet.h"

#include <cstddef>
#include <fstream>
#include <numeric>
#include <random>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace trainer_lora::examples {
namespace {

constexpr int kMinWordsPerDefinition = 4;

int CountWords(absl::string_view text) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, ' ', absl::SkipEmpty());
  return words.size();
}

// A line is `offset file_number n word_count word id [word id ...] pointers...
// | definition; "example"; ...`.
absl::StatusOr<GlossPair> ParseSynset(absl::string_view line) {
  const std::pair<absl::string_view, absl::string_view> synset_and_gloss =
      absl::StrSplit(line, absl::MaxSplits(" | ", 1));
  const auto& [synset, gloss] = synset_and_gloss;
  if (synset.size() == line.size()) {
    return absl::DataLossError("no gloss after ' | '");
  }
  const std::vector<absl::string_view> fields =
      absl::StrSplit(synset, ' ', absl::SkipEmpty());
  if (fields.size() < 6) {
    return absl::DataLossError(absl::StrCat(
        "a synset has at least six fields, this has ", fields.size()));
  }
  if (fields[2] != "n") {
    return absl::DataLossError(
        absl::StrCat("'", fields[2], "' is not a noun's synset type"));
  }
  const absl::string_view definition = gloss.substr(0, gloss.find("; \""));
  return GlossPair{absl::StrReplaceAll(fields[4], {{"_", " "}}),
                   std::string(absl::StripAsciiWhitespace(definition))};
}

}  // namespace

absl::StatusOr<std::vector<GlossPair>> LoadNounDefinitions(
    const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat(path, ": the WordNet nouns can't be read"));
  }
  std::vector<GlossPair> pairs;
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    // The license at the top is indented.
    if (absl::StartsWith(line, "  ")) continue;
    absl::StatusOr<GlossPair> pair = ParseSynset(line);
    if (!pair.ok()) {
      return absl::DataLossError(
          absl::StrCat(path, ":", number, ": ", pair.status().message()));
    }
    if (absl::ascii_isupper(pair->lemma[0]) ||
        CountWords(pair->definition) < kMinWordsPerDefinition) {
      continue;
    }
    pairs.push_back(*std::move(pair));
  }
  if (file.bad()) {
    return absl::DataLossError(absl::StrCat(path, ": reading failed"));
  }
  return pairs;
}

absl::StatusOr<GlossSplit> SplitHeldOut(std::vector<GlossPair> pairs,
                                        int held_out_size, uint64_t seed) {
  std::vector<size_t> order(pairs.size());
  std::iota(order.begin(), order.end(), 0);
  // std::shuffle may differ from one standard library to the next.
  std::mt19937_64 generator(seed);
  for (size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1], order[generator() % i]);
  }

  GlossSplit split;
  std::unordered_set<std::string> held_out_lemmas;
  for (const size_t i : order) {
    if (split.held_out.size() >= held_out_size) break;
    if (!held_out_lemmas.insert(pairs[i].lemma).second) continue;
    split.held_out.push_back(pairs[i]);
  }
  if (split.held_out.size() != held_out_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("can't hold out ", held_out_size, " pairs: there are ",
                     held_out_lemmas.size(), " different lemmas"));
  }
  for (GlossPair& pair : pairs) {
    if (held_out_lemmas.count(pair.lemma) == 0) {
      split.train.push_back(std::move(pair));
    }
  }
  return split;
}

}  // namespace trainer_lora::examples
