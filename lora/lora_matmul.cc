#include "lora/lora_matmul.h"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "ATen/record_function.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "lora/internal/no_autocast_guard.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/custom_class.h"

namespace trainer_lora::lora {
namespace {

using internal::NoAutocastGuard;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- GEMMs -------------------------------------------------------------------

// alpha a b
at::Tensor Product(const at::Tensor& a, const at::Tensor& b, double alpha = 1) {
  if (alpha == 1) return at::mm(a, b);
  // beta = 0: what is added is not read.
  return at::addmm(at::empty({}, a.options()), a, b, /*beta=*/0, alpha);
}

// Whether a matrix has fewer columns than a CPU's GEMM computes at once.
bool IsNarrow(const at::Tensor& matrix) {
  return matrix.device().is_cpu() && matrix.size(1) < 16;
}

// alpha a b for a `b` of few columns: a GEMM is slow on their short rows, and
// at rank 8 takes less than half of the time on columns.
at::Tensor ProductWithNarrow(const at::Tensor& a, const at::Tensor& b,
                             double alpha) {
  return Product(a, IsNarrow(b) ? b.t().contiguous().t() : b, alpha);
}

// alpha a^T b for a `b` of few columns: as (b^T a)^T, at rank 8 in less than a
// quarter of the time.
at::Tensor TransposedProductWithNarrow(const at::Tensor& a, const at::Tensor& b,
                                       double alpha) {
  return IsNarrow(b) ? Product(b.t(), a, alpha).t() : Product(a.t(), b, alpha);
}

// sum + a b, in place unless autograd records; `sum` may be undefined.
void AddProduct(at::Tensor& sum, const at::Tensor& a, const at::Tensor& b) {
  if (!sum.defined()) {
    sum = at::mm(a, b);
  } else if (c10::GradMode::is_enabled()) {
    sum = at::addmm(sum, a, b);
  } else {
    sum.addmm_(a, b);
  }
}

// [..., columns] as [N, columns].
at::Tensor AsMatrix(const at::Tensor& tensor) {
  const at::IntArrayRef sizes = tensor.sizes();
  return tensor.reshape(
      {c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
}

// x W^T + b
at::Tensor Linear(const at::Tensor& input, const at::Tensor& weight,
                  const at::Tensor& bias) {
  return bias.defined() ? at::addmm(bias, input, weight.t())
                        : at::mm(input, weight.t());
}

// --- What the operation gets -------------------------------------------------

// The tensors: the input [N, in_features], then these of each term.
constexpr size_t kInput = 0;
enum TermTensor : size_t {
  kWeight,  // undefined: the base output is the addend
  kAddend,  // a bias, a base output, or undefined
  kLoraA,
  kLoraB,
  kTensorsPerTerm,
};

constexpr size_t IndexOf(size_t term, TermTensor tensor) {
  return kInput + 1 + term * kTensorsPerTerm + tensor;
}

size_t NumTerms(at::TensorList tensors) {
  return (tensors.size() - 1) / kTensorsPerTerm;
}

// torch::autograd::Function takes no undefined tensors: one of shape [0] stands
// for them.
at::Tensor OrPlaceholder(const at::Tensor& tensor) {
  return tensor.defined() ? tensor : at::empty({0});
}

variable_list WithoutPlaceholders(at::TensorList tensors) {
  variable_list result = tensors.vec();
  for (at::Tensor& tensor : result) {
    if (tensor.dim() == 1 && tensor.size(0) == 0) tensor = at::Tensor();
  }
  return result;
}

// What is no tensor.
struct Plan : torch::CustomClassHolder {
  // Of the terms, with dropout's 1 / (1 - probability).
  std::vector<double> scales;
  LoraDropout dropout;
  uint64_t dropout_seed = 0;
  // Whether the terms have weights; an addend is then a bias.
  bool has_weights = true;
  // Whether autograd records forward.
  bool records = false;
};

// The A of the terms below each other, [sum of the ranks, in_features].
at::Tensor StackedA(at::TensorList tensors) {
  if (NumTerms(tensors) == 1) return tensors[IndexOf(0, kLoraA)];
  std::vector<at::Tensor> factors;
  for (size_t i = 0; i < NumTerms(tensors); ++i) {
    factors.push_back(tensors[IndexOf(i, kLoraA)]);
  }
  return at::cat(factors);
}

// What belongs to each term of a tensor that has the ranks of all along `dim`.
std::vector<at::Tensor> SplitByRank(const at::Tensor& stacked, int64_t dim,
                                    at::TensorList tensors) {
  if (NumTerms(tensors) == 1) return {stacked};
  std::vector<int64_t> ranks;
  for (size_t i = 0; i < NumTerms(tensors); ++i) {
    ranks.push_back(tensors[IndexOf(i, kLoraA)].size(0));
  }
  return stacked.split_with_sizes(ranks, dim);
}

// Whether a result of `rows` rows and `columns` columns is computed from
// W + scale B A rather than from W, B and A. FLOPs alone would say so for more
// rows than columns; measured, forming the sum costs up to twice as much as
// they say. A sum in half precision would round small adapters away.
bool UsesSum(const Plan& plan, at::ScalarType dtype, int64_t rows,
             int64_t columns) {
  return plan.has_weights && plan.dropout.probability == 0 &&
         rows >= 2 * columns && (dtype == at::kFloat || dtype == at::kDouble);
}

// W + scale B A
at::Tensor SumOf(at::TensorList tensors, size_t term, double scale) {
  return at::addmm(tensors[IndexOf(term, kWeight)],
                   tensors[IndexOf(term, kLoraB)],
                   tensors[IndexOf(term, kLoraA)], /*beta=*/1, scale);
}

// --- Dropout -----------------------------------------------------------------

uint64_t DrawSeed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

at::Generator NewGenerator(const at::Device& device, uint64_t seed) {
  if (device.is_cpu()) return at::detail::createCPUGenerator(seed);
  at::Generator generator = at::globalContext()
                                .getAcceleratorHooksInterface(device.type())
                                .getNewGenerator(device.index());
  generator.set_current_seed(seed);
  return generator;
}

// Whether each element of an input [rows, columns] is dropped; undefined
// without dropout.
at::Tensor DroppedElements(const LoraDropout& dropout, uint64_t seed,
                           int64_t rows, int64_t columns,
                           const at::Device& device) {
  if (dropout.probability == 0) return at::Tensor();
  at::Tensor dropped = at::empty({rows, dropout.input_size},
                                 at::TensorOptions(device).dtype(at::kBool));
  if (!device.is_meta()) {
    dropped.bernoulli_(dropout.probability, NewGenerator(device, seed));
  }
  return dropped.narrow(1, dropout.input_offset, columns);
}

at::Tensor Drop(const at::Tensor& values, const at::Tensor& dropped) {
  return dropped.defined() ? values.masked_fill(dropped, 0) : values;
}

// --- Backward ----------------------------------------------------------------

// The gradients of one backward pass. Where autograd records it (create_graph),
// every step is differentiable.
class Gradients {
 public:
  // `output_grads` are those of what forward returned; some may be undefined.
  Gradients(const AutogradContext& context, const Plan& plan,
            variable_list output_grads)
      : context_(context),
        plan_(plan),
        tensors_(context.get_saved_variables()),
        grads_(std::move(output_grads)) {
    hidden_ = std::move(tensors_.back());
    tensors_.pop_back();
    if (hidden_.defined()) {
      given_hidden_grad_ = std::move(grads_.back());
      grads_.pop_back();
    }
    for (at::Tensor& grad : grads_) {
      // The gradient of a sum is expanded: every GEMM would copy it.
      if (grad.defined()) grad = grad.contiguous();
    }
  }

  // Of the tensors that forward got, undefined where none is needed.
  variable_list Compute() {
    variable_list results(tensors_.size());
    if (Needs(kInput)) results[kInput] = InputGrad();
    ComputeLoraAGrads(results);
    for (size_t i = 0; i < grads_.size(); ++i) {
      const at::Tensor& grad = grads_[i];
      if (!grad.defined()) continue;
      if (Needs(IndexOf(i, kWeight))) {
        results[IndexOf(i, kWeight)] = at::mm(grad.t(), tensors_[kInput]);
      }
      if (Needs(IndexOf(i, kAddend))) {
        results[IndexOf(i, kAddend)] = plan_.has_weights ? grad.sum(0) : grad;
      }
      if (Needs(IndexOf(i, kLoraB))) {
        results[IndexOf(i, kLoraB)] = TransposedProductWithNarrow(
            grad, SplitByRank(Hidden(), 1, tensors_)[i], plan_.scales[i]);
      }
    }
    return results;
  }

 private:
  bool Needs(size_t index) const { return context_.needs_input_grad(index); }

  int64_t rows() const {
    for (const at::Tensor& grad : grads_) {
      if (grad.defined()) return grad.size(0);
    }
    return given_hidden_grad_.size(0);
  }

  const at::Tensor& Dropped() {
    if (!dropped_.defined()) {
      const at::Tensor& lora_A = tensors_[IndexOf(0, kLoraA)];
      dropped_ = DroppedElements(plan_.dropout, plan_.dropout_seed, rows(),
                                 lora_A.size(1), lora_A.device());
    }
    return dropped_;
  }

  // What A multiplies.
  const at::Tensor& AdapterInput() {
    if (!adapter_input_.defined()) {
      adapter_input_ = Drop(tensors_[kInput], Dropped());
    }
    return adapter_input_;
  }

  // dropout(x) A^T, [N, sum of the ranks].
  const at::Tensor& Hidden() {
    if (!hidden_.defined()) {
      hidden_ = at::mm(AdapterInput(), StackedA(tensors_).t());
    }
    return hidden_;
  }

  // The gradient of Hidden().
  const at::Tensor& HiddenGrad() {
    if (hidden_grad_.defined()) return hidden_grad_;
    std::vector<at::Tensor> parts;
    for (size_t i = 0; i < grads_.size(); ++i) {
      const at::Tensor& lora_B = tensors_[IndexOf(i, kLoraB)];
      parts.push_back(
          grads_[i].defined()
              ? ProductWithNarrow(grads_[i], lora_B, plan_.scales[i])
              : at::zeros({rows(), lora_B.size(1)}, lora_B.options()));
    }
    hidden_grad_ = parts.size() == 1 ? parts[0] : at::cat(parts, /*dim=*/1);
    if (given_hidden_grad_.defined()) {
      hidden_grad_ = hidden_grad_ + given_hidden_grad_;
    }
    return hidden_grad_;
  }

  // Whether the gradient of the input is that of W + scale B A.
  bool UsesSums() const {
    if (c10::GradMode::is_enabled() || given_hidden_grad_.defined()) {
      return false;
    }
    int64_t out_features = 0;
    for (const at::Tensor& grad : grads_) {
      if (grad.defined()) out_features = std::max(out_features, grad.size(1));
    }
    return UsesSum(plan_, tensors_[IndexOf(0, kLoraA)].scalar_type(), rows(),
                   out_features);
  }

  at::Tensor InputGrad() {
    const bool uses_sums = UsesSums();
    at::Tensor result;
    for (size_t i = 0; i < grads_.size(); ++i) {
      if (!plan_.has_weights || !grads_[i].defined()) continue;
      AddProduct(result, grads_[i],
                 uses_sums ? SumOf(tensors_, i, plan_.scales[i])
                           : tensors_[IndexOf(i, kWeight)]);
    }
    if (uses_sums) return result;
    const at::Tensor lora_A = StackedA(tensors_);
    if (plan_.dropout.probability == 0) {
      AddProduct(result, HiddenGrad(), lora_A);
      return result;
    }
    at::Tensor share = at::mm(HiddenGrad(), lora_A);
    if (c10::GradMode::is_enabled()) {
      share = share.masked_fill(Dropped(), 0);
      return result.defined() ? result + share : share;
    }
    share.masked_fill_(Dropped(), 0);
    return result.defined() ? result.add_(share) : share;
  }

  void ComputeLoraAGrads(variable_list& results) {
    bool any = false;
    for (size_t i = 0; i < grads_.size(); ++i) {
      any = any || Needs(IndexOf(i, kLoraA));
    }
    if (!any) return;
    const std::vector<at::Tensor> parts = SplitByRank(
        at::mm(HiddenGrad().t(), AdapterInput()), /*dim=*/0, tensors_);
    for (size_t i = 0; i < grads_.size(); ++i) {
      if (Needs(IndexOf(i, kLoraA))) results[IndexOf(i, kLoraA)] = parts[i];
    }
  }

  const AutogradContext& context_;
  const Plan& plan_;
  variable_list tensors_;
  variable_list grads_;
  // That which comes through Hidden() as an output: of second derivatives.
  at::Tensor given_hidden_grad_;
  // Made at first use.
  at::Tensor dropped_, adapter_input_, hidden_, hidden_grad_;
};

// --- The operation -----------------------------------------------------------

class LoraFunction : public torch::autograd::Function<LoraFunction> {
 public:
  // The outputs of the terms and, if it is kept, dropout(x) A^T: as an output
  // it has its place in the graph, which second derivatives need.
  static variable_list forward(AutogradContext* context, at::TensorList given,
                               const c10::intrusive_ptr<Plan>& plan) {
    RECORD_FUNCTION("trainer_lora::lora_matmul", {});
    // The in-place GEMMs would be refused.
    const NoAutocastGuard no_autocast;
    const variable_list tensors = WithoutPlaceholders(given);
    const at::Tensor& input = tensors[kInput];
    variable_list outputs;
    at::Tensor kept_hidden;
    if (UsesSum(*plan, input.scalar_type(), input.size(0), input.size(1))) {
      for (size_t i = 0; i < NumTerms(tensors); ++i) {
        outputs.push_back(Linear(input, SumOf(tensors, i, plan->scales[i]),
                                 tensors[IndexOf(i, kAddend)]));
      }
    } else {
      const at::Tensor dropped =
          DroppedElements(plan->dropout, plan->dropout_seed, input.size(0),
                          input.size(1), input.device());
      const at::Tensor hidden =
          at::mm(Drop(input, dropped), StackedA(tensors).t());
      const std::vector<at::Tensor> parts = SplitByRank(hidden, 1, tensors);
      for (size_t i = 0; i < NumTerms(tensors); ++i) {
        outputs.push_back(Output(tensors, i, parts[i], plan->scales[i]));
      }
      if (plan->records && AnyRequiresGrad(tensors, kLoraB)) {
        kept_hidden = hidden;
        outputs.push_back(hidden);
      }
    }
    Keep(context, tensors, kept_hidden, plan);
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    RECORD_FUNCTION("trainer_lora::lora_matmul_backward", {});
    const NoAutocastGuard no_autocast;
    const auto plan = c10::static_intrusive_pointer_cast<Plan>(
        context->saved_data.at("plan").toCapsule());
    variable_list results =
        Gradients(*context, *plan, std::move(grads)).Compute();
    results.emplace_back();  // of the plan
    return results;
  }

 private:
  static at::Tensor Output(at::TensorList tensors, size_t term,
                           const at::Tensor& hidden, double scale) {
    const at::Tensor& weight = tensors[IndexOf(term, kWeight)];
    const at::Tensor& addend = tensors[IndexOf(term, kAddend)];
    const at::Tensor up = tensors[IndexOf(term, kLoraB)].t();
    if (weight.defined()) {
      return Linear(tensors[kInput], weight, addend)
          .addmm_(hidden, up, /*beta=*/1, scale);
    }
    return addend.defined() ? at::addmm(addend, hidden, up, /*beta=*/1, scale)
                            : Product(hidden, up, scale);
  }

  static bool AnyRequiresGrad(at::TensorList tensors, TermTensor tensor) {
    for (size_t i = 0; i < NumTerms(tensors); ++i) {
      const at::Tensor& value = tensors[IndexOf(i, tensor)];
      if (value.defined() && value.requires_grad()) return true;
    }
    return false;
  }

  // Keeps what backward reads.
  static void Keep(AutogradContext* context, const variable_list& tensors,
                   const at::Tensor& hidden,
                   const c10::intrusive_ptr<Plan>& plan) {
    const bool reads_input =
        AnyRequiresGrad(tensors, kWeight) || AnyRequiresGrad(tensors, kLoraA) ||
        (AnyRequiresGrad(tensors, kLoraB) && !hidden.defined());
    variable_list kept = tensors;
    if (!reads_input) kept[kInput] = at::Tensor();
    for (size_t i = 0; i < NumTerms(tensors); ++i) {
      if (!tensors[kInput].requires_grad()) {
        kept[IndexOf(i, kWeight)] = at::Tensor();
      }
      kept[IndexOf(i, kAddend)] = at::Tensor();
    }
    kept.push_back(hidden);
    context->save_for_backward(std::move(kept));
    context->saved_data["plan"] = c10::IValue::make_capsule(plan);
    context->set_materialize_grads(false);
  }
};

// Casts as autocast would for at::linear, where it is on.
class AutocastToLinear {
 public:
  explicit AutocastToLinear(at::DeviceType device)
      : device_(device),
        enabled_(at::autocast::is_autocast_available(device) &&
                 at::autocast::is_autocast_enabled(device)) {}

  // The dtype of the computation for an input of this one.
  at::ScalarType DtypeFor(at::ScalarType dtype) const {
    return enabled_ && dtype != at::kDouble
               ? at::autocast::get_autocast_dtype(device_)
               : dtype;
  }

  at::Tensor operator()(const at::Tensor& tensor) const {
    if (!enabled_ || !tensor.defined()) return tensor;
    return at::autocast::cached_cast(DtypeFor(tensor.scalar_type()), tensor,
                                     device_);
  }

 private:
  at::DeviceType device_;
  bool enabled_;
};

void CheckTerm(const LoraMatmulTerm& term, int64_t in_features) {
  const at::Tensor& a = term.lora_A;
  const at::Tensor& b = term.lora_B;
  TORCH_CHECK(a.dim() == 2 && a.size(1) == in_features, "lora_A of shape ",
              a.sizes(), " doesn't fit an input of ", in_features, " columns");
  TORCH_CHECK(b.dim() == 2 && b.size(1) == a.size(0), "lora_B of shape ",
              b.sizes(), " doesn't fit a lora_A of shape ", a.sizes());
  TORCH_CHECK(!term.weight.defined() ||
                  (term.weight.dim() == 2 && term.weight.size(0) == b.size(0) &&
                   term.weight.size(1) == in_features),
              "a weight of shape ", term.weight.sizes(),
              " doesn't fit a lora_B of shape ", b.sizes(), " and an input of ",
              in_features, " columns");
}

// With the size of an input of `in_features` columns.
LoraDropout CheckedDropout(LoraDropout dropout, int64_t in_features) {
  TORCH_CHECK(dropout.probability >= 0 && dropout.probability < 1,
              "dropout must be in [0, 1), not ", dropout.probability);
  if (dropout.input_size == 0) dropout.input_size = in_features;
  TORCH_CHECK(dropout.input_offset >= 0 &&
                  dropout.input_offset + in_features <= dropout.input_size,
              "dropout: ", in_features, " columns from ", dropout.input_offset,
              " are not within an input of ", dropout.input_size, " columns");
  return dropout;
}

LoraDropout DropoutOf(absl::Span<const LoraMatmulTerm> terms,
                      int64_t in_features) {
  const LoraDropout& dropout = terms[0].dropout;
  for (const LoraMatmulTerm& term : terms) {
    TORCH_CHECK(term.dropout.probability == dropout.probability &&
                    term.dropout.input_offset == dropout.input_offset &&
                    term.dropout.input_size == dropout.input_size,
                "layers that share an input have different dropouts (",
                dropout.probability, " and ", term.dropout.probability,
                "): call LoraMatmul() for each by itself");
  }
  return CheckedDropout(dropout, in_features);
}

// Terms without a weight have a base output [N, out_features], or nothing, in
// place of their bias.
std::vector<at::Tensor> Apply(const at::Tensor& input,
                              absl::Span<const LoraMatmulTerm> terms) {
  TORCH_CHECK(input.dim() > 0, "a LoRA layer's input must have a dimension");
  const int64_t in_features = input.size(-1);
  const LoraDropout dropout = DropoutOf(terms, in_features);
  auto plan = c10::make_intrusive<Plan>();
  plan->dropout = dropout;
  plan->has_weights = terms[0].weight.defined();
  plan->records = c10::GradMode::is_enabled();
  if (dropout.probability > 0 && !input.is_meta()) {
    plan->dropout_seed = DrawSeed();
  }

  const AutocastToLinear autocast(input.device().type());
  std::vector<int64_t> sizes = input.sizes().vec();
  sizes.pop_back();
  variable_list tensors = {AsMatrix(autocast(input))};
  const at::ScalarType dtype = tensors[kInput].scalar_type();
  for (const LoraMatmulTerm& term : terms) {
    CheckTerm(term, in_features);
    tensors.push_back(OrPlaceholder(autocast(term.weight)));
    tensors.push_back(OrPlaceholder(autocast(term.bias)));
    tensors.push_back(autocast(term.lora_A).to(dtype));
    tensors.push_back(autocast(term.lora_B).to(dtype));
    plan->scales.push_back(term.scale / (1 - dropout.probability));
  }

  std::vector<at::Tensor> outputs =
      LoraFunction::apply(at::TensorList(tensors), plan);
  outputs.resize(terms.size());
  if (input.dim() == 2) return outputs;
  for (at::Tensor& output : outputs) {
    sizes.push_back(output.size(1));
    // As at::linear: autograd would refuse to change a view that was made
    // without it.
    output = at::_unsafe_view(output, sizes);
    sizes.pop_back();
  }
  return outputs;
}

}  // namespace

at::Tensor ApplyDropout(const at::Tensor& input, const LoraDropout& dropout) {
  if (dropout.probability == 0) return input;
  TORCH_CHECK(input.dim() > 0, "dropout of an input without a dimension");
  const int64_t columns = input.size(-1);
  const LoraDropout checked = CheckedDropout(dropout, columns);
  const at::Tensor dropped = DroppedElements(
      checked, input.is_meta() ? 0 : DrawSeed(),
      c10::multiply_integers(input.sizes().slice(0, input.dim() - 1)), columns,
      input.device());
  return input.masked_fill(dropped.view_as(input), 0) /
         (1 - checked.probability);
}

at::Tensor LoraMatmul(const at::Tensor& input, const LoraMatmulTerm& term) {
  return LoraMatmul(input, absl::MakeConstSpan(&term, 1))[0];
}

std::vector<at::Tensor> LoraMatmul(const at::Tensor& input,
                                   absl::Span<const LoraMatmulTerm> terms) {
  if (terms.empty()) return {};
  for (const LoraMatmulTerm& term : terms) {
    TORCH_CHECK(term.weight.defined(), "LoraMatmul() without a weight");
  }
  return Apply(input, terms);
}

at::Tensor LoraAdd(const at::Tensor& base_output, const at::Tensor& input,
                   const at::Tensor& lora_A, const at::Tensor& lora_B,
                   double scale, const LoraDropout& dropout) {
  LoraMatmulTerm term;
  term.lora_A = lora_A;
  term.lora_B = lora_B;
  term.scale = scale;
  term.dropout = dropout;
  TORCH_CHECK(lora_B.dim() == 2 && input.dim() > 0 &&
                  base_output.dim() == input.dim() &&
                  base_output.sizes().slice(0, input.dim() - 1) ==
                      input.sizes().slice(0, input.dim() - 1) &&
                  base_output.size(-1) == lora_B.size(0),
              "LoraAdd(): a base output of shape ", base_output.sizes(),
              " doesn't fit an input of shape ", input.sizes(),
              " and a lora_B of shape ", lora_B.sizes());
  const AutocastToLinear autocast(input.device().type());
  if (autocast.DtypeFor(input.scalar_type()) != base_output.scalar_type()) {
    return base_output + Apply(input, {term})[0].to(base_output.scalar_type());
  }
  term.bias = AsMatrix(base_output);
  return Apply(input, {term})[0];
}

}  // namespace trainer_lora::lora
