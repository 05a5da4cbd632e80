// A linear layer and its LoRA adapter as one operation of autograd:
//
//   y = x W^T + b + scale dropout(x) A^T B^T
//
//   lora::LoraMatmulTerm term{weight, bias, lora_A, lora_B, /*scale=*/2.0};
//   if (training) term.dropout = 0.05;
//   const at::Tensor output = lora::LoraMatmul(input, term);
//
// Composed of plain operators, the adapter's share is a tensor of the output's
// size that is written, scaled and added, and so are the gradients. Here the
// last GEMM of each sum adds to the output (or the gradient of the input) in
// place, and the scale is that GEMM's alpha. For N rows of input:
//
// - The graph keeps the input, once and in the dtype of the computation, and
//   x A^T, [N, rank]: recomputing the latter takes 2 in_features FLOPs an
//   element, the rate of activation checkpointing (lora/
//   activation_checkpoint.h), which is there for those who need the memory. An
//   input that only frozen factors and weights read isn't kept at all.
// - In float32 and float64, without dropout, W + scale B A is formed for
//   N >= 2 in_features in forward, and for N >= 2 out_features in the gradient
//   of the input: that is less work than GEMMs over N rows (as in RunLoRA,
//   Cherniuk et al., 2023), and at most half the size of what it is used for.
//   Forward then leaves x A^T to backward, and keeps the input alone.
// - What does not require grad costs nothing in backward.
//
// Under autocast it computes as at::linear does, in autocast's dtype. Otherwise
// it computes in the input's dtype, which the weight must have too; factors of
// another dtype are cast. A gradient has the dtype of its tensor. Second
// derivatives are right. Forward-mode differentiation is not supported.
//
// Profilers see the ranges `trainer_lora::lora_matmul` and
// `trainer_lora::lora_matmul_backward`.
//
// Functions are thread-safe as operators are. They throw c10::Error where
// shapes or dtypes don't fit.
#ifndef TRAINER_LORA_LORA_LORA_MATMUL_H_
#define TRAINER_LORA_LORA_LORA_MATMUL_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/types/span.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::lora {

// Dropout of an adapter's input. The mask isn't kept: it is made from a seed,
// drawn from the CPU's default generator (unless the probability is 0), and
// made again in backward. So torch::manual_seed() determines it, and whoever
// restores that generator's state recomputes the same. As the host draws it, a
// CUDA graph that was captured with dropout has one mask for all its replays.
struct LoraDropout {
  // Implicit, as a probability alone is the usual case.
  LoraDropout(double probability = 0, int64_t input_offset = 0,
              int64_t input_size = 0)
      : probability(probability),
        input_offset(input_offset),
        input_size(input_size) {}

  // That an element becomes 0, in [0, 1); the others are divided by
  // 1 - probability. 0 outside training.
  double probability;
  // For a layer whose input is split over tensor parallel ranks: the first of
  // the columns of the whole input that this one has. Ranks whose generators
  // are in the same state then drop what one process would.
  int64_t input_offset;
  // The columns of the whole input; 0 if this is it.
  int64_t input_size;
};

// `input` [..., in_features] after dropout, as the operations below apply it to
// what an adapter reads; itself for a probability of 0. For layers that need it
// outside of a product.
at::Tensor ApplyDropout(const at::Tensor& input, const LoraDropout& dropout);

// A linear layer that reads the input, and its adapter. Any of the tensors may
// require grad.
struct LoraMatmulTerm {
  at::Tensor weight;         // [out_features, in_features]
  at::Tensor bias;           // [out_features], or undefined
  at::Tensor lora_A;         // [rank, in_features]
  at::Tensor lora_B;         // [out_features, rank]
  double scale = 1;          // Of what the adapter adds.
  LoraDropout dropout = {};  // Of what the adapter reads.
};

// `input` is [..., in_features], the result [..., out_features].
at::Tensor LoraMatmul(const at::Tensor& input, const LoraMatmulTerm& term);

// Several layers that read the same input, such as q, k and v: the results in
// the order of `terms`. The input is kept once, and x [A_q; A_k; A_v]^T is a
// single GEMM, as are its gradients. All have the same dropout, and one mask.
std::vector<at::Tensor> LoraMatmul(const at::Tensor& input,
                                   absl::Span<const LoraMatmulTerm> terms);

// `base_output` + scale dropout(input) A^T B^T, for a layer that computes its
// base output [..., out_features] by itself; which is not changed, and whose
// dtype the result has.
at::Tensor LoraAdd(const at::Tensor& base_output, const at::Tensor& input,
                   const at::Tensor& lora_A, const at::Tensor& lora_B,
                   double scale, const LoraDropout& dropout = {});

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LORA_MATMUL_H_
