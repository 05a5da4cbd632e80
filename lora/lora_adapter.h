// The base of every linear layer that can take a LoRA adapter.
//
// A layer adopts its adapter in place: the frozen weight (and whatever else the
// layer has) moves into a child `base_layer`, and the trainable factors
// `lora_A` and `lora_B` appear beside it. The module object stays the same, so
// typed holders, Sequential, ModuleList and AnyModule go on working, and the
// names are X.base_layer.weight, X.lora_A and X.lora_B.
//
// lora/linear.h has the layers that the component brings. A service's own
// linear type joins by deriving from CloneableLoraLayer:
//
//   class ScaledLinearImpl
//       : public lora::CloneableLoraLayer<ScaledLinearImpl> {
//    public:
//     ScaledLinearImpl(int64_t in, int64_t out) {
//       register_parameter("weight", torch::randn({out, in}));
//       register_buffer("scale", torch::ones({out}));
//     }
//     int64_t in_features() const override { return state("weight").size(1); }
//     int64_t out_features() const override { return state("weight").size(0); }
//     at::Tensor forward(const at::Tensor& input) {
//       at::Tensor weight = state("weight") * state("scale").unsqueeze(1);
//       return AddAdapter(input, at::linear(input, weight));
//     }
//   };
#ifndef TRAINER_LORA_LORA_LORA_ADAPTER_H_
#define TRAINER_LORA_LORA_LORA_ADAPTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "config/language_version.h"
#include "distributed/parameter_layout.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {

struct LoraAdapterOptions {
  // The layer's full name in the model, for messages; may be empty.
  std::string layer_name;
  // The LoRA rank r, > 0.
  int64_t rank = 0;
  // Finite and > 0. A double, as fractions such as 0.5 are in use.
  double alpha = 0;
  // The probability with which an element of the adapter's input is dropped
  // while the layer is in train mode, in [0, 1).
  double dropout = 0;
  // Of the factors, a floating point type; nothing: that of
  // LoraLayer::adapter_options().
  std::optional<at::ScalarType> dtype;
};

// The trainable part of an adapted layer. Its output is
//   base(x) + (alpha / rank) * dropout(x) * lora_A^T * lora_B^T
// (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021).
struct LoraAdapter {
  LoraAdapterOptions options;
  // [rank, in_features]
  at::Tensor lora_A;
  // [out_features, rank]
  at::Tensor lora_B;
};

// A linear layer that can take an adapter. Like other modules, not safe for
// use by several threads while one of them changes it.
class LoraLayer : public torch::nn::Module {
 public:
  // The features of this layer's input and output: the last dimensions.
  virtual int64_t in_features() const = 0;
  virtual int64_t out_features() const = 0;

  // The dtype and device of a new adapter's factors: those of the state
  // `weight`, which must exist. A layer without one, or whose weight is of no
  // floating point type, overrides this.
  virtual at::TensorOptions adapter_options() const;

  // Factors as AdoptAdapter() wants them: of this layer's shapes and device
  // (which may be meta), of undefined content. kInvalidArgument unless
  // `options` are as described there; kFailedPrecondition if the layer has an
  // adapter already or nothing to take the dtype from; kResourceExhausted if
  // the memory is not there.
  absl::StatusOr<LoraAdapter> EmptyAdapter(
      const LoraAdapterOptions& options) const;

  // Takes the adapter, whose factors start to require grad: moves every
  // parameter, buffer and child into the child `base_layer` and registers
  // lora_A and lora_B. kFailedPrecondition if the layer has an adapter already;
  // kInvalidArgument if the factors are not of this layer's shapes. The layer
  // is then as it was.
  absl::Status AdoptAdapter(const LoraAdapter& adapter);

  // Whether AdoptAdapter() was called.
  bool is_adapted() const { return base_layer_ != nullptr; }

  // Of the adapter; 0 before adoption.
  int64_t lora_rank() const { return adapter_.rank; }
  double lora_alpha() const { return adapter_.alpha; }
  double lora_dropout() const { return adapter_.dropout; }

  // The factors as the module has them registered; undefined before adoption.
  at::Tensor lora_A() const;
  at::Tensor lora_B() const;

  // Where the factors lie; nothing for factors that belong to this process
  // alone. The layer only carries the layouts: see lora/lora_gradient_sync.h.
  const std::optional<distributed::ParameterLayout>& lora_A_layout() const {
    return lora_A_layout_;
  }
  const std::optional<distributed::ParameterLayout>& lora_B_layout() const {
    return lora_B_layout_;
  }
  void set_lora_layouts(
      std::optional<distributed::ParameterLayout> lora_A_layout,
      std::optional<distributed::ParameterLayout> lora_B_layout);

 protected:
  // The base layer's parameter or buffer of this name, before and after
  // adoption; undefined if there is none (a layer without a bias). A forward
  // must read its tensors through this, never through a handle of its own.
  at::Tensor state(const std::string& name) const;

  // `base_output` plus the adapter's share, or `base_output` itself before
  // adoption. `input` is [..., in_features], `base_output` [..., out_features].
  // The adapter computes in its own dtype; the result has base_output's. Throws
  // c10::Error, with the layer's name, for a layer that is still on the meta
  // device while `input` is not, or whose adapter has lost a factor.
  at::Tensor AddAdapter(const at::Tensor& input,
                        const at::Tensor& base_output) const;

  // For CloneableLoraLayer: gives this layer, a copy of `source` that still
  // shares its tensors, copies of its own.
  void UnshareFrom(const LoraLayer& source,
                   const std::optional<at::Device>& device);

 private:
  class BaseLayer;

  // The full name in the model if it is known, else the type's.
  std::string DisplayName() const;

  LoraAdapterOptions adapter_;
  std::optional<distributed::ParameterLayout> lora_A_layout_;
  std::optional<distributed::ParameterLayout> lora_B_layout_;
  // The child `base_layer`; null before adoption.
  std::shared_ptr<BaseLayer> base_layer_;
};

// Gives `Derived` clone(), adapted or not, alone or as part of a larger module.
// torch::nn::Cloneable cannot: it rebuilds a module by reset(), which knows
// nothing of an adapter, and forgets requires_grad. `Derived` must be copyable
// and hold no handles to tensors or modules beside the registered ones.
template <typename Derived>
class CloneableLoraLayer : public LoraLayer {
 public:
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<Derived>(static_cast<const Derived&>(*this));
    copy->CloneableLoraLayer::UnshareFrom(*this, device);
    return copy;
  }

 private:
  // Called by the clone() of a module that contains this one.
  void clone_(torch::nn::Module& other,
              const std::optional<at::Device>& device) override {
    auto copy = std::dynamic_pointer_cast<Derived>(other.clone(device));
    TORCH_CHECK(copy != nullptr, "cannot clone a ", other.name(), " into a ",
                this->name());
    static_cast<Derived&>(*this) = *copy;
  }
};

}  // namespace trainer_lora::lora

#endif  // TRAINER_LORA_LORA_LORA_ADAPTER_H_
