// Nouns and their definitions, from the WordNet 3.0 database.
//
//   absl::StatusOr<std::vector<GlossPair>> pairs =
//       LoadNounDefinitions("data.noun");
//   if (!pairs.ok()) return pairs.status();
//   absl::StatusOr<GlossSplit> split =
//       SplitHeldOut(*std::move(pairs), /*held_out_size=*/1000, /*seed=*/0);
#ifndef TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORDNET_H_
#define TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORDNET_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace trainer_lora::examples {

struct GlossPair {
  std::string lemma;       // "domestic cat"
  std::string definition;  // "any domesticated member of the genus Felis"
};

// Reads `path`, a data.noun in the format of wndb(5WN), and returns a pair for
// each noun in the order of the file: the first word of the synset, if it
// starts with a small letter or a digit (names are left out), and the gloss up
// to its first example, if that has at least four words. kNotFound without the
// file; kDataLoss, naming file and line, for a line that is not a synset.
absl::StatusOr<std::vector<GlossPair>> LoadNounDefinitions(
    const std::string& path);

struct GlossSplit {
  std::vector<GlossPair> train;
  std::vector<GlossPair> held_out;
};

// Draws `held_out_size` pairs, no two with one lemma: a definition has one
// right answer among the held-out lemmas. `train` is the rest in the order of
// `pairs`, without the other definitions of held-out lemmas: the held-out words
// are new to whoever trained on it. Depends on the arguments alone, on every
// platform. kInvalidArgument if there are fewer than `held_out_size` lemmas.
absl::StatusOr<GlossSplit> SplitHeldOut(std::vector<GlossPair> pairs,
                                        int held_out_size, uint64_t seed);

}  // namespace trainer_lora::examples

#endif  // TRAINER_LORA_EXAMPLES_SENTENCE_ENCODER_WORDNET_H_
