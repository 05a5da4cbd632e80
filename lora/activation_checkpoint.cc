#include "lora/activation_checkpoint.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <utility>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/autocast_mode.h"
#include "ATen/core/Generator.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/autograd/autograd.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/custom_class.h"

namespace trainer_lora::lora {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TensorsFunction =
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// --- State that the function depends on --------------------------------------

// The states of default generators.
class RngState {
 public:
  RngState() = default;

  // Those of the CPU and of the tensors' devices.
  static RngState Current(at::TensorList tensors) {
    std::vector<at::Device> devices = {at::Device(at::kCPU)};
    for (const at::Tensor& tensor : tensors) {
      if (tensor.is_meta()) continue;
      const auto found =
          std::find(devices.begin(), devices.end(), tensor.device());
      if (found == devices.end()) devices.push_back(tensor.device());
    }
    RngState state;
    for (const at::Device& device : devices) {
      at::Generator generator = at::globalContext().defaultGenerator(device);
      const std::lock_guard<std::mutex> lock(generator.mutex());
      state.states_.emplace_back(generator, generator.get_state());
    }
    return state;
  }

  void Restore() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

class RngScope {
 public:
  RngScope(RngState state, at::TensorList tensors)
      : before_(RngState::Current(tensors)) {
    state.Restore();
  }
  ~RngScope() { before_.Restore(); }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;

 private:
  RngState before_;
};

// Autocast of the CPU and of the accelerator that a CUDA build has.
struct AutocastState {
  struct OfDevice {
    bool enabled;
    at::ScalarType dtype;
  };
  static constexpr std::array<at::DeviceType, 2> kDevices = {at::kCPU,
                                                             at::kCUDA};

  static AutocastState Current() {
    AutocastState state;
    for (size_t i = 0; i < kDevices.size(); ++i) {
      state.devices[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                          at::autocast::get_autocast_dtype(kDevices[i])};
    }
    state.cache_enabled = at::autocast::is_autocast_cache_enabled();
    return state;
  }

  void Restore() const {
    for (size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], devices[i].enabled);
      at::autocast::set_autocast_dtype(kDevices[i], devices[i].dtype);
    }
    at::autocast::set_autocast_cache_enabled(cache_enabled);
  }

  std::array<OfDevice, kDevices.size()> devices;
  bool cache_enabled;
};

// The cache of casts lives as long as the outermost scope.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state)
      : before_(AutocastState::Current()) {
    at::autocast::increment_nesting();
    state.Restore();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    before_.Restore();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
};

// --- The function in the graph -----------------------------------------------

struct Recomputation : torch::CustomClassHolder {
  // Of the inputs that are defined: torch::autograd::Function takes no others.
  variable_list Call(at::TensorList defined_inputs) const {
    variable_list inputs;
    for (const bool is_defined : input_is_defined) {
      inputs.push_back(is_defined ? defined_inputs.front() : at::Tensor());
      if (is_defined) defined_inputs = defined_inputs.slice(1);
    }
    return function(inputs);
  }

  TensorsFunction function;
  std::vector<bool> input_is_defined;
  bool preserve_rng_state = true;
  RngState rng;
  AutocastState autocast;
};

class CheckpointFunction
    : public torch::autograd::Function<CheckpointFunction> {
 public:
  // `root` requires grad, so that the outputs do if no input does.
  static variable_list forward(
      AutogradContext* context, const at::Tensor& /*root*/,
      at::TensorList inputs,
      const c10::intrusive_ptr<Recomputation>& recomputation) {
    Recomputation& self = *recomputation;
    self.autocast = AutocastState::Current();
    if (self.preserve_rng_state) self.rng = RngState::Current(inputs);
    context->save_for_backward(inputs.vec());
    context->saved_data["recomputation"] =
        c10::IValue::make_capsule(recomputation);
    context->set_materialize_grads(false);
    // A cast that is cached here, where autograd does not record, would cut
    // parameters off from later users of the cache.
    AutocastState without_cache = self.autocast;
    without_cache.cache_enabled = false;
    const AutocastScope autocast(without_cache);
    return self.Call(inputs);
  }

  static variable_list backward(AutogradContext* context,
                                const variable_list& grads) {
    TORCH_CHECK(!c10::GradMode::is_enabled(),
                "Checkpoint() has no second derivatives: call backward() "
                "without create_graph, or the function without Checkpoint()");
    TORCH_CHECK(
        torch::autograd::Engine::get_default_engine().is_checkpoint_valid(),
        "Checkpoint() can't be differentiated by torch::autograd::grad() or by "
        "backward() with inputs, which leave out the parameters that its "
        "function captures: call backward() without inputs");
    const auto recomputation =
        c10::static_intrusive_pointer_cast<Recomputation>(
            context->saved_data.at("recomputation").toCapsule());

    variable_list inputs = context->get_saved_variables();
    for (at::Tensor& input : inputs) {
      input = input.detach().set_requires_grad(input.requires_grad());
    }
    BackwardThrough(Recompute(*recomputation, inputs), grads);

    variable_list results = {at::Tensor()};  // of the root
    for (const at::Tensor& input : inputs) results.push_back(input.grad());
    results.emplace_back();  // of the recomputation
    return results;
  }

 private:
  static variable_list Recompute(const Recomputation& self,
                                 const variable_list& inputs) {
    const AutocastScope autocast(self.autocast);
    const c10::AutoGradMode grad_mode(true);
    if (!self.preserve_rng_state) return self.Call(inputs);
    const RngScope rng(self.rng, inputs);
    return self.Call(inputs);
  }

  static void BackwardThrough(const variable_list& outputs,
                              const variable_list& grads) {
    TORCH_CHECK(outputs.size() == grads.size(),
                "Checkpoint(): the function has ", outputs.size(),
                " outputs in backward, but had ", grads.size(),
                " in forward: it must do the same whenever it is called");
    variable_list roots, root_grads;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_grads.push_back(grads[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_grads);
  }
};

}  // namespace

std::vector<at::Tensor> Checkpoint(const TensorsFunction& function,
                                   const std::vector<at::Tensor>& inputs,
                                   const CheckpointOptions& options) {
  if (!c10::GradMode::is_enabled()) return function(inputs);
  auto recomputation = c10::make_intrusive<Recomputation>();
  recomputation->function = function;
  recomputation->preserve_rng_state = options.preserve_rng_state;
  variable_list defined_inputs;
  for (const at::Tensor& input : inputs) {
    recomputation->input_is_defined.push_back(input.defined());
    if (input.defined()) defined_inputs.push_back(input);
  }
  const at::Tensor root = at::empty({0}).requires_grad_();
  return CheckpointFunction::apply(root, at::TensorList(defined_inputs),
                                   recomputation);
}

at::Tensor Checkpoint(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& inputs, const CheckpointOptions& options) {
  return Checkpoint(
      TensorsFunction([function](const std::vector<at::Tensor>& tensors) {
        return std::vector<at::Tensor>{function(tensors)};
      }),
      inputs, options)[0];
}

}  // namespace trainer_lora::lora
