"""Writes tests/testdata/reference.safetensors with the safetensors library.

The C++ reader is tested against its values, the C++ writer against its bytes:

    python tests/parity/make_safetensors_fixture.py

safetensors 0.8.0 wrote the committed file.
"""

import pathlib

import torch
from safetensors.torch import save_file

OUTPUT = (
    pathlib.Path(__file__).parents[1] / "testdata" / "reference.safetensors"
)


def main():
    tensors = {
        "encoder.weight": torch.tensor([[0.0, 0.5, -1.0], [1.5, -2.0, 3.25]]),
        "encoder.bias": torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
        "half": torch.tensor([0.25, -4.0, 65504.0], dtype=torch.float16),
        "ids": torch.tensor([-1, 2**62], dtype=torch.int64),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        'größe "層"\n': torch.tensor([2.5]),
    }
    # One entry: the library writes several in a random order.
    save_file(tensors, OUTPUT, metadata={"note": "Grüße \"層\"\t"})


if __name__ == "__main__":
    main()
