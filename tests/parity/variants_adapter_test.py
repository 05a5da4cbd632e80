"""PEFT opens DoRA adapters that save_variants saved, and computes the same as the C++ model. Started by run.sh."""

import os
import pathlib

import peft
import pytest
import safetensors.torch
import torch
from torch import nn

FOLDER = pathlib.Path(os.environ["PARITY_VARIANTS"])


class Model(nn.Module):
    """As in save_variants.cc."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(1, 5, kernel_size=(3, 2), stride=(2, 1), padding=(1, 0))
        self.to_q = nn.Linear(11, 7)
        self.load_state_dict(safetensors.torch.load_file(FOLDER / "base.safetensors"))

    def forward(self, indices):
        return self.to_q(self.conv(self.embed(indices).unsqueeze(1)))


@pytest.fixture(scope="module")
def outputs() -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(FOLDER / "outputs.safetensors")


@pytest.fixture(scope="module")
def peft_model() -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(Model(), FOLDER / "adapter").eval()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_base_outputs_agree(outputs):
    assert_close(Model()(outputs["indices"]), outputs["base"])


def test_adapted_outputs_agree(peft_model, outputs):
    assert_close(peft_model(outputs["indices"]), outputs["adapted"])


def test_the_adapters_make_a_difference(outputs):
    assert (outputs["adapted"] - outputs["base"]).abs().max() > 0.1


def test_peft_adapts_every_layer(peft_model):
    adapted = {name for name, module in peft_model.base_model.model.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"embed", "conv", "to_q"}


def test_the_settings_survive(peft_model):
    config = peft_model.peft_config["default"]
    assert config.use_dora and config.use_rslora
    layers = {name: peft_model.base_model.model.get_submodule(name) for name in ("embed", "conv", "to_q")}
    assert {name: layer.r["default"] for name, layer in layers.items()} == {"embed": 4, "conv": 2, "to_q": 4}
    assert {name: layer.lora_alpha["default"] for name, layer in layers.items()} == {"embed": 6, "conv": 6, "to_q": 5}


def test_what_peft_saves_has_the_tensors_of_the_adapter(peft_model, tmp_path):
    peft_model.save_pretrained(tmp_path)
    theirs = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    ours = safetensors.torch.load_file(FOLDER / "adapter" / "adapter_model.safetensors")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)
