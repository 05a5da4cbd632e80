"""Writes what PEFT makes of LoRA and its variants, for the test of the C++ layers.

    python tests/parity/make_variants_fixture.py

Into tests/testdata/peft_variants.safetensors, all in float32 but for the indices into an embedding, for each of CASES:
  {case}/base/{state}            of the base model, before it takes adapters
  {case}/initial/{name}          what the base weights start: factors of PiSSA and OLoRA, where the sign of a component
                                 is the one that makes the largest element of its column of lora_B positive, and the
                                 base weight that they leave behind; magnitudes of DoRA
  {case}/adapter/{parameter}     the values that the adapters then get, of which none is zero
  {case}/input, {case}/output    of the adapted model
  {case}/output_gradient, {case}/input_gradient, {case}/gradient/{parameter}
                                 of the output, which is given, of the input and of the adapters' parameters
  {case}/merged/{weight}         with the adapters merged; absent where PEFT can't merge
Names are those of the C++ component: to_q.lora_A, to_q.adapters.second.lora_A, to_q.lora_magnitude. torch 2.11.0, peft
0.21.2 and safetensors 0.8.0 wrote the committed file.
"""

import argparse
import copy
import dataclasses
import pathlib
import re
from collections.abc import Callable

import peft
import torch
from safetensors.torch import save_file
from torch import nn

FIXTURE = pathlib.Path(__file__).parents[1] / "testdata" / "peft_variants.safetensors"
DEFAULT = "default"
SECOND = "second"


# The models are those of tests/lora/peft_variants_test.cc.
class Linears(nn.Module):
    input_shape = (2, 5, 12)

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(12, 20)
        self.to_k = nn.Linear(20, 7, bias=False)

    def forward(self, x):
        return self.to_k(torch.tanh(self.to_q(x)))


class Convolution(nn.Module):
    input_shape = (2, 3, 7, 6)

    def __init__(self):
        super().__init__()
        # PEFT's adapters have no dilation, and fail where the base layer has one.
        self.conv = nn.Conv2d(3, 8, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0))

    def forward(self, x):
        return self.conv(x)


class GroupedConvolution(nn.Module):
    input_shape = (2, 4, 5, 6)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 6, kernel_size=3, padding=1, groups=2)

    def forward(self, x):
        return self.conv(x)


class Lookup(nn.Module):
    input_shape = (3, 6)
    num_embeddings = 11
    padding_idx = 3

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(self.num_embeddings, 10, padding_idx=self.padding_idx)

    def forward(self, x):
        return self.embed(x)


@dataclasses.dataclass(frozen=True)
class Case:
    model_class: type[nn.Module]
    # Of peft.LoraConfig, beside COMMON; for each adapter, by its name.
    adapters: dict[str, dict]
    # None: the adapters as they are, all active. Else what add_weighted_adapter() combines them with.
    weights: tuple[float, ...] | None = None
    can_merge: bool = True


COMMON = {"r": 4, "lora_alpha": 6, "target_modules": ["to_q", "to_k", "conv", "embed"]}
CASES = {
    "lora": Case(Linears, {DEFAULT: {}}),
    "rslora": Case(Linears, {DEFAULT: {"use_rslora": True}}),
    "dora": Case(Linears, {DEFAULT: {"use_dora": True}}),
    "dora_rslora": Case(Linears, {DEFAULT: {"use_dora": True, "use_rslora": True}}),
    "pissa": Case(Linears, {DEFAULT: {"init_lora_weights": "pissa"}}),
    "olora": Case(Linears, {DEFAULT: {"init_lora_weights": "olora"}}),
    "patterns": Case(Linears, {DEFAULT: {"rank_pattern": {"to_k": 2}, "alpha_pattern": {"to_q": 3, "to_k": 8}}}),
    "two_adapters": Case(Linears, {DEFAULT: {}, SECOND: {"r": 3, "lora_alpha": 2}}),
    "weighted_adapters": Case(Linears, {DEFAULT: {}, SECOND: {"r": 3, "lora_alpha": 2}}, weights=(0.75, -0.5)),
    "conv2d": Case(Convolution, {DEFAULT: {}}),
    "conv2d_groups": Case(GroupedConvolution, {DEFAULT: {}}, can_merge=False),
    "conv2d_dora": Case(Convolution, {DEFAULT: {"use_dora": True}}),
    "embedding": Case(Lookup, {DEFAULT: {}}),
    "embedding_dora": Case(Lookup, {DEFAULT: {"use_dora": True}}),
}


def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> torch.Tensor:
    """Odd multiples of bound * 2^-23 in (-bound, bound): the same on every machine, and never zero."""
    values = 2 * torch.randint(2**23, shape, generator=generator) + 1 - 2**23
    return values * (bound / 2**23)


def make_input(model_class: type[nn.Module], generator: torch.Generator) -> torch.Tensor:
    if model_class is Lookup:
        indices = torch.randint(Lookup.num_embeddings, Lookup.input_shape, generator=generator)
        assert (indices == Lookup.padding_idx).any()
        return indices
    return uniform(model_class.input_shape, 1, generator).requires_grad_()


def fill_base(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(uniform(parameter.shape, 0.5, generator))


def native_name(name: str) -> str:
    """to_q.lora_A for to_q.lora_A.default.weight, and so on."""
    layer, parameter, adapter = re.fullmatch(r"(.+)\.(lora_.+?)(?:_vector)?\.(\w+?)(?:\.weight)?", name).groups()
    return f"{layer}.{parameter}" if adapter == DEFAULT else f"{layer}.adapters.{adapter}.{parameter}"


def native_shape(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The magnitude of a convolution has dimensions of size 1 in PEFT."""
    return tensor.flatten() if name.endswith(".lora_magnitude") else tensor


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters, by their names in C++."""
    return {native_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name}


def fill_adapters(model: nn.Module, generator: torch.Generator) -> None:
    """Values as training may leave them."""
    for name, parameter in adapter_parameters(model).items():
        values = uniform(parameter.shape, 0.5, generator)
        parameter.data.copy_(1 + values if name.endswith(".lora_magnitude") else values)


def with_fixed_signs(lora_A: torch.Tensor, lora_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a decomposition, which is free to choose the sign of each component."""
    signs = lora_B.gather(0, lora_B.abs().argmax(dim=0, keepdim=True)).sign()
    return lora_A * signs.T, lora_B * signs


def initial_values(model: nn.Module, config: dict) -> dict[str, torch.Tensor]:
    """What the adapter `default` of `model` started from the base weights, and what it left of them."""
    parameters = {name: parameter.detach() for name, parameter in adapter_parameters(model).items()}
    initial = {name: tensor for name, tensor in parameters.items() if name.endswith(".lora_magnitude")}
    if "init_lora_weights" in config:
        for layer in ("to_q", "to_k"):
            factors = with_fixed_signs(parameters[f"{layer}.lora_A"], parameters[f"{layer}.lora_B"])
            initial[f"{layer}.lora_A"], initial[f"{layer}.lora_B"] = factors
            initial[f"{layer}.weight"] = model.get_submodule(layer).get_base_layer().weight
    return initial


def adapt(model: nn.Module, case: Case) -> peft.tuners.lora.LoraModel:
    """`model` with the adapters of `case`, in eval mode, in which dropout has no effect."""
    configs = {name: peft.LoraConfig(**COMMON | arguments) for name, arguments in case.adapters.items()}
    adapted = peft.get_peft_model(model, configs[DEFAULT])
    for name, config in configs.items():
        if name != DEFAULT:
            adapted.add_adapter(name, config)
    adapted.base_model.set_adapter(list(configs))
    return adapted.base_model.eval()


def run(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    model = case.model_class()
    fill_base(model, generator)
    tensors = {f"base/{name}": state.clone() for name, state in model.state_dict().items()}

    lora_model = adapt(model, case)
    initial = initial_values(model, case.adapters[DEFAULT])
    tensors |= {f"initial/{name}": tensor.clone() for name, tensor in initial.items()}
    fill_adapters(model, generator)
    trained = adapter_parameters(model)
    tensors |= {f"adapter/{name}": parameter for name, parameter in trained.items()}
    if case.weights is not None:
        lora_model.add_weighted_adapter(list(case.adapters), list(case.weights), "sum", combination_type="cat")
        lora_model.set_adapter("sum")

    tensors["input"] = make_input(case.model_class, generator)
    tensors["output"] = lora_model(tensors["input"])
    tensors["output_gradient"] = uniform(tensors["output"].shape, 1, generator)
    tensors["output"].backward(tensors["output_gradient"])
    if tensors["input"].is_floating_point():
        tensors["input_gradient"] = tensors["input"].grad
    if case.weights is None:
        tensors |= {f"gradient/{name}": parameter.grad for name, parameter in trained.items()}

    if case.can_merge:
        merged = copy.deepcopy(lora_model).merge_and_unload().state_dict()
        tensors |= {f"merged/{name}": state for name, state in merged.items() if name.endswith(".weight")}
    return {name: native_shape(name, tensor.detach()).contiguous() for name, tensor in tensors.items()}


def make_fixture() -> dict[str, torch.Tensor]:
    """The tensors of the file, by their keys there."""
    torch.set_num_threads(1)
    tensors = {}
    for seed, (case_name, case) in enumerate(CASES.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors |= {f"{case_name}/{name}": tensor for name, tensor in run(case, generator).items()}
    return tensors


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    tensors = make_fixture()
    save_file(tensors, FIXTURE)
    print(f"{len(tensors)} tensors, {FIXTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
