"""How many times faster the C++ component reads a trainer's YAML file than Python does.

Both read the file of BM_TypicalFile: here PyYAML's safe_load and a dataclass for each `lora` block, as in the contract.
Started by speed.sh. The argument is the benchmark's output as JSON.
"""

import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import yaml

REPETITIONS = 200
FILE = pathlib.Path(__file__).parents[1] / "testdata/wan_distillation.yaml"


@dataclasses.dataclass
class LoraConfig:
    """As the contract has it."""

    enable: bool = False
    rank: int | None = None
    alpha: int | None = None
    target_modules: list[str] | None = None

    def __post_init__(self) -> None:
        self.rank = None if self.rank is None else int(self.rank)
        self.alpha = None if self.alpha is None else int(self.alpha)
        if self.target_modules is not None:
            self.target_modules = list(self.target_modules)
        if self.enable and (self.rank is None or self.rank <= 0):
            raise ValueError(f"models.<role>.lora.rank must be > 0, got {self.rank!r}")


def parse(text: str) -> dict[str, LoraConfig | None]:
    roles: dict[str, Any] = yaml.safe_load(text)["models"]
    return {name: LoraConfig(**role["lora"]) if role.get("lora") else None for name, role in roles.items()}


def seconds(text: str) -> float:
    """The mean over the repetitions, as the benchmark's time is."""
    parse(text)
    start = time.perf_counter()
    for _ in range(REPETITIONS):
        parse(text)
    return (time.perf_counter() - start) / REPETITIONS


def main() -> None:
    runs = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))["benchmarks"]
    run = next(run for run in runs if run.get("aggregate_name") == "median")
    ours = run["real_time"] * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}[run["time_unit"]]
    python = seconds(FILE.read_text(encoding="utf-8"))
    print(
        f"config speed: {FILE.name}: Python {python * 1e6:.0f} us, C++ {ours * 1e6:.0f} us: {python / ours:.1f} x as fast; "
        f"yaml-cpp alone {run['yaml_cpp'] * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
