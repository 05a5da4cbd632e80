// FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/. Unlike std::hash and
// absl::Hash it gives the same in every build and on every rank.
#ifndef TRAINER_LORA_CONFIG_INTERNAL_FNV1A_H_
#define TRAINER_LORA_CONFIG_INTERNAL_FNV1A_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace trainer_lora::config {

template <typename Word>
Word Fnv1a(absl::string_view bytes, Word offset_basis, Word prime) {
  Word hash = offset_basis;
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * prime;
  }
  return hash;
}

inline uint32_t Fnv1a32(absl::string_view bytes) {
  return Fnv1a<uint32_t>(bytes, 0x811c9dc5, 0x01000193);
}

inline uint64_t Fnv1a64(absl::string_view bytes) {
  return Fnv1a<uint64_t>(bytes, 0xcbf29ce484222325, 0x100000001b3);
}

}  // namespace trainer_lora::config

#endif  // TRAINER_LORA_CONFIG_INTERNAL_FNV1A_H_
