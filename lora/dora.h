// The norms that DoRA divides by, without the dense product of the factors.
//
//   at::Tensor norms = DoraSquaredNorms(weight, lora_A, lora_B, scale).sqrt();
#ifndef TRAINER_LORA_LORA_DORA_H_
#define TRAINER_LORA_LORA_DORA_H_

#include "ATen/core/Tensor.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::lora {

// |w_i|^2 for each row of `weight`, [out, in], as [out] in float32, or in
// float64 for a float64 weight. No autograd.
at::Tensor SquaredRowNorms(const at::Tensor& weight);

// |w_i + s b_i A|^2 for each row: [out], in the type of SquaredRowNorms(). With
// w_i and b_i the rows of `weight` [out, in] and `lora_B` [out, rank], and
// `lora_A` [rank, in] it is
//
//   |w_i|^2 + 2 s b_i . (A w_i) + s^2 b_i (A A^T) b_i^T
//
// which takes one product of W and A^T, and memory for out x rank and
// rank x rank elements instead of out x in. `squared_weight_norms` are those of
// SquaredRowNorms(weight), which do not change while the weight is frozen;
// undefined: computed here. No autograd. A norm that rounding would make
// negative is zero.
at::Tensor DoraSquaredNorms(const at::Tensor& weight, const at::Tensor& lora_A,
                            const at::Tensor& lora_B, double scale,
                            const at::Tensor& squared_weight_norms = {});

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_DORA_H_
