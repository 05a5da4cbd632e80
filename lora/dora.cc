#include "lora/dora.h"

#include "ATen/Functions.h"
#include "ATen/OpMathType.h"
#include "c10/core/GradMode.h"
#include "lora/internal/no_autocast_guard.h"

namespace trainer_lora::lora {

at::Tensor SquaredRowNorms(const at::Tensor& weight) {
  const c10::NoGradGuard no_grad;
  return at::linalg_vector_norm(weight, 2, at::IntArrayRef({1}),
                                /*keepdim=*/false,
                                at::toOpMathType(weight.scalar_type()))
      .square_();
}

at::Tensor DoraSquaredNorms(const at::Tensor& weight, const at::Tensor& lora_A,
                            const at::Tensor& lora_B, double scale,
                            const at::Tensor& squared_weight_norms) {
  const c10::NoGradGuard no_grad;
  const internal::NoAutocastGuard no_autocast;
  const at::ScalarType compute = at::toOpMathType(weight.scalar_type());
  // The weight alone is large: the product with it is in its own type.
  const at::Tensor products =
      at::matmul(weight, lora_A.to(weight.scalar_type()).t()).to(compute);
  const at::Tensor a = lora_A.to(compute);
  const at::Tensor b = lora_B.to(compute);
  // 2 s W A^T + s^2 B (A A^T), whose rows times those of B are wanted.
  const at::Tensor sum =
      at::addmm(products, b, at::matmul(a, a.t()), /*beta=*/2 * scale,
                /*alpha=*/scale * scale);
  const at::Tensor squared = squared_weight_norms.defined()
                                 ? squared_weight_norms
                                 : SquaredRowNorms(weight);
  return at::add(squared, at::sum(sum.mul_(b), 1)).clamp_min_(0);
}

}  // namespace trainer_lora::lora
