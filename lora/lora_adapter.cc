#include "lora/lora_adapter.h"

#include <cmath>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "c10/core/GradMode.h"

namespace trainer_lora::lora {
namespace {

constexpr char kBaseLayer[] = "base_layer";
constexpr char kLoraA[] = "lora_A";
constexpr char kLoraB[] = "lora_B";

// A copy that shares no memory, on `device` if one is given.
at::Tensor CopyOf(const at::Tensor& tensor,
                  const std::optional<at::Device>& device) {
  return tensor.detach().to(
      tensor.options().device(device.value_or(tensor.device())),
      /*non_blocking=*/false, /*copy=*/true);
}

// Registers copies of everything that `source` has registered with `target`.
void RegisterCopies(const torch::nn::Module& source,
                    const std::optional<at::Device>& device,
                    torch::nn::Module& target) {
  for (const auto& item : source.named_parameters(/*recurse=*/false)) {
    target.register_parameter(item.key(), CopyOf(item.value(), device),
                              item.value().requires_grad());
  }
  for (const auto& item : source.named_buffers(/*recurse=*/false)) {
    target.register_buffer(item.key(), CopyOf(item.value(), device));
  }
  for (const auto& item : source.named_children()) {
    target.register_module(item.key(), item.value()->clone(device));
  }
  target.train(source.is_training());
}

}  // namespace

// What an adapted layer had registered before adoption.
class LoraLayer::BaseLayer : public torch::nn::Module {
 public:
  BaseLayer() : Module("BaseLayer") {}

  // Takes over the registrations of `layer`, which shares them until it is
  // cleared.
  static std::shared_ptr<BaseLayer> ShareStateOf(
      const torch::nn::Module& layer) {
    auto base_layer = std::make_shared<BaseLayer>();
    for (const auto& item : layer.named_parameters(/*recurse=*/false)) {
      base_layer->register_parameter(item.key(), item.value(),
                                     item.value().requires_grad());
    }
    for (const auto& item : layer.named_buffers(/*recurse=*/false)) {
      base_layer->register_buffer(item.key(), item.value());
    }
    for (const auto& item : layer.named_children()) {
      base_layer->register_module(item.key(), item.value());
    }
    base_layer->train(layer.is_training());
    return base_layer;
  }

  std::shared_ptr<Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<BaseLayer>();
    RegisterCopies(*this, device, *copy);
    return copy;
  }

  const at::Tensor* FindParameter(const std::string& name) const {
    return parameters_.find(name);
  }
};

at::TensorOptions LoraLayer::adapter_options() const {
  const at::Tensor weight = state("weight");
  TORCH_CHECK(weight.defined(), name(),
              " has no state `weight`: override adapter_options()");
  return at::TensorOptions().dtype(weight.dtype()).device(weight.device());
}

absl::StatusOr<LoraAdapter> LoraLayer::EmptyAdapter(
    const LoraAdapterOptions& options) const {
  if (is_adapted()) {
    return absl::FailedPreconditionError(
        absl::StrCat(DisplayName(), " has a LoRA adapter already"));
  }
  if (options.rank <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the LoRA rank must be > 0, got ", options.rank));
  }
  if (!std::isfinite(options.alpha) || options.alpha <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the LoRA alpha must be finite and > 0, got ", options.alpha));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the LoRA dropout must be at least 0 and below 1, got ",
                     options.dropout));
  }
  try {
    at::TensorOptions tensor_options = adapter_options();
    if (options.dtype) tensor_options = tensor_options.dtype(*options.dtype);
    if (!at::isFloatingType(
            c10::typeMetaToScalarType(tensor_options.dtype()))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "factors of type ", std::string(tensor_options.dtype().name()),
          " can't be trained: choose another dtype for the adapter, or "
          "override adapter_options() of ",
          name()));
    }
    return LoraAdapter{
        options, at::empty({options.rank, in_features()}, tensor_options),
        at::empty({out_features(), options.rank}, tensor_options)};
  } catch (const c10::OutOfMemoryError& error) {
    return absl::ResourceExhaustedError(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return absl::FailedPreconditionError(error.what_without_backtrace());
  }
}

absl::Status LoraLayer::AdoptAdapter(const LoraAdapter& adapter) {
  if (is_adapted()) {
    return absl::FailedPreconditionError(
        absl::StrCat(DisplayName(), " has a LoRA adapter already"));
  }
  const int64_t rank = adapter.options.rank;
  if (adapter.lora_A.sizes() != at::IntArrayRef{rank, in_features()} ||
      adapter.lora_B.sizes() != at::IntArrayRef{out_features(), rank}) {
    return absl::InvalidArgumentError(absl::StrCat(
        DisplayName(), " wants lora_A of shape [", rank, ", ", in_features(),
        "] and lora_B of shape [", out_features(), ", ", rank, "]"));
  }
  auto base_layer = BaseLayer::ShareStateOf(*this);
  // Module has no way to take back a buffer, so the registrations are built
  // aside and replaced as a whole.
  torch::nn::Module adapted;
  adapted.register_parameter(kLoraA, adapter.lora_A, /*requires_grad=*/true);
  adapted.register_parameter(kLoraB, adapter.lora_B, /*requires_grad=*/true);
  adapted.register_module(kBaseLayer, base_layer);
  adapted.train(is_training());
  static_cast<torch::nn::Module&>(*this) = std::move(adapted);
  base_layer_ = std::move(base_layer);
  adapter_ = adapter.options;
  return absl::OkStatus();
}

std::string LoraLayer::DisplayName() const {
  return adapter_.layer_name.empty() ? name() : adapter_.layer_name;
}

at::Tensor LoraLayer::lora_A() const {
  const at::Tensor* tensor = is_adapted() ? parameters_.find(kLoraA) : nullptr;
  return tensor == nullptr ? at::Tensor() : *tensor;
}

at::Tensor LoraLayer::lora_B() const {
  const at::Tensor* tensor = is_adapted() ? parameters_.find(kLoraB) : nullptr;
  return tensor == nullptr ? at::Tensor() : *tensor;
}

void LoraLayer::set_lora_layouts(
    std::optional<distributed::ParameterLayout> lora_A_layout,
    std::optional<distributed::ParameterLayout> lora_B_layout) {
  lora_A_layout_ = std::move(lora_A_layout);
  lora_B_layout_ = std::move(lora_B_layout);
}

at::Tensor LoraLayer::state(const std::string& name) const {
  const at::Tensor* parameter =
      is_adapted() ? base_layer_->FindParameter(name) : parameters_.find(name);
  if (parameter != nullptr) return *parameter;
  const torch::nn::Module& owner =
      is_adapted() ? static_cast<const torch::nn::Module&>(*base_layer_)
                   : *this;
  const auto buffers = owner.named_buffers(/*recurse=*/false);
  const at::Tensor* buffer = buffers.find(name);
  return buffer == nullptr ? at::Tensor() : *buffer;
}

at::Tensor LoraLayer::AddAdapter(const at::Tensor& input,
                                 const at::Tensor& base_output) const {
  // A linear operator takes a weight on meta without a word, and the loss would
  // be without a value.
  TORCH_CHECK(!base_output.is_meta() || input.is_meta(), DisplayName(),
              " is still on the meta device: load the weights of the model "
              "before its first use");
  if (!is_adapted()) return base_output;
  const at::Tensor a = lora_A();
  const at::Tensor b = lora_B();
  TORCH_CHECK(a.defined() && b.defined(), DisplayName(),
              ": the LoRA adapter has lost its factors");
  TORCH_CHECK((!a.is_meta() && !b.is_meta()) || input.is_meta(), DisplayName(),
              ": the LoRA adapter is still on the meta device: load the model "
              "with the missing-parameter initializer of EnableLoraTraining "
              "before its first use");
  at::Tensor adapter_input = input.to(a.scalar_type());
  if (adapter_.dropout > 0 && is_training()) {
    adapter_input =
        at::dropout(adapter_input, adapter_.dropout, /*train=*/true);
  }
  const at::Tensor delta = at::linear(at::linear(adapter_input, a), b);
  return at::add(base_output, delta.to(base_output.scalar_type()),
                 adapter_.alpha / static_cast<double>(adapter_.rank));
}

void LoraLayer::UnshareFrom(const LoraLayer& source,
                            const std::optional<at::Device>& device) {
  torch::nn::Module unshared(source.name());
  RegisterCopies(source, device, unshared);
  static_cast<torch::nn::Module&>(*this) = std::move(unshared);
  if (is_adapted()) {
    base_layer_ =
        std::static_pointer_cast<BaseLayer>(named_children()[kBaseLayer]);
  }
}

}  // namespace trainer_lora::lora
