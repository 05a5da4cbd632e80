#include "lora/lora_matmul.h"

#include "ATen/Functions.h"
namespace trainer_lora::lora {
at::Tensor LoraAdd(const at::Tensor& base_output, const at::Tensor& input,
                   const at::Tensor& lora_A, const at::Tensor& lora_B,
                   double scale, double dropout) {
  const at::Tensor x = dropout > 0 ? at::dropout(input, dropout, true) : input;
  const at::Tensor delta = at::linear(at::linear(x, lora_A.to(x.scalar_type())),
                                      lora_B.to(x.scalar_type()));
  return at::add(base_output, delta.to(base_output.scalar_type()), scale);
}
at::Tensor LoraMatmul(const at::Tensor& input, const LoraMatmulTerm& t) {
  return LoraAdd(at::linear(input, t.weight, t.bias), input, t.lora_A, t.lora_B,
                 t.scale, t.dropout);
}
}  // namespace trainer_lora::lora
