// The base of every layer that can take LoRA adapters.
//
// A layer adopts its adapter in place: the frozen weight (and whatever else the
// layer has) moves into a child `base_layer`, and the trainable factors
// `lora_A` and `lora_B` appear beside it. The module object stays the same, so
// typed holders, Sequential, ModuleList and AnyModule go on working, and the
// names are X.base_layer.weight, X.lora_A and X.lora_B. An adapter of another
// name than "default" has its factors in X.adapters.<name>.
//
// What an adapter adds, for W the base weight as a matrix of out_features rows,
// x the input and b the bias:
//
//   LoRA    W x + b + s B A dropout(x)
//           s = alpha / rank (Hu et al., "LoRA: Low-Rank Adaptation of Large
//           Language Models", 2021)
//   rsLoRA  the same with s = alpha / sqrt(rank) (Kalajdzievski, "A Rank
//           Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023)
//   DoRA    m / |W + s B A| * (W x + s B A x) + b
//           with a trained magnitude m an output feature and |.| the norm of
//           each row, through which no gradient flows (Liu et al., "DoRA:
//           Weight-Decomposed Low-Rank Adaptation", 2024). With dropout, as in
//           PEFT: W x + b + (m / |.| - 1) W x' + m / |.| s B A x' for
//           x' = dropout(x)
//
// Several active adapters add what each of them does, times its weight.
//
// lora/linear.h, lora/parallel_linear.h, lora/conv.h and lora/embedding.h have
// the layers that the component brings. A service's own linear type joins by
// deriving from CloneableLoraLayer:
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
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "config/language_version.h"
#include "config/lora_config.h"
#include "distributed/parameter_layout.h"
#include "distributed/state_layout.h"
#include "lora/lora_matmul.h"
#include "torch/nn/module.h"

namespace trainer_lora::lora {

// The adapter whose factors are X.lora_A and X.lora_B.
inline constexpr char kDefaultAdapter[] = "default";

// What distinguishes one adapter of a layer from another.
struct LoraAdapterOptions {
  // What B A is multiplied by: alpha / rank, or alpha / sqrt(rank).
  double Scale() const;

  // The layer's full name in the model, for messages; may be empty.
  std::string layer_name;
  // The LoRA rank r, > 0.
  int64_t rank = 0;
  // Finite and > 0. A double, as fractions such as 0.5 are in use.
  double alpha = 0;
  // The probability with which an element of the adapter's input is dropped
  // while the layer is in train mode, in [0, 1).
  double dropout = 0;
  // Of the factors: float32, float64, float16 or bfloat16; nothing: that of
  // LoraLayer::adapter_options().
  std::optional<at::ScalarType> dtype;
  // Whether the scale is alpha / sqrt(rank) instead of alpha / rank.
  bool use_rslora = false;
  // Whether there is a magnitude, as in DoRA.
  bool use_dora = false;
  // kPissa and kOlora take the start of the factors out of the base weight; see
  // LoraLayer::InitializeFromBase(). Such an adapter is its layer's only one,
  // active with weight 1.
  config::AdapterInitialization initialization =
      config::AdapterInitialization::kDefault;
  // Which biases are trained with the adapter; see TrainedBiases() in
  // lora/layer_replacement.h.
  config::BiasTraining bias = config::BiasTraining::kNone;
};

// The trainable part of an adapted layer, of the shapes that the layer's
// adapter_shapes() says.
struct LoraAdapter {
  // How it computes and starts.
  LoraAdapterOptions options;
  // The factor that reads the input: of a linear layer, [rank, in_features].
  at::Tensor lora_A;
  // The factor that makes the output: of a linear layer, [out_features, rank].
  at::Tensor lora_B;
  // The magnitude of each output feature, [out_features]. Undefined without
  // DoRA. While it is zero, as it is before LoraLayer::InitializeFromBase(),
  // the adapter can't be used.
  at::Tensor lora_magnitude;
};

// An adapter that takes part in forward.
struct ActiveAdapter {
  // As given to AdoptAdapter(), such as kDefaultAdapter.
  std::string name;
  // What its share is multiplied by; finite.
  double weight = 1;
};

// A trainable parameter of an adapted layer.
struct AdapterParameter {
  // Below the layer: lora_A, adapters.style.lora_B.
  std::string name;
  // What LoraLayer::LayoutOf() calls it: lora_A, lora_B.
  std::string state_name;
  // A handle to it.
  at::Tensor parameter;
  // Where it lies; nothing for one that belongs to this process alone.
  std::optional<distributed::ParameterLayout> layout;
  // Whether the layer itself says so, as it is split over ranks.
  bool is_split = false;
};

// A layer that can take adapters. Like other modules, not safe for use by
// several threads while one of them changes it.
class LoraLayer : public torch::nn::Module {
 public:
  // --- What a layer says of itself ---

  // The features of this layer's input, of the part that this rank holds.
  virtual int64_t in_features() const = 0;
  // The features of its output, likewise: the rows of WeightMatrix().
  virtual int64_t out_features() const = 0;

  // The dtype and device of a new adapter's factors: those of the state
  // `weight`, which must exist. A layer without one, or whose weight is of no
  // floating point type, overrides this.
  virtual at::TensorOptions adapter_options() const;

  // The shapes of an adapter's parameters on this rank.
  struct AdapterShapes {
    std::vector<int64_t> lora_A;          // [rank, in_features] by default.
    std::vector<int64_t> lora_B;          // [out_features, rank] by default.
    std::vector<int64_t> lora_magnitude;  // [out_features] by default.
  };
  // Those for a LoRA rank: by default of a linear layer. Throws c10::Error,
  // which says why, if the layer can't have an adapter of this LoRA rank.
  virtual AdapterShapes adapter_shapes(int64_t rank) const;

  // What the factors are called: names that live as long as the program.
  struct FactorNames {
    const char* lora_A;  // "lora_A" by default.
    const char* lora_B;  // "lora_B" by default.
  };
  // Their names here, which say how they start; see
  // lora/parameter_initializer.h.
  virtual FactorNames factor_names() const { return {"lora_A", "lora_B"}; }

  // How a tensor of this layer lies over the ranks, for layers that are split
  // over them: `name` is that of a state of the base layer (such as weight) or
  // of an adapter's parameter (such as lora_A) of LoRA rank `rank`. Nothing, as
  // by default, for one that each rank has for itself.
  virtual std::optional<distributed::StateLayout> LayoutOf(
      absl::string_view name, int64_t rank) const;

  // --- Adapters ---

  // Factors as AdoptAdapter() wants them: of this layer's shapes and device
  // (which may be meta), of undefined content. kInvalidArgument unless
  // `options` are as described there and adapter_shapes() has some for the LoRA
  // rank, and if PiSSA or OLoRA are asked for more components than the weight
  // has; kFailedPrecondition if there is nothing to take the dtype from, such
  // as a weight in float8, or if DoRA, PiSSA or OLoRA find no WeightMatrix();
  // kUnimplemented for the latter two on a layer that is split over ranks;
  // kResourceExhausted if the memory is not there.
  absl::StatusOr<LoraAdapter> EmptyAdapter(
      const LoraAdapterOptions& options) const;

  // kInvalidArgument unless `name` can be that of an adapter: it is not empty
  // and has no dot.
  static absl::Status CheckAdapterName(const std::string& name);

  // Takes an adapter, whose parameters start to require grad, and makes it the
  // one that is active. The first moves every parameter, buffer and child into
  // the child `base_layer`. kFailedPrecondition if the layer has an adapter of
  // this name already or is merged, or if one of the two starts from the base
  // weight; kInvalidArgument for such a name as CheckAdapterName() refuses, for
  // options out of their range, and for parameters that are not of this layer's
  // shapes, of no type that factors can have, or made in inference mode. The
  // layer is then as it was.
  absl::Status AdoptAdapter(const LoraAdapter& adapter,
                            const std::string& name = kDefaultAdapter);

  // Whether the layer has an adapter.
  bool is_adapted() const { return base_layer_ != nullptr; }
  // Whether it has an adapter of this name.
  bool HasAdapter(absl::string_view name) const;
  // Those of its adapters, in the order of adoption.
  std::vector<std::string> adapter_names() const;
  // Options and registered parameters of an adapter that the layer has, else
  // c10::Error. A parameter that was unregistered is undefined.
  LoraAdapter adapter(absl::string_view name = kDefaultAdapter) const;
  // The names that the parameters of an adapter `name` have, or would have, in
  // the order lora_A, lora_B, lora_magnitude: the state_name of each and its
  // name below the layer.
  std::vector<std::pair<std::string, std::string>> AdapterParameterNames(
      absl::string_view name, bool use_dora) const;
  // The parameters of an adapter that the layer has: its factors and magnitude.
  std::vector<AdapterParameter> AdapterParameters(
      absl::string_view name = kDefaultAdapter) const;
  // The states of the base layer, as they are called without an adapter.
  std::vector<std::string> base_state_names() const;
  // The base layer's parameter or buffer of this name, before and after
  // adoption; undefined if there is none (a layer without a bias).
  at::Tensor state(const std::string& name) const;

  // lora_A of the default adapter; undefined without one.
  at::Tensor lora_A() const;
  // lora_B of the default adapter; undefined without one.
  at::Tensor lora_B() const;

  // The adapters that forward uses, in this order; none: the base layer alone.
  // kNotFound for one that the layer doesn't have, kInvalidArgument for one
  // that is listed twice or whose weight is not finite, kFailedPrecondition for
  // a merged layer, and for anything but weight 1 of an adapter that starts
  // from the base weight.
  absl::Status SetActiveAdapters(std::vector<ActiveAdapter> active);
  // As set; AdoptAdapter() sets the adapter that it takes.
  const std::vector<ActiveAdapter>& active_adapters() const { return active_; }

  // Declares every parameter of the adapters replicated as `layout` says, where
  // LayoutOf() says nothing; see lora/lora_gradient_sync.h.
  void set_replicated_layout(
      std::optional<distributed::ParameterLayout> layout) {
    replicated_layout_ = std::move(layout);
  }
  // As set; nothing at first.
  const std::optional<distributed::ParameterLayout>& replicated_layout() const {
    return replicated_layout_;
  }
  // The layout of a parameter that LayoutOf() knows or that is replicated.
  std::optional<distributed::ParameterLayout> ParameterLayoutOf(
      absl::string_view name, int64_t rank) const;

  // --- What needs the values of the base weight ---

  // Starts what the base weight W, a matrix of rows, starts:
  //
  //   kPissa     B = U_r sqrt(S_r / s), A = sqrt(S_r / s) V_r^T with the r
  //              largest singular values of W = U S V^T (Meng et al., "PiSSA:
  //              Principal Singular Values and Singular Vectors Adaptation of
  //              Large Language Models", 2024)
  //   kOlora     B = Q_r, A = R_r, the first r columns and rows of W = Q R
  //              (Bueyuekakyuez, "OLoRA: Orthonormal Low-Rank Adaptation of
  //              Large Language Models", 2024)
  //   magnitude  the norms of the rows of W + s B A
  //
  // For the first two W - s B A takes the place of W, computed in float32
  // (float64 for a float64 weight) and rounded once. What has started, that is
  // two factors or a magnitude that are not zero, stays as it is: a trainer
  // that has loaded both from its own checkpoint goes on from there. With DoRA
  // on a layer whose input is split over ranks, collective over these.
  // What else has this weight is not seen from here: EnableLoraTraining() and
  // FinalizeLoraTraining() look.
  // kFailedPrecondition, with nothing changed, if weight or adapter have no
  // values or can't be written to (expanded, or made in inference mode), or a
  // magnitude's norms could not be summed over ranks; kInternal, likewise, if a
  // decomposition does not converge; kResourceExhausted if there is no memory.
  absl::Status InitializeFromBase();
  // Its first half, which changes nothing, so that of several layers all can be
  // computed before one is changed: lora_A and lora_B as `adapter`, of this
  // layer or one that it will adopt, starts with them; undefined if nothing is
  // to be taken out of the weight. Errors as InitializeFromBase().
  absl::StatusOr<LoraAdapter> FactorsFromBase(const LoraAdapter& adapter) const;
  // The same of the layer's own adapter: one that has some is the only one.
  absl::StatusOr<LoraAdapter> FactorsFromBase() const;
  // Its second half: writes `factors`, what FactorsFromBase() returned.
  absl::Status InitializeFromBase(const LoraAdapter& factors);
  // What InitializeFromBase() took out of the base weight for this adapter: the
  // factors that it started with, on the CPU; undefined for other adapters, and
  // where residual and factors come from a checkpoint. For the original weight,
  // an adapter is s (B A - B0 A0).
  LoraAdapter InitialFactors(absl::string_view name = kDefaultAdapter) const;

  // The weight of the base layer as a matrix of out_features rows. By default,
  // for a state `weight` of a floating point type, its first dimension against
  // the others; undefined for other layers, which can't be merged.
  virtual at::Tensor WeightMatrix() const;
  // The way back: the state `weight` that has `matrix` as its WeightMatrix().
  // By default a view of `matrix`.
  virtual at::Tensor WeightFromMatrix(const at::Tensor& matrix) const;

  // W + the active adapters, of WeightMatrix()'s shape: computed in float32
  // (float64 for a float64 weight), rounded once. c10::Error without a
  // WeightMatrix().
  at::Tensor MergedWeightMatrix() const;

  // Adds the active adapters to the base weight, until Unmerge(): the weight is
  // kept meanwhile, which takes its size once more. A merged layer computes
  // with its weight alone, and refuses to train. kFailedPrecondition if it is
  // merged already, has no adapter, or a weight that can't be merged or written
  // to; kDataLoss if `check_finite` and the sum has values that are not;
  // kResourceExhausted if there is no memory; each with the layer as it was.
  // What else has this weight is not seen from here: MergeAdapters() looks.
  absl::Status Merge(bool check_finite = false);
  // Gives the layer its base weight back, bit by bit. kFailedPrecondition if it
  // isn't merged.
  absl::Status Unmerge();
  // Whether its weight has the active adapters in it.
  bool is_merged() const { return unmerged_weight_.defined(); }

 protected:
  // at::linear(input, weight, bias) and the active adapters' share, as one
  // operation. `input` is [..., in_features], `weight` [out_features,
  // in_features]; the result is [..., out_features] in the input's dtype.
  // Throws c10::Error as AddAdapter() does.
  at::Tensor LinearWithAdapter(const at::Tensor& input,
                               const at::Tensor& weight,
                               const at::Tensor& bias) const;

  // LinearWithAdapter() as a term that LoraMatmul() can compute with others; of
  // no value unless exactly one adapter is active, without DoRA. Throws as
  // AddAdapter() does.
  std::optional<LoraMatmulTerm> LinearTerm(const at::Tensor& input,
                                           const at::Tensor& weight,
                                           const at::Tensor& bias) const;

  // `base_output` plus the active adapters' share, or `base_output` itself if
  // there is none. `input` is [..., in_features], `base_output` [...,
  // out_features]. The adapter computes in the input's dtype. Throws
  // c10::Error, with the layer's name, for a layer that is still on the meta
  // device while `input` is not, for an adapter that has lost a parameter, and
  // for a merged layer in train mode with autograd on.
  at::Tensor AddAdapter(const at::Tensor& input,
                        const at::Tensor& base_output) const;

  // `base_output` + scale * B A dropout(input). By default that of a linear
  // layer; a layer of another kind overrides it, and the two below.
  virtual at::Tensor AddProduct(const at::Tensor& base_output,
                                const at::Tensor& input,
                                const LoraAdapter& adapter, double scale,
                                const LoraDropout& dropout) const;
  // The base layer on `input`, without its bias.
  virtual at::Tensor BaseWithoutBias(const at::Tensor& input) const;
  // The bias that is part of the `base_output` of AddAdapter(), undefined for
  // none: by default the state `bias`. DoRA scales the output without it.
  virtual at::Tensor BaseOutputBias() const { return state("bias"); }
  // A view of `values`, one an output feature, that can be broadcast against
  // the layer's output.
  virtual at::Tensor AlongOutput(const at::Tensor& values) const;

  // The sum over the ranks that hold the other columns of WeightMatrix(), for
  // layers whose input is split: by default the values themselves.
  virtual at::Tensor SumOverInputRanks(const at::Tensor& values) const;

  // For CloneableLoraLayer: gives this layer, a copy of `source` that still
  // shares its tensors, copies of its own.
  void UnshareFrom(const LoraLayer& source,
                   const std::optional<at::Device>& device);

  // The full name in the model if it is known, else the type's.
  std::string DisplayName() const;

  // For pretty_print(): ", lora_rank=16, lora_alpha=32", nothing without an
  // adapter.
  void PrintAdapters(std::ostream& stream) const;

 private:
  class StateModule;

  struct Slot {
    std::string name;
    LoraAdapterOptions options;
    // Where its parameters are registered; null for the default adapter, whose
    // are the layer's own.
    std::shared_ptr<StateModule> module;
    // Those that were taken out of the base weight, never written to.
    at::Tensor initial_A;
    at::Tensor initial_B;
  };

  // adapter_shapes(), or kInvalidArgument.
  absl::StatusOr<AdapterShapes> CheckedShapes(int64_t rank) const;
  const Slot* FindSlot(absl::string_view name) const;
  at::Tensor SlotParameter(const Slot& slot, const std::string& name) const;
  absl::Status CheckCanDecompose(int64_t rank) const;
  // The base weight without what `factors` multiply to, as the state `weight`.
  at::Tensor ResidualWeight(const LoraAdapter& factors) const;
  // Throws unless `adapter` can compute on `input`.
  void CheckUsable(const LoraAdapter& adapter, const at::Tensor& input) const;
  // An active adapter, and what its share is multiplied by.
  struct Share {
    LoraAdapter adapter;
    double weight;
  };
  std::optional<LoraMatmulTerm> LinearTerm(const std::vector<Share>& shares,
                                           const at::Tensor& input,
                                           const at::Tensor& weight,
                                           const at::Tensor& bias) const;
  // What there is to add; throws where it can't be.
  std::vector<Share> SharesFor(const at::Tensor& input,
                               const at::Tensor& base_output) const;
  at::Tensor AddShares(const std::vector<Share>& shares,
                       const at::Tensor& input,
                       const at::Tensor& base_output) const;
  LoraDropout DropoutOf(const LoraAdapter& adapter,
                        const at::Tensor& input) const;
  // |W + s B A|, an element an output feature.
  at::Tensor DoraNorms(const LoraAdapter& adapter) const;
  // m / |W + s B A|, an element an output feature; differentiable in m.
  at::Tensor DoraScale(const LoraAdapter& adapter) const;
  at::Tensor AddDora(const at::Tensor& output, const at::Tensor& base_output,
                     const at::Tensor& input, const LoraAdapter& adapter,
                     double weight) const;

  std::vector<Slot> slots_;
  std::vector<ActiveAdapter> active_;
  std::optional<distributed::ParameterLayout> replicated_layout_;
  // The child `base_layer`; null before adoption.
  std::shared_ptr<StateModule> base_layer_;
  // The child `adapters`; null unless there is one of another name.
  std::shared_ptr<StateModule> adapters_;
  // While merged: the weight as it was.
  at::Tensor unmerged_weight_;
};

// Gives `Derived` clone(), adapted or not, alone or as part of a larger module.
// torch::nn::Cloneable cannot: it rebuilds a module by reset(), which knows
// nothing of an adapter, and forgets requires_grad. `Derived` must be copyable
// and hold no handles to tensors or modules beside the registered ones.
template <typename Derived>
class CloneableLoraLayer : public LoraLayer {
 public:
  // A copy with tensors of its own, on `device` if one is given.
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
