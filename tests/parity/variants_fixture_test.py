"""The variants of LoRA in tests/testdata are what PEFT makes of them."""

import make_variants_fixture
import pytest
import safetensors.torch
import torch

COMMITTED = safetensors.torch.load_file(make_variants_fixture.FIXTURE)


@pytest.fixture(scope="module")
def made() -> dict[str, torch.Tensor]:
    return make_variants_fixture.make_fixture()


def test_fixture_has_the_tensors_of_the_cases(made):
    assert made.keys() == COMMITTED.keys()


@pytest.mark.parametrize("case", make_variants_fixture.CASES)
def test_fixture_is_reproduced(made, case):
    for key, tensor in made.items():
        if not key.startswith(f"{case}/"):
            continue
        # What is computed may differ in its last bits from one CPU to another, decompositions by the most.
        bound = 1e-5 * tensor.abs().max().item()
        torch.testing.assert_close(COMMITTED[key], tensor, rtol=0, atol=bound, msg=lambda text: f"{key}: {text}")


def test_adapters_make_a_difference(made):
    for case in make_variants_fixture.CASES:
        model = make_variants_fixture.CASES[case].model_class()
        base = {name: made[f"{case}/base/{name}"] for name in model.state_dict()}
        output = torch.func.functional_call(model, base, made[f"{case}/input"])
        assert (made[f"{case}/output"] - output).abs().max() > 0.1, case
