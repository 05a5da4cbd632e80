"""Times PEFT's injection of adapters into the tree of layer_replacement_benchmark.cc, against that benchmark.

Started by speed.sh. The argument is the benchmark's result as JSON.
"""

import json
import statistics
import sys
import time

import peft
import torch
from torch import nn

WIDTH = 1536


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "to_out"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn1 = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.attn2 = Attention()
        self.norm3 = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Transformer(nn.Module):
    def __init__(self, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


def seconds_of_injection(blocks: int) -> float:
    with torch.device("meta"):
        model = Transformer(blocks)
    config = peft.LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out"])
    begin = time.perf_counter()
    peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    return time.perf_counter() - begin


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        results = json.load(file)["benchmarks"]
    for blocks in (30, 300):
        ours = next(
            result["real_time"] * 1e-3
            for result in results
            if result["name"].startswith(f"BM_EnableLoraTraining/blocks:{blocks}/")
            and result.get("aggregate_name") == "median"
        )
        peft_seconds = statistics.median(seconds_of_injection(blocks) for _ in range(3))
        print(
            f"adapters into {2 + 18 * blocks} modules: PEFT {peft_seconds * 1e3:.0f} ms, "
            f"here {ours * 1e3:.2f} ms: {peft_seconds / ours:.0f} x"
        )


if __name__ == "__main__":
    main()
