#include "lora/lora_adapter.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/OpMathType.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "c10/core/GradMode.h"
#include "c10/core/InferenceMode.h"
#include "c10/util/Exception.h"
#include "config/internal/status_macros.h"
#include "distributed/device_mesh.h"
#include "distributed/internal/guarded_step.h"
#include "distributed/internal/write_problem.h"
#include "distributed/tensor_slice.h"
#include "lora/dora.h"
#include "lora/internal/no_autocast_guard.h"

namespace trainer_lora::lora {
namespace {

using ::trainer_lora::distributed::internal::CheckCanWrite;

constexpr char kBaseLayer[] = "base_layer";
constexpr char kAdapters[] = "adapters";
constexpr char kMagnitude[] = "lora_magnitude";

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
  target.train(source.is_training());  // Before it has children with their own.
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
}

at::IntArrayRef Shape(const std::vector<int64_t>& shape) { return shape; }

std::string ShapeString(at::IntArrayRef shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// `values` * `scale`, in the type of the values. The scale isn't rounded to it:
// in bfloat16, 1.0055 would be 1.0078 for all of a feature's values.
at::Tensor Scaled(const at::Tensor& values, const at::Tensor& scale) {
  return (values * scale).to(values.scalar_type());
}

// A factor as a matrix.
at::Tensor AsMatrix(const at::Tensor& factor) { return factor.flatten(1); }

// What LoraLayer::FactorsFromBase() takes out of a weight.
struct Factors {
  at::Tensor a;
  at::Tensor b;
};

Factors PissaFactors(const at::Tensor& weight, int64_t rank, double scale) {
  const auto [u, s, vh] = at::linalg_svd(weight, /*full_matrices=*/false);
  const at::Tensor roots = at::sqrt(s.narrow(0, 0, rank) / scale);
  return {roots.unsqueeze(1) * vh.narrow(0, 0, rank),
          u.narrow(1, 0, rank) * roots};
}

// Whether the factors have values, such as those of a checkpoint.
bool HasStarted(const LoraAdapter& adapter) {
  return adapter.lora_A.any().item<bool>() && adapter.lora_B.any().item<bool>();
}

Factors OloraFactors(const at::Tensor& weight, int64_t rank) {
  const auto [q, r] = at::linalg_qr(weight);
  return {r.narrow(0, 0, rank), q.narrow(1, 0, rank)};
}

// `restored`, what WeightFromMatrix() made for the base weight `weight`. Throws
// where that is of another kind of type: a quantized weight would take the
// values for its integers.
at::Tensor CheckedForWeight(at::Tensor restored, const at::Tensor& weight,
                            const std::string& layer_name) {
  TORCH_CHECK(
      restored.scalar_type() == weight.scalar_type() ||
          (restored.is_floating_point() && weight.is_floating_point()),
      layer_name, ": its weight of type ", c10::toString(weight.scalar_type()),
      " can't take values of type ", c10::toString(restored.scalar_type()),
      ": override WeightFromMatrix() beside WeightMatrix()");
  return restored;
}

// What an exception of libtorch says: kResourceExhausted where memory ran out,
// else kFailedPrecondition.
absl::Status StatusOf(const c10::Error& error) {
  const std::string message = error.what_without_backtrace();
  return distributed::internal::IsOutOfMemory(error)
             ? absl::ResourceExhaustedError(message)
             : absl::FailedPreconditionError(message);
}

// Whether the factors of an adapter can be of this type.
bool CanBeFactors(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf ||
         dtype == at::kBFloat16;
}

// kInvalidArgument unless these are what LoraAdapterOptions says.
absl::Status CheckOptions(const LoraAdapterOptions& options) {
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
  return absl::OkStatus();
}

// What `step`, which computes with the base weight of a layer, returns, or what
// it throws.
template <typename Step>
absl::Status WithBaseWeight(const std::string& layer_name, const Step& step) {
  const c10::NoGradGuard no_grad;
  const internal::NoAutocastGuard no_autocast;
  try {
    return step();
  } catch (const c10::LinAlgError& error) {
    return absl::InternalError(
        absl::StrCat(layer_name, ": ", error.what_without_backtrace()));
  } catch (const c10::Error& error) {
    const absl::Status status = StatusOf(error);
    if (!absl::IsResourceExhausted(status)) return status;
    return absl::ResourceExhaustedError(
        absl::StrCat(layer_name, ": ", status.message()));
  }
}

}  // namespace

// A module that has what others registered: the base layer, and the parameters
// of a named adapter.
class LoraLayer::StateModule : public torch::nn::Module {
 public:
  using Module::Module;

  // Takes over the registrations of `layer`, which shares them until it is
  // cleared.
  static std::shared_ptr<StateModule> ShareStateOf(
      const torch::nn::Module& layer) {
    auto base_layer = std::make_shared<StateModule>("BaseLayer");
    base_layer->train(layer.is_training());  // Not of the children below.
    for (const auto& item : layer.named_parameters(/*recurse=*/false)) {
      // register_parameter() would set whether it requires grad, which it has,
      // and a parameter that was made in inference mode refuses.
      base_layer->parameters_.insert(item.key(), item.value());
    }
    for (const auto& item : layer.named_buffers(/*recurse=*/false)) {
      base_layer->register_buffer(item.key(), item.value());
    }
    for (const auto& item : layer.named_children()) {
      base_layer->register_module(item.key(), item.value());
    }
    return base_layer;
  }

  std::shared_ptr<Module> clone(
      const std::optional<at::Device>& device = std::nullopt) const override {
    auto copy = std::make_shared<StateModule>(name());
    RegisterCopies(*this, device, *copy);
    return copy;
  }

  const at::Tensor* FindParameter(const std::string& name) const {
    return parameters_.find(name);
  }

  std::shared_ptr<StateModule> Child(const std::string& name) const {
    return std::static_pointer_cast<StateModule>(named_children()[name]);
  }
};

double LoraAdapterOptions::Scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (use_rslora ? std::sqrt(r) : r);
}

// --- What a layer says of itself ---------------------------------------------

at::TensorOptions LoraLayer::adapter_options() const {
  const at::Tensor weight = state("weight");
  TORCH_CHECK(weight.defined(), name(),
              " has no state `weight`: override adapter_options()");
  return at::TensorOptions().dtype(weight.dtype()).device(weight.device());
}

LoraLayer::AdapterShapes LoraLayer::adapter_shapes(int64_t rank) const {
  return {{rank, in_features()}, {out_features(), rank}, {out_features()}};
}

std::optional<distributed::StateLayout> LoraLayer::LayoutOf(absl::string_view,
                                                            int64_t) const {
  return std::nullopt;
}

at::Tensor LoraLayer::WeightMatrix() const {
  const at::Tensor weight = state("weight");
  if (!weight.defined() || !weight.is_floating_point() || weight.dim() < 2) {
    return at::Tensor();
  }
  return AsMatrix(weight);
}

at::Tensor LoraLayer::WeightFromMatrix(const at::Tensor& matrix) const {
  return matrix.view(state("weight").sizes());
}

// --- Adapters ----------------------------------------------------------------

absl::StatusOr<LoraLayer::AdapterShapes> LoraLayer::CheckedShapes(
    int64_t rank) const {
  try {
    return adapter_shapes(rank);
  } catch (const c10::Error& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  }
}

absl::StatusOr<LoraAdapter> LoraLayer::EmptyAdapter(
    const LoraAdapterOptions& options) const {
  LORA_RETURN_IF_ERROR(CheckOptions(options));
  LORA_ASSIGN_OR_RETURN(const AdapterShapes shapes,
                        CheckedShapes(options.rank));
  try {
    if (options.use_dora && !WeightMatrix().defined()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "DoRA needs the norms of a base weight that is a matrix of a "
          "floating point type, which ",
          name(), " does not have: override WeightMatrix(), or exclude it"));
    }
    if (config::StartsFromBase(options.initialization)) {
      LORA_RETURN_IF_ERROR(CheckCanDecompose(options.rank));
    }
    at::TensorOptions tensor_options = adapter_options();
    if (options.dtype) tensor_options = tensor_options.dtype(*options.dtype);
    if (!CanBeFactors(c10::typeMetaToScalarType(tensor_options.dtype()))) {
      return absl::FailedPreconditionError(absl::StrCat(
          "factors of type ", std::string(tensor_options.dtype().name()),
          " can't be trained: choose another dtype for the adapter, or "
          "override adapter_options() of ",
          name()));
    }
    return LoraAdapter{options, at::empty(shapes.lora_A, tensor_options),
                       at::empty(shapes.lora_B, tensor_options),
                       options.use_dora
                           ? at::empty(shapes.lora_magnitude, tensor_options)
                           : at::Tensor()};
  } catch (const c10::Error& error) {
    return StatusOf(error);
  }
}

absl::Status LoraLayer::CheckAdapterName(const std::string& name) {
  if (!name.empty() && !absl::StrContains(name, '.')) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "the name of an adapter is not empty and has no dot, got '", name, "'"));
}

absl::Status LoraLayer::AdoptAdapter(const LoraAdapter& adapter,
                                     const std::string& name) {
  if (HasAdapter(name)) {
    return absl::FailedPreconditionError(absl::StrCat(
        DisplayName(), " has a LoRA adapter ",
        name == kDefaultAdapter ? "" : absl::StrCat(name, " "), "already"));
  }
  if (is_merged()) {
    return absl::FailedPreconditionError(absl::StrCat(
        DisplayName(), " is merged: unmerge it before it gets an adapter"));
  }
  LORA_RETURN_IF_ERROR(CheckAdapterName(name));
  const LoraAdapterOptions& options = adapter.options;
  for (const Slot& slot : slots_) {
    if (config::StartsFromBase(slot.options.initialization) ||
        config::StartsFromBase(options.initialization)) {
      return absl::FailedPreconditionError(absl::StrCat(
          DisplayName(),
          ": an adapter that starts from the base weight, by PiSSA or OLoRA, "
          "can't share it, as '",
          slot.name, "' and '", name, "' would"));
    }
  }
  LORA_RETURN_IF_ERROR(CheckOptions(options));
  LORA_ASSIGN_OR_RETURN(const AdapterShapes shapes,
                        CheckedShapes(options.rank));
  if (!adapter.lora_A.defined() || !adapter.lora_B.defined() ||
      adapter.lora_A.sizes() != Shape(shapes.lora_A) ||
      adapter.lora_B.sizes() != Shape(shapes.lora_B)) {
    return absl::InvalidArgumentError(absl::StrCat(
        DisplayName(), " wants lora_A of shape ", ShapeString(shapes.lora_A),
        " and lora_B of shape ", ShapeString(shapes.lora_B)));
  }
  if (options.use_dora != adapter.lora_magnitude.defined() ||
      (options.use_dora &&
       adapter.lora_magnitude.sizes() != Shape(shapes.lora_magnitude))) {
    return absl::InvalidArgumentError(
        absl::StrCat(DisplayName(), " wants lora_magnitude of shape ",
                     ShapeString(shapes.lora_magnitude), " with DoRA alone"));
  }
  for (const at::Tensor& parameter :
       {adapter.lora_A, adapter.lora_B, adapter.lora_magnitude}) {
    if (!parameter.defined()) continue;
    if (!CanBeFactors(parameter.scalar_type())) {
      return absl::InvalidArgumentError(
          absl::StrCat(DisplayName(), ": an adapter of type ",
                       c10::toString(parameter.scalar_type()),
                       " can't be trained: convert it to a floating point "
                       "type of 16 bits or more"));
    }
    if (parameter.is_inference() && !c10::InferenceMode::is_enabled()) {
      return absl::InvalidArgumentError(absl::StrCat(
          DisplayName(),
          ": an adapter that was made in inference mode can't be trained: "
          "give the layer a copy of it"));
    }
  }

  const auto register_factors = [&](torch::nn::Module& owner) {
    const FactorNames names = factor_names();
    owner.register_parameter(names.lora_A, adapter.lora_A);
    owner.register_parameter(names.lora_B, adapter.lora_B);
    if (options.use_dora) {
      owner.register_parameter(kMagnitude, adapter.lora_magnitude);
    }
  };
  Slot slot;
  slot.name = name;
  slot.options = options;
  if (name != kDefaultAdapter) {
    slot.module = std::make_shared<StateModule>("LoraAdapter");
    register_factors(*slot.module);
    slot.module->train(is_training());
  }
  if (!is_adapted()) {
    auto base_layer = StateModule::ShareStateOf(*this);
    // Module has no way to take back a buffer, so the registrations are built
    // aside and replaced as a whole.
    torch::nn::Module adapted;
    adapted.train(is_training());
    if (name == kDefaultAdapter) register_factors(adapted);
    adapted.register_module(kBaseLayer, base_layer);
    static_cast<torch::nn::Module&>(*this) = std::move(adapted);
    base_layer_ = std::move(base_layer);
  } else if (name == kDefaultAdapter) {
    register_factors(*this);
  }
  if (name != kDefaultAdapter) {
    if (adapters_ == nullptr) {
      adapters_ = std::make_shared<StateModule>("LoraAdapters");
      adapters_->train(is_training());
      register_module(kAdapters, adapters_);
    }
    adapters_->register_module(name, slot.module);
  }
  slots_.push_back(std::move(slot));
  active_ = {{name}};
  return absl::OkStatus();
}

std::string LoraLayer::DisplayName() const {
  for (const Slot& slot : slots_) {
    if (!slot.options.layer_name.empty()) return slot.options.layer_name;
  }
  return name();
}

void LoraLayer::PrintAdapters(std::ostream& stream) const {
  for (const Slot& slot : slots_) {
    const std::string prefix = slot.name == kDefaultAdapter
                                   ? ", "
                                   : absl::StrCat(", ", slot.name, ".");
    stream << prefix << "lora_rank=" << slot.options.rank << prefix
           << "lora_alpha=" << slot.options.alpha;
  }
}

const LoraLayer::Slot* LoraLayer::FindSlot(absl::string_view name) const {
  for (const Slot& slot : slots_) {
    if (slot.name == name) return &slot;
  }
  return nullptr;
}

bool LoraLayer::HasAdapter(absl::string_view name) const {
  return FindSlot(name) != nullptr;
}

std::vector<std::string> LoraLayer::adapter_names() const {
  std::vector<std::string> names;
  for (const Slot& slot : slots_) names.push_back(slot.name);
  return names;
}

at::Tensor LoraLayer::SlotParameter(const Slot& slot,
                                    const std::string& name) const {
  const at::Tensor* parameter = slot.module == nullptr
                                    ? parameters_.find(name)
                                    : slot.module->FindParameter(name);
  return parameter == nullptr ? at::Tensor() : *parameter;
}

LoraAdapter LoraLayer::adapter(absl::string_view name) const {
  const Slot* slot = FindSlot(name);
  TORCH_CHECK(slot != nullptr, DisplayName(), " has no LoRA adapter ",
              std::string(name));
  const FactorNames names = factor_names();
  return {
      slot->options, SlotParameter(*slot, names.lora_A),
      SlotParameter(*slot, names.lora_B),
      slot->options.use_dora ? SlotParameter(*slot, kMagnitude) : at::Tensor()};
}

std::vector<std::pair<std::string, std::string>>
LoraLayer::AdapterParameterNames(absl::string_view name, bool use_dora) const {
  const std::string prefix =
      name == kDefaultAdapter ? "" : absl::StrCat(kAdapters, ".", name, ".");
  const FactorNames factors = factor_names();
  std::vector<std::pair<std::string, std::string>> names = {
      {factors.lora_A, prefix + factors.lora_A},
      {factors.lora_B, prefix + factors.lora_B}};
  if (use_dora) names.emplace_back(kMagnitude, prefix + kMagnitude);
  return names;
}

std::vector<AdapterParameter> LoraLayer::AdapterParameters(
    absl::string_view name) const {
  const LoraAdapter adapter = this->adapter(name);
  const at::Tensor tensors[] = {adapter.lora_A, adapter.lora_B,
                                adapter.lora_magnitude};
  std::vector<AdapterParameter> parameters;
  for (const auto& [state_name, path] :
       AdapterParameterNames(name, adapter.options.use_dora)) {
    auto split = LayoutOf(state_name, adapter.options.rank);
    parameters.push_back({path, state_name, tensors[parameters.size()],
                          split ? std::move(split->layout) : replicated_layout_,
                          split.has_value()});
  }
  return parameters;
}

std::vector<std::string> LoraLayer::base_state_names() const {
  const torch::nn::Module& owner =
      is_adapted() ? static_cast<const torch::nn::Module&>(*base_layer_)
                   : *this;
  // Most layers have no children, and the walk below them is not free.
  const bool recurse = !owner.children().empty();
  std::vector<std::string> names;
  for (const auto& item : owner.named_parameters(recurse)) {
    names.push_back(item.key());
  }
  for (const auto& item : owner.named_buffers(recurse)) {
    names.push_back(item.key());
  }
  return names;
}

at::Tensor LoraLayer::lora_A() const {
  return HasAdapter(kDefaultAdapter) ? adapter().lora_A : at::Tensor();
}

at::Tensor LoraLayer::lora_B() const {
  return HasAdapter(kDefaultAdapter) ? adapter().lora_B : at::Tensor();
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

absl::Status LoraLayer::SetActiveAdapters(std::vector<ActiveAdapter> active) {
  if (is_merged()) {
    return absl::FailedPreconditionError(absl::StrCat(
        DisplayName(),
        " is merged: unmerge it before other adapters are chosen"));
  }
  for (size_t i = 0; i < active.size(); ++i) {
    const std::string& name = active[i].name;
    if (!HasAdapter(name)) {
      return absl::NotFoundError(
          absl::StrCat(DisplayName(), " has no LoRA adapter '", name,
                       "', but [", absl::StrJoin(adapter_names(), ", "), "]"));
    }
    for (size_t j = 0; j < i; ++j) {
      if (active[j].name == name) {
        return absl::InvalidArgumentError(absl::StrCat(
            "the adapter '", name, "' is listed twice: add its weights"));
      }
    }
    if (!std::isfinite(active[i].weight)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the weight of the adapter '", name,
                       "' must be finite, got ", active[i].weight));
    }
  }
  for (const Slot& slot : slots_) {
    if (!config::StartsFromBase(slot.options.initialization)) continue;
    if (active.size() == 1 && active[0].weight == 1) break;
    return absl::FailedPreconditionError(absl::StrCat(
        DisplayName(), ": the adapter '", slot.name,
        "' has started from the base weight, by PiSSA or OLoRA: what is left "
        "of that is not the base model. Keep the adapter active with weight 1, "
        "or save it and load it into a model with the original weights"));
  }
  active_ = std::move(active);
  return absl::OkStatus();
}

std::optional<distributed::ParameterLayout> LoraLayer::ParameterLayoutOf(
    absl::string_view name, int64_t rank) const {
  if (auto layout = LayoutOf(name, rank)) return std::move(layout->layout);
  return replicated_layout_;
}

// --- Forward -----------------------------------------------------------------

void LoraLayer::CheckUsable(const LoraAdapter& adapter,
                            const at::Tensor& input) const {
  const bool has_all =
      adapter.lora_A.defined() && adapter.lora_B.defined() &&
      adapter.options.use_dora == adapter.lora_magnitude.defined();
  TORCH_CHECK(has_all, DisplayName(),
              ": the LoRA adapter has lost its parameters");
  TORCH_CHECK((!adapter.lora_A.is_meta() && !adapter.lora_B.is_meta()) ||
                  input.is_meta(),
              DisplayName(),
              ": the LoRA adapter is still on the meta device: load the model "
              "with the missing-parameter initializer of EnableLoraTraining "
              "before its first use");
}

std::vector<LoraLayer::Share> LoraLayer::SharesFor(
    const at::Tensor& input, const at::Tensor& base_output) const {
  // A linear operator takes a weight on meta without a word, and the loss would
  // be without a value.
  TORCH_CHECK(!base_output.is_meta() || input.is_meta(), DisplayName(),
              " is still on the meta device: load the weights of the model "
              "before its first use");
  if (is_merged()) {
    TORCH_CHECK(!is_training() || !c10::GradMode::is_enabled(), DisplayName(),
                " is merged, and its adapter would not be trained: unmerge it, "
                "or call eval()");
    return {};
  }
  std::vector<Share> shares;
  for (const ActiveAdapter& active : active_) {
    shares.push_back({adapter(active.name), active.weight});
    CheckUsable(shares.back().adapter, input);
  }
  return shares;
}

LoraDropout LoraLayer::DropoutOf(const LoraAdapter& adapter,
                                 const at::Tensor& input) const {
  // Indices have nothing to drop.
  if (!is_training() || !input.is_floating_point()) return {};
  LoraDropout dropout = adapter.options.dropout;
  if (dropout.probability == 0) return dropout;
  if (const auto layout = LayoutOf("lora_A", adapter.options.rank)) {
    const distributed::TensorSlice columns =
        layout->SlicesOf(layout->layout.mesh->rank()).front();
    dropout.input_offset = columns.offsets.back();
    dropout.input_size = layout->global_shape.back();
  }
  return dropout;
}

std::optional<LoraMatmulTerm> LoraLayer::LinearTerm(
    const std::vector<Share>& shares, const at::Tensor& input,
    const at::Tensor& weight, const at::Tensor& bias) const {
  if (shares.size() != 1 || shares[0].adapter.options.use_dora) {
    return std::nullopt;
  }
  const LoraAdapter& adapter = shares[0].adapter;
  return LoraMatmulTerm{weight,
                        bias,
                        adapter.lora_A,
                        adapter.lora_B,
                        shares[0].weight * adapter.options.Scale(),
                        DropoutOf(adapter, input)};
}

std::optional<LoraMatmulTerm> LoraLayer::LinearTerm(
    const at::Tensor& input, const at::Tensor& weight,
    const at::Tensor& bias) const {
  return LinearTerm(SharesFor(input, weight), input, weight, bias);
}

at::Tensor LoraLayer::LinearWithAdapter(const at::Tensor& input,
                                        const at::Tensor& weight,
                                        const at::Tensor& bias) const {
  const std::vector<Share> shares = SharesFor(input, weight);
  if (const auto term = LinearTerm(shares, input, weight, bias)) {
    return LoraMatmul(input, *term);
  }
  if (shares.size() != 1 || shares[0].weight != 1 ||
      DropoutOf(shares[0].adapter, input).probability > 0) {
    return AddShares(shares, input, at::linear(input, weight, bias));
  }
  const LoraAdapter& dora = shares[0].adapter;
  const at::Tensor product = LoraMatmul(
      input,
      {weight, /*bias=*/{}, dora.lora_A, dora.lora_B, dora.options.Scale()});
  const at::Tensor output = Scaled(product, DoraScale(dora));
  return bias.defined() ? output + bias.to(output.scalar_type()) : output;
}

at::Tensor LoraLayer::AddAdapter(const at::Tensor& input,
                                 const at::Tensor& base_output) const {
  return AddShares(SharesFor(input, base_output), input, base_output);
}

at::Tensor LoraLayer::AddShares(const std::vector<Share>& shares,
                                const at::Tensor& input,
                                const at::Tensor& base_output) const {
  at::Tensor output = base_output;
  for (const auto& [adapter, weight] : shares) {
    output = adapter.options.use_dora
                 ? AddDora(output, base_output, input, adapter, weight)
                 : AddProduct(output, input, adapter,
                              weight * adapter.options.Scale(),
                              DropoutOf(adapter, input));
  }
  return output;
}

at::Tensor LoraLayer::AddProduct(const at::Tensor& base_output,
                                 const at::Tensor& input,
                                 const LoraAdapter& adapter, double scale,
                                 const LoraDropout& dropout) const {
  return LoraAdd(base_output, input, adapter.lora_A, adapter.lora_B, scale,
                 dropout);
}

at::Tensor LoraLayer::BaseWithoutBias(const at::Tensor& input) const {
  return at::linear(input, WeightMatrix().to(input.scalar_type()));
}

at::Tensor LoraLayer::AlongOutput(const at::Tensor& values) const {
  return values;
}

at::Tensor LoraLayer::SumOverInputRanks(const at::Tensor& values) const {
  return values;
}

at::Tensor LoraLayer::DoraNorms(const LoraAdapter& adapter) const {
  return SumOverInputRanks(DoraSquaredNorms(WeightMatrix(),
                                            AsMatrix(adapter.lora_A),
                                            AsMatrix(adapter.lora_B),
                                            adapter.options.Scale()))
      .sqrt();
}

at::Tensor LoraLayer::DoraScale(const LoraAdapter& adapter) const {
  const at::Tensor norms = DoraNorms(adapter);
  // A row of zeros has the magnitude zero, and keeps its output of zero.
  return adapter.lora_magnitude / norms.masked_fill(norms == 0, 1);
}

at::Tensor LoraLayer::AddDora(const at::Tensor& output,
                              const at::Tensor& base_output,
                              const at::Tensor& input,
                              const LoraAdapter& adapter, double weight) const {
  const LoraDropout dropout = DropoutOf(adapter, input);
  const at::Tensor adapter_input = ApplyDropout(input, dropout);
  at::Tensor base = base_output;
  if (dropout.probability > 0) {
    base = BaseWithoutBias(adapter_input);
  } else if (const at::Tensor bias = BaseOutputBias(); bias.defined()) {
    base = base_output - AlongOutput(bias.to(base_output.scalar_type()));
  }
  const at::Tensor adapted = AddProduct(
      base, adapter_input, adapter, adapter.options.Scale(), /*dropout=*/{});
  const at::Tensor scaled = Scaled(adapted, AlongOutput(DoraScale(adapter)));
  return at::add(output, scaled - base, weight);
}

// --- What needs the values of the base weight --------------------------------

absl::Status LoraLayer::CheckCanDecompose(int64_t rank) const {
  const at::Tensor weight = WeightMatrix();
  if (!weight.defined()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "PiSSA and OLoRA need a base weight that is a matrix of a floating "
        "point type, which ",
        name(), " does not have: override WeightMatrix(), or exclude it"));
  }
  const auto layout = LayoutOf("weight", rank);
  if (layout && state("weight").sizes() != Shape(layout->global_shape)) {
    return absl::UnimplementedError(absl::StrCat(
        "PiSSA and OLoRA need the whole weight of ", name(),
        ", which is split over ranks: choose another initialization"));
  }
  CheckedForWeight(WeightFromMatrix(weight), state("weight"), name());
  const int64_t components = std::min(weight.size(0), weight.size(1));
  if (rank > components) {
    return absl::InvalidArgumentError(absl::StrCat(
        "PiSSA and OLoRA find ", components,
        " components in the weight, fewer than the LoRA rank ", rank));
  }
  return absl::OkStatus();
}

at::Tensor LoraLayer::ResidualWeight(const LoraAdapter& factors) const {
  const at::Tensor weight = WeightMatrix();
  const at::ScalarType compute = at::toOpMathType(weight.scalar_type());
  const at::Tensor residual =
      at::addmm(weight.to(compute), AsMatrix(factors.lora_B).to(compute),
                AsMatrix(factors.lora_A).to(compute), /*beta=*/1,
                /*alpha=*/-factors.options.Scale());
  return CheckedForWeight(WeightFromMatrix(residual), state("weight"),
                          DisplayName());
}

absl::StatusOr<LoraAdapter> LoraLayer::FactorsFromBase(
    const LoraAdapter& adapter) const {
  LoraAdapter factors;
  const LoraAdapterOptions& options = adapter.options;
  const std::string layer_name =
      options.layer_name.empty() ? DisplayName() : options.layer_name;
  const auto check_can_write = [&](const std::string& state,
                                   const at::Tensor& tensor) {
    return CheckCanWrite(absl::StrCat(layer_name, ".", state), tensor);
  };
  if (options.use_dora) {
    LORA_RETURN_IF_ERROR(check_can_write(kMagnitude, adapter.lora_magnitude));
  }
  if (!config::StartsFromBase(options.initialization)) return factors;
  LORA_RETURN_IF_ERROR(WithBaseWeight(layer_name, [&]() -> absl::Status {
    const at::Tensor weight = WeightMatrix();
    CheckUsable(adapter, weight);
    if (HasStarted(adapter)) return absl::OkStatus();
    const FactorNames names = factor_names();
    LORA_RETURN_IF_ERROR(check_can_write("weight", state("weight")));
    LORA_RETURN_IF_ERROR(check_can_write(names.lora_A, adapter.lora_A));
    LORA_RETURN_IF_ERROR(check_can_write(names.lora_B, adapter.lora_B));
    const at::Tensor wide = weight.to(at::toOpMathType(weight.scalar_type()));
    const auto [a, b] =
        options.initialization == config::AdapterInitialization::kPissa
            ? PissaFactors(wide, options.rank, options.Scale())
            : OloraFactors(wide, options.rank);
    // As the adapter has them, so that rounding goes into what stays behind.
    factors.options = options;
    factors.lora_A =
        a.to(adapter.lora_A.scalar_type()).reshape(adapter.lora_A.sizes());
    factors.lora_B =
        b.to(adapter.lora_B.scalar_type()).reshape(adapter.lora_B.sizes());
    ResidualWeight(factors);  // What it throws, it throws now.
    return absl::OkStatus();
  }));
  return factors;
}

absl::Status LoraLayer::InitializeFromBase(const LoraAdapter& factors) {
  return WithBaseWeight(DisplayName(), [&] {
    for (Slot& slot : slots_) {
      const LoraAdapter adapter = this->adapter(slot.name);
      if (config::StartsFromBase(slot.options.initialization) &&
          factors.lora_A.defined()) {
        const at::Tensor residual = ResidualWeight(factors);
        slot.initial_A = CopyOf(factors.lora_A, at::kCPU);
        slot.initial_B = CopyOf(factors.lora_B, at::kCPU);
        adapter.lora_A.copy_(factors.lora_A);
        adapter.lora_B.copy_(factors.lora_B);
        state("weight").copy_(residual);
      }
      if (!slot.options.use_dora) continue;
      CheckUsable(adapter, WeightMatrix());
      // Every rank that holds columns of these rows has the same magnitudes.
      if (!adapter.lora_magnitude.any().item<bool>()) {
        adapter.lora_magnitude.copy_(DoraNorms(adapter));
      }
    }
    return absl::OkStatus();
  });
}

absl::StatusOr<LoraAdapter> LoraLayer::FactorsFromBase() const {
  LoraAdapter factors;
  for (const Slot& slot : slots_) {
    LORA_ASSIGN_OR_RETURN(factors, FactorsFromBase(adapter(slot.name)));
  }
  return factors;
}

absl::Status LoraLayer::InitializeFromBase() {
  LORA_ASSIGN_OR_RETURN(const LoraAdapter factors, FactorsFromBase());
  return InitializeFromBase(factors);
}

LoraAdapter LoraLayer::InitialFactors(absl::string_view name) const {
  const Slot* slot = FindSlot(name);
  TORCH_CHECK(slot != nullptr, DisplayName(), " has no LoRA adapter ",
              std::string(name));
  return {slot->options, slot->initial_A, slot->initial_B, at::Tensor()};
}

at::Tensor LoraLayer::MergedWeightMatrix() const {
  const c10::NoGradGuard no_grad;
  const internal::NoAutocastGuard no_autocast;
  const at::Tensor weight = WeightMatrix();
  TORCH_CHECK(weight.defined(), DisplayName(),
              ": its weight has no matrix that adapters can be added to");
  const at::ScalarType compute = at::toOpMathType(weight.scalar_type());
  const at::Tensor base = weight.to(compute);
  at::Tensor merged = base.clone();
  for (const ActiveAdapter& active : active_) {
    const LoraAdapter adapter = this->adapter(active.name);
    CheckUsable(adapter, weight);
    const at::Tensor a = AsMatrix(adapter.lora_A).to(compute);
    const at::Tensor b = AsMatrix(adapter.lora_B).to(compute);
    const double scale = adapter.options.Scale();
    if (!adapter.options.use_dora) {
      merged.addmm_(b, a, /*beta=*/1, /*alpha=*/active.weight * scale);
      continue;
    }
    const at::Tensor sum = at::addmm(base, b, a, /*beta=*/1, /*alpha=*/scale);
    const at::Tensor dora_scale = DoraScale(adapter).to(compute);
    merged.add_(dora_scale.unsqueeze(1) * sum - base, active.weight);
  }
  return merged.to(weight.scalar_type());
}

absl::Status LoraLayer::Merge(bool check_finite) {
  if (is_merged()) {
    return absl::FailedPreconditionError(
        absl::StrCat(DisplayName(), " is merged already"));
  }
  if (!is_adapted()) {
    return absl::FailedPreconditionError(
        absl::StrCat(DisplayName(), " has no LoRA adapter to merge"));
  }
  return WithBaseWeight(DisplayName(), [&]() -> absl::Status {
    const at::Tensor merged = MergedWeightMatrix();
    if (merged.is_meta()) {
      return absl::FailedPreconditionError(absl::StrCat(
          DisplayName(), " is still on the meta device: load it first"));
    }
    if (check_finite && !at::isfinite(merged).all().item<bool>()) {
      return absl::DataLossError(absl::StrCat(
          DisplayName(),
          ": the sum of weight and adapter has values that are not finite"));
    }
    const at::Tensor weight = state("weight");
    LORA_RETURN_IF_ERROR(
        CheckCanWrite(absl::StrCat(DisplayName(), ".weight"), weight));
    const at::Tensor merged_weight =
        CheckedForWeight(WeightFromMatrix(merged), weight, DisplayName());
    at::Tensor unmerged = weight.detach().clone();
    weight.copy_(merged_weight);
    unmerged_weight_ = std::move(unmerged);
    return absl::OkStatus();
  });
}

absl::Status LoraLayer::Unmerge() {
  if (!is_merged()) {
    return absl::FailedPreconditionError(
        absl::StrCat(DisplayName(), " is not merged"));
  }
  const c10::NoGradGuard no_grad;
  state("weight").copy_(unmerged_weight_);
  unmerged_weight_ = at::Tensor();
  return absl::OkStatus();
}

void LoraLayer::UnshareFrom(const LoraLayer& source,
                            const std::optional<at::Device>& device) {
  torch::nn::Module unshared(source.name());
  RegisterCopies(source, device, unshared);
  static_cast<torch::nn::Module&>(*this) = std::move(unshared);
  if (!is_adapted()) return;
  const auto children = named_children();
  base_layer_ = std::static_pointer_cast<StateModule>(children[kBaseLayer]);
  if (adapters_ == nullptr) return;
  adapters_ = std::static_pointer_cast<StateModule>(children[kAdapters]);
  for (Slot& slot : slots_) {
    if (slot.module != nullptr) slot.module = adapters_->Child(slot.name);
  }
}

}  // namespace trainer_lora::lora
