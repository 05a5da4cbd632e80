// The initial values of adapter parameters: a function of (seed, scope, name,
// element index) alone, so that every rank can fill its own shard, and the
// values are bitwise the same for every world size, mesh, shard dimension and
// tensor parallel degree.
//
//   LoraInitialization initialization{/*seed=*/42};
//   at::Tensor lora_A = InitialLoraValue(
//       initialization, "blocks.0.to_q.lora_A", {16, 1536}, at::kFloat,
//       distributed::TensorSlice::Whole({16, 1536}));
//
// Values are part of the interface: a release that changed them would change
// every user's runs. For element i (row-major, in the whole tensor) of lora_A:
//
//   h    = FNV-1a-64(scope + '\0' + name)
//   u    = word (i % 4) of Philox4x32-10(key = seed, counter = (i / 4, h))
//   k    = 2 * (u >> 8) + 1 - 2^24          odd, |k| < 2^24, exact in float32
//
// By default
//
//   A[i] = k * float(bound * 2^-24)         one multiplication in float32
//
// with bound = 1 / sqrt(fan-in), the elements of a row, which is that of
// kaiming_uniform_(a = sqrt(5)) on the whole tensor. The gaussian kind is
//
//   A[i] = float(z((k + 2^24) * 2^-25) / rank)
//
// in float64, where z is the inverse of the normal distribution function by
// algorithm AS 241 (Wichura, 1988), and 1 / rank the standard deviation that
// PEFT uses. The value is then rounded to the parameter's type (for float64
// nothing is computed in or rounded to float32). lora_B is zero. So is the
// lora_embedding_A of an embedding, whose lora_embedding_B is of the gaussian
// kind, with the standard deviation 1, as in PEFT. A lora_magnitude is zero
// until it gets its start from the base weight. The kinds that start from the
// base weight, pissa and olora, have the default values here, where there is no
// weight. Philox: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3",
// 2011; as ATen has it.
#ifndef TRAINER_LORA_LORA_PARAMETER_INITIALIZER_H_
#define TRAINER_LORA_LORA_PARAMETER_INITIALIZER_H_

#include <cstdint>
#include <map>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "distributed/checkpoint/missing_parameter_initializer.h"

namespace trainer_lora::lora {

// What the values depend on beside the parameter's name.
struct LoraInitialization {
  // The key of the generator.
  uint64_t seed = 0;
  // Empty, or the role: two roles with one seed then start differently.
  std::string scope;
  // Which of the formulas above.
  config::AdapterInitialization kind = config::AdapterInitialization::kDefault;
};

// A slice of the initial value of an adapter parameter: a contiguous CPU tensor
// of shape `slice.sizes` and of `dtype`, a floating point type. `name` ends in
// that of a parameter of an adapter, whose whole shape is `global_shape`: such
// as ".lora_A", [rank, in_features]. Throws c10::Error for another name or a
// slice out of range. Allocates the slice alone, so that one of no elements
// costs nothing. Thread safe; uses the calling thread alone.
at::Tensor InitialLoraValue(const LoraInitialization& initialization,
                            absl::string_view name,
                            at::IntArrayRef global_shape, at::ScalarType dtype,
                            const distributed::TensorSlice& slice);

// An initializer for the adapter parameters that are the keys of
// `parameter_names`; nothing for other names. The mapped value is the name
// under which the parameter draws: the same as the key, or the first name of a
// parameter that a model has under several.
distributed::MissingParameterInitializer MakeLoraParameterInitializer(
    LoraInitialization initialization,
    std::map<std::string, std::string> parameter_names);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_PARAMETER_INITIALIZER_H_
