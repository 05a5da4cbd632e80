#include "lora/conv.h"

#include <cmath>
#include <type_traits>
#include <variant>

#include "ATen/Functions.h"
#include "c10/util/Exception.h"
#include "lora/lora_matmul.h"
#include "torch/enum.h"
#include "torch/nn/functional/conv.h"
#include "torch/nn/functional/padding.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/conv.h"

namespace trainer_lora::lora {
namespace {

namespace F = torch::nn::functional;

template <size_t D>
using TorchConvImpl = std::conditional_t<
    D == 1, torch::nn::Conv1dImpl,
    std::conditional_t<D == 2, torch::nn::Conv2dImpl, torch::nn::Conv3dImpl>>;

// Checks options, draws the initial values and knows the padding.
template <size_t D>
class StockConv : public TorchConvImpl<D> {
 public:
  using TorchConvImpl<D>::TorchConvImpl;

  const std::vector<int64_t>& padding() const {
    return this->_reversed_padding_repeated_twice;
  }
};

template <size_t D>
at::Tensor ConvNd(const at::Tensor& input, const at::Tensor& weight,
                  const F::ConvFuncOptions<D>& options) {
  if constexpr (D == 1) return F::conv1d(input, weight, options);
  if constexpr (D == 2) return F::conv2d(input, weight, options);
  if constexpr (D == 3) return F::conv3d(input, weight, options);
}

F::PadFuncOptions::mode_t PadMode(
    const torch::nn::detail::conv_padding_mode_t& mode) {
  if (std::holds_alternative<torch::enumtype::kReflect>(mode)) {
    return torch::kReflect;
  }
  if (std::holds_alternative<torch::enumtype::kReplicate>(mode)) {
    return torch::kReplicate;
  }
  if (std::holds_alternative<torch::enumtype::kCircular>(mode)) {
    return torch::kCircular;
  }
  return torch::kConstant;
}

}  // namespace

template <size_t D, typename Derived>
ConvImpl<D, Derived>::ConvImpl(const torch::nn::ConvOptions<D>& options)
    : options_(options) {
  const StockConv<D> stock(options);
  padding_ = stock.padding();
  this->register_parameter("weight", stock.weight);
  if (stock.bias.defined()) this->register_parameter("bias", stock.bias);
}

template <size_t D, typename Derived>
void ConvImpl<D, Derived>::reset_parameters() {
  // The distribution of torch::nn, drawn in its order.
  const at::Tensor weight_tensor = weight();
  torch::nn::init::kaiming_uniform_(weight_tensor, std::sqrt(5.0));
  if (const at::Tensor bias_tensor = bias(); bias_tensor.defined()) {
    const int64_t fan_in = weight_tensor[0].numel();
    const double bound = 1 / std::sqrt(static_cast<double>(fan_in));
    torch::nn::init::uniform_(bias_tensor, -bound, bound);
  }
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::Convolve(const at::Tensor& input,
                                          const at::Tensor& weight,
                                          const at::Tensor& bias,
                                          int64_t groups) const {
  auto options = F::ConvFuncOptions<D>()
                     .bias(bias)
                     .stride(options_.stride())
                     .dilation(options_.dilation())
                     .groups(groups);
  if (std::holds_alternative<torch::enumtype::kZeros>(
          options_.padding_mode())) {
    return ConvNd<D>(input, weight, options.padding(options_.padding()));
  }
  const auto pad_options =
      F::PadFuncOptions(padding_).mode(PadMode(options_.padding_mode()));
  return ConvNd<D>(F::pad(input, pad_options), weight, options);
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::forward(const at::Tensor& input) {
  return this->AddAdapter(input,
                          Convolve(input, weight(), bias(), options_.groups()));
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::AddProduct(const at::Tensor& base_output,
                                            const at::Tensor& input,
                                            const LoraAdapter& adapter,
                                            double scale,
                                            const LoraDropout& dropout) const {
  const at::Tensor x = ApplyDropout(input, dropout);
  const at::Tensor hidden = Convolve(x, adapter.lora_A.to(x.scalar_type()),
                                     /*bias=*/{}, /*groups=*/1);
  const at::Tensor delta =
      ConvNd<D>(hidden, adapter.lora_B.to(hidden.scalar_type()),
                F::ConvFuncOptions<D>().groups(options_.groups()));
  return at::add(base_output, delta.to(base_output.scalar_type()), scale);
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::BaseWithoutBias(
    const at::Tensor& input) const {
  return Convolve(input, weight().to(input.scalar_type()), /*bias=*/{},
                  options_.groups());
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::AlongOutput(const at::Tensor& values) const {
  std::vector<int64_t> shape(1 + D, 1);
  shape[0] = -1;
  return values.view(shape);
}

template <size_t D, typename Derived>
LoraLayer::AdapterShapes ConvImpl<D, Derived>::adapter_shapes(
    int64_t rank) const {
  const int64_t groups = options_.groups();
  TORCH_CHECK(rank % groups == 0, "the LoRA rank of a convolution with ",
              groups, " groups must be divisible by them, got ", rank);
  std::vector<int64_t> lora_A = {rank, in_features()};
  lora_A.insert(lora_A.end(), options_.kernel_size()->begin(),
                options_.kernel_size()->end());
  std::vector<int64_t> lora_B = {out_features(), rank / groups};
  lora_B.insert(lora_B.end(), D, 1);
  return {std::move(lora_A), std::move(lora_B), {out_features()}};
}

template <size_t D, typename Derived>
at::Tensor ConvImpl<D, Derived>::WeightMatrix() const {
  return options_.groups() == 1 ? LoraLayer::WeightMatrix() : at::Tensor();
}

template <size_t D, typename Derived>
void ConvImpl<D, Derived>::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "trainer_lora::lora::Conv" << D << "d("
         << in_features() << ", " << out_features()
         << ", kernel_size=" << options_.kernel_size()
         << ", stride=" << options_.stride()
         << ", dilation=" << options_.dilation()
         << ", groups=" << options_.groups() << ", bias=" << bias().defined();
  this->PrintAdapters(stream);
  stream << ")";
}

template class ConvImpl<1, Conv1dImpl>;
template class ConvImpl<2, Conv2dImpl>;
template class ConvImpl<3, Conv3dImpl>;

}  // namespace trainer_lora::lora
