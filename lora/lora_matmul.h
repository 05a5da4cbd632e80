#ifndef TRAINER_LORA_LORA_LORA_MATMUL_H_
#define TRAINER_LORA_LORA_LORA_MATMUL_H_
#include "ATen/core/Tensor.h"
namespace trainer_lora::lora {
struct LoraMatmulTerm {
  at::Tensor weight, bias, lora_A, lora_B;
  double scale;
  double dropout = 0;
};
at::Tensor LoraMatmul(const at::Tensor& input, const LoraMatmulTerm& term);
at::Tensor LoraAdd(const at::Tensor& base_output, const at::Tensor& input,
                   const at::Tensor& lora_A, const at::Tensor& lora_B,
                   double scale, double dropout);
}  // namespace trainer_lora::lora
#endif
