"""Writes tests/testdata/reference.safetensors with the safetensors library.

The C++ reader is tested against its values, the C++ writer against its bytes:

    python tests/parity/make_safetensors_fixture.py

safetensors 0.8.0 wrote the committed file.
"""

import pathlib

import torch
from safetensors.torch import _SIZE, save_file

# The types that the library writes, by their names in the format: all that it
# knows but F6_E2M3 and F6_E3M2, which PyTorch does not have.
DTYPES = {
    "BOOL": torch.bool,
    "F4": torch.float4_e2m1fn_x2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}

OUTPUT = (
    pathlib.Path(__file__).parents[1] / "testdata" / "reference.safetensors"
)


def bytes_as(dtype):
    """The bytes 0 to 15 (modulo 2 for booleans, which are nothing else)."""
    data = torch.arange(16, dtype=torch.uint8)
    return (data % 2 if dtype == torch.bool else data).view(dtype)


def main():
    assert set(DTYPES.values()) == set(_SIZE), "the library writes other types"
    tensors = {
        "encoder.weight": torch.tensor([[0.0, 0.5, -1.0], [1.5, -2.0, 3.25]]),
        "encoder.bias": torch.tensor([1.0, -0.5], dtype=torch.bfloat16),
        "half": torch.tensor([0.25, -4.0, 65504.0], dtype=torch.float16),
        "ids": torch.tensor([-1, 2**62], dtype=torch.int64),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        'größe "層"\n': torch.tensor([2.5]),
    }
    tensors |= {f"dtype.{name}": bytes_as(dtype) for name, dtype in DTYPES.items()}
    # One entry: the library writes several in a random order.
    save_file(tensors, OUTPUT, metadata={"note": "Grüße \"層\"\t"})


if __name__ == "__main__":
    main()
