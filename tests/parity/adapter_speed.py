"""Times PEFT's adapted linear layer on shapes of lora_matmul_benchmark.cc, against that benchmark.

Started by speed.sh. The argument is the benchmark's result as JSON. Forward and backward, float32, weight and bias
frozen, an input that requires grad: what a layer costs over the one without an adapter, which takes turns with it.
"""

import json
import statistics
import sys
import time

import peft
import torch
from torch import nn

WIDTH = 1536
TOKENS = 1024
TURNS = 20


def seconds(layer: nn.Module, tokens: torch.Tensor, grad: torch.Tensor) -> float:
    begin = time.perf_counter()
    layer(tokens).backward(grad)
    elapsed = time.perf_counter() - begin
    tokens.grad = None
    layer.zero_grad()
    return elapsed


def overhead_of_peft(lora_rank: int) -> float:
    base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules=["0"]), model
    )[0]
    assert isinstance(adapted, peft.tuners.lora.Linear)
    tokens = torch.randn(TOKENS, WIDTH, requires_grad=True)
    grad = torch.ones(TOKENS, WIDTH)
    overheads = [
        seconds(adapted, tokens, grad) / seconds(base, tokens, grad) - 1 for _ in range(TURNS)
    ]
    return statistics.median(overheads[1:])


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)["benchmarks"]
    for lora_rank in (8, 16, 64, 128):
        ours = next(
            result["vs_base"] - 1
            for result in results
            if result["name"].startswith(f"LoraMatmul/{WIDTH}/{TOKENS}/{lora_rank}/Float/")
            and result.get("aggregate_name") == "median"
        )
        print(
            f"an adapter of rank {lora_rank} on {TOKENS} x {WIDTH}, over the layer without one: "
            f"PEFT {overhead_of_peft(lora_rank):.1%}, here {ours:.1%}"
        )


if __name__ == "__main__":
    main()
