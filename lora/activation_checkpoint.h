// Activation checkpointing: a part of a model whose activations are not kept
// for backward, but computed again there. It costs another forward pass of the
// part, and saves everything between its inputs and outputs.
//
//   at::Tensor hidden = embedding->forward(ids);
//   for (auto& block : blocks) {
//     hidden = lora::Checkpoint(
//         [block](const std::vector<at::Tensor>& inputs) {
//           return block->forward(inputs[0], inputs[1]);
//         },
//         {hidden, mask});
//   }
//
// The gradients are bitwise those of the function without checkpointing, where
// its operators are deterministic: backward runs it with the random numbers,
// the autocast state and the inputs of forward. Parameters that it captures,
// such as adapters, get their gradients too, whether an input requires grad or
// not (those of frozen embeddings don't).
//
// What does not work, as with PyTorch's reentrant checkpointing:
// - torch::autograd::grad(), and backward() with `inputs`: they would leave out
//   what the function captures. Backward throws.
// - create_graph, so second derivatives. Backward throws.
// - A captured tensor that autograd computed outside: give it as an input.
#ifndef TRAINER_LORA_LORA_ACTIVATION_CHECKPOINT_H_
#define TRAINER_LORA_LORA_ACTIVATION_CHECKPOINT_H_

#include <functional>
#include <vector>

#include "ATen/core/Tensor.h"
#include "config/language_version.h"
#include "distributed/libtorch_version.h"

namespace trainer_lora::lora {

// How the function is run again.
struct CheckpointOptions {
  // Whether the function draws the same random numbers again: those of the
  // default generators of the CPU and of the inputs' devices. It takes a copy
  // of their states; false for a function that has no dropout.
  bool preserve_rng_state = true;
};

// function(inputs). With autograd on, every floating point output requires
// grad. Inputs may be undefined or of any dtype; they are kept until backward,
// and `function`, with what it captures, until the outputs' graph is freed.
//
// `function` is called once now and once in each backward pass, by the thread
// that runs it. What it throws comes out of here or of backward. Backward
// throws c10::Error in the cases above, if an input was changed in place since,
// and if the function gives another number of outputs than before; random,
// autocast and grad mode state are then as they were. The function must not
// change its inputs itself: that goes unnoticed, and happens twice.
std::vector<at::Tensor> Checkpoint(
    const std::function<
        std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs,
    const CheckpointOptions& options = {});

// The same of a function with a single output.
at::Tensor Checkpoint(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs,
    const CheckpointOptions& options = {});

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_ACTIVATION_CHECKPOINT_H_
