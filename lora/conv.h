// Convolutions that can take a LoRA adapter.
//
//   struct ResidualImpl : torch::nn::Module {
//     ResidualImpl() { register_module("conv_in", conv_in); }
//     lora::Conv2d conv_in{
//         torch::nn::Conv2dOptions(64, 128, /*kernel_size=*/3).padding(1)};
//   };
//
// The adapter is PEFT's: a convolution `lora_A` with the kernel of the base,
// from the input to the LoRA rank, and a convolution `lora_B` of kernel 1, from
// there to the output:
//
//   conv(x) + s lora_B(lora_A(dropout(x)))
//
// lora_A has the stride, padding, padding mode and dilation of the base, so
// that the sum is the convolution with the merged weight. (PEFT's has neither
// the dilation nor the padding mode: an adapter for a layer with other ones
// than the defaults does not compute the same there.)
//
// With groups g > 1, again as in PEFT, lora_A reads all input channels and
// lora_B has g groups, for which the LoRA rank must be divisible by g. That is
// no convolution with g groups: such a layer has no WeightMatrix(), and can't
// be merged or have DoRA, PiSSA or OLoRA.
#ifndef TRAINER_LORA_LORA_CONV_H_
#define TRAINER_LORA_LORA_CONV_H_

#include <cstddef>
#include <cstdint>
#include <ostream>
#include <vector>

#include "ATen/core/Tensor.h"
#include "config/language_version.h"
#include "lora/lora_adapter.h"
#include "torch/expanding_array.h"
#include "torch/nn/options/conv.h"
#include "torch/nn/pimpl.h"

namespace trainer_lora::lora {

// What the convolutions over D dimensions share. `Derived` is a drop-in for the
// class of its name in torch::nn: the same options, the same state names
// (`weight` [out_channels, in_channels / groups, kernel...], `bias`
// [out_channels]), the same initial values under the same generator. The one
// difference: weight and bias are functions, as the tensors move when the layer
// takes an adapter.
template <size_t D, typename Derived>
class ConvImpl : public CloneableLoraLayer<Derived> {
 public:
  // With libtorch's other defaults. Throws as below.
  ConvImpl(int64_t in_channels, int64_t out_channels,
           torch::ExpandingArray<D> kernel_size)
      : ConvImpl(torch::nn::ConvOptions<D>(in_channels, out_channels,
                                           kernel_size)) {}
  // Throws c10::Error as the class of torch::nn does.
  explicit ConvImpl(const torch::nn::ConvOptions<D>& options);

  // [batch, in_channels, size...] -> [batch, out_channels, size...], or both
  // without batch. Throws c10::Error as the class of torch::nn does.
  at::Tensor forward(const at::Tensor& input);

  // Draws weight and bias anew from the default generator; an adapter stays as
  // it is.
  void reset_parameters();

  // For operator<<: "Conv2d(...)" with sizes and adapters.
  void pretty_print(std::ostream& stream) const override;

  // The input channels.
  int64_t in_features() const override { return options_.in_channels(); }
  // The output channels.
  int64_t out_features() const override { return options_.out_channels(); }

  // lora_A [rank, in_channels, kernel...], lora_B [out_channels, rank / groups,
  // 1...], lora_magnitude [out_channels].
  LoraLayer::AdapterShapes adapter_shapes(int64_t rank) const override;

  // [out_channels, in_channels * kernel...]; undefined with groups.
  at::Tensor WeightMatrix() const override;

  // The frozen weight, wherever it is now.
  at::Tensor weight() const { return this->state("weight"); }
  // The frozen bias, likewise; undefined without one.
  at::Tensor bias() const { return this->state("bias"); }

 protected:
  // lora_A and lora_B as convolutions.
  at::Tensor AddProduct(const at::Tensor& base_output, const at::Tensor& input,
                        const LoraAdapter& adapter, double scale,
                        const LoraDropout& dropout) const override;
  // The convolution with the frozen weight.
  at::Tensor BaseWithoutBias(const at::Tensor& input) const override;
  // A value for each output channel.
  at::Tensor AlongOutput(const at::Tensor& values) const override;

 private:
  // A convolution with this layer's stride, padding and dilation.
  at::Tensor Convolve(const at::Tensor& input, const at::Tensor& weight,
                      const at::Tensor& bias, int64_t groups) const;

  torch::nn::ConvOptions<D> options_;
  // Of the last dimension first, before and after, as torch's pad() wants it.
  std::vector<int64_t> padding_;
};

// A convolution over sequences.
class Conv1dImpl : public ConvImpl<1, Conv1dImpl> {
 public:
  using ConvImpl::ConvImpl;
};

// A convolution over images.
class Conv2dImpl : public ConvImpl<2, Conv2dImpl> {
 public:
  using ConvImpl::ConvImpl;
};

// A convolution over volumes or videos.
class Conv3dImpl : public ConvImpl<3, Conv3dImpl> {
 public:
  using ConvImpl::ConvImpl;
};

extern template class ConvImpl<1, Conv1dImpl>;
extern template class ConvImpl<2, Conv2dImpl>;
extern template class ConvImpl<3, Conv3dImpl>;

TORCH_MODULE(Conv1d);
TORCH_MODULE(Conv2d);
TORCH_MODULE(Conv3d);

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_CONV_H_
