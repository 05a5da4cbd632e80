"""PEFT opens an adapter that the example trained, and computes the same as the C++ model. Started by run.sh."""

import os

import peft
import pytest
import safetensors.torch
import torch
import transformers

# The same in embed.cc.
SENTENCES = [
    "a feline mammal usually having thick soft fur",
    "cat",
    "the capital and largest city of France, on the Seine",
    "any of numerous plants; caf\u00e9, na\u00efve, 42!",
]


def embed(model) -> torch.Tensor:
    """Mean-pooled, normalized embeddings, as sentence-transformers makes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(os.environ["PARITY_BASE_MODEL"])
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(os.environ["PARITY_EMBEDDINGS"])


@pytest.fixture(scope="module")
def base_model() -> torch.nn.Module:
    return transformers.AutoModel.from_pretrained(os.environ["PARITY_BASE_MODEL"]).eval()


@pytest.fixture(scope="module")
def peft_model() -> peft.PeftModel:
    base = transformers.AutoModel.from_pretrained(os.environ["PARITY_BASE_MODEL"])
    return peft.PeftModel.from_pretrained(base, os.environ["PARITY_ADAPTER"]).eval()


def test_base_embeddings_agree(base_model, expected):
    assert (embed(base_model) - expected["base"]).abs().max() < 1e-5


def test_adapted_embeddings_agree(peft_model, expected):
    assert (embed(peft_model) - expected["adapted"]).abs().max() < 1e-5


def test_the_adapter_makes_a_difference(expected):
    assert (expected["adapted"] - expected["base"]).abs().max() > 1e-3


def test_peft_adapts_exactly_the_layers_that_were_trained(peft_model):
    adapted = {name for name, module in peft_model.named_modules() if isinstance(module, peft.tuners.lora.Linear)}
    assert adapted == {
        f"base_model.model.encoder.layer.{layer}.attention.self.{projection}"
        for layer in range(6)
        for projection in ("query", "value")
    }


def test_rank_and_alpha_survive(peft_model):
    config = peft_model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (4, 6)


def test_what_peft_saves_has_the_tensors_of_the_adapter(peft_model, tmp_path):
    peft_model.save_pretrained(tmp_path)
    theirs = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    ours = safetensors.torch.load_file(os.path.join(os.environ["PARITY_ADAPTER"], "adapter_model.safetensors"))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)
