"""Times how the Python libraries load a safetensors file in shards, on four Gloo ranks of this machine.

    python tests/parity/loader_speed.py weights.safetensors --create --gigabytes 2
    python tests/parity/loader_speed.py weights.safetensors [--ours "LOADER --file={file}"]

Each rank ends with its Shard(0) of every tensor in memory of its own. The file's tensors have a dimension at least. The
contenders:
  load_file         safetensors.torch.load_file and distribute_tensor: rank 0 scatters
  get_slice         safe_open().get_slice() of the rank's rows, copied out of the mapped file
  get_slice_pread   the same with safe_open's backend "pread", which reads the rows
  ours              LOADER, which starts four ranks too and prints as its last line what the others measure:
                    {"seconds": .., "peak_rss_above_shard": ..}
Both are of the slowest or largest rank. `seconds` is from a barrier to a barrier, after the libraries are imported.
`peak_rss_above_shard` is, in bytes, the peak of the resident memory (VmHWM, which is reset before) above what was resident
before and above the shard itself. Pages of a mapped file count while they are mapped. Not ru_maxrss: it holds what
importing took for a moment, and a parent's memory.

All have the file in the page cache, take turns, and are new processes each time. The medians are printed, and what the
others take of them relative to ours. Needs Linux.
"""

import argparse
import json
import math
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

import safetensors
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD_SIZE = 4
LAYERS = 22
PARTS = ("seconds", "peak_rss_above_shard")


def create(file: pathlib.Path, gigabytes: float, dtype: torch.dtype) -> None:
    """Writes the 198 tensors of a decoder's layers, about `gigabytes` (of 10^9 bytes) in all."""
    # A layer has 13 hidden x hidden.
    hidden = int(math.sqrt(gigabytes * 1e9 / dtype.itemsize / (13 * LAYERS))) // 16 * 16
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (3 * hidden, hidden),
        "mlp.up_proj": (3 * hidden, hidden),
        "mlp.down_proj": (hidden, 3 * hidden),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"model.layers.{layer}.{name}.weight": torch.rand(shape, generator=generator, dtype=dtype)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def load_whole(file: pathlib.Path, mesh: DeviceMesh) -> list[torch.Tensor]:
    return [distribute_tensor(tensor, mesh, [Shard(0)]).to_local() for tensor in load_file(file).values()]


def load_slices(file: pathlib.Path, mesh: DeviceMesh, backend: str) -> list[torch.Tensor]:
    shards = []
    with safetensors.safe_open(file, framework="pt", backend=backend) as opened:
        for key in opened.keys():
            view = opened.get_slice(key)
            size = view.get_shape()[0]
            rows = math.ceil(size / mesh.size())
            begin = mesh.get_rank() * rows
            # An empty range must not begin at the end.
            shard = view[begin : min(begin + rows, size)] if begin < size else view[:0]
            # "mmap" gives a view of the mapped file.
            shards.append(shard.clone() if backend == "mmap" else shard)
    return shards


CONTENDERS = {
    "load_file": load_whole,
    "get_slice": lambda file, mesh: load_slices(file, mesh, backend="mmap"),
    "get_slice_pread": lambda file, mesh: load_slices(file, mesh, backend="pread"),
}


def memory(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def run_rank(rank: int, file: pathlib.Path, contender: str, rendezvous: str) -> None:
    """Loads once; rank 0 prints the measurements as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    distribute_tensor(torch.zeros(WORLD_SIZE), mesh, [Shard(0)])  # What is made at the first use is not measured.

    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Resets VmHWM: man 5 proc.
    resident = memory("VmRSS")
    dist.barrier()
    begin = time.perf_counter()
    shards = CONTENDERS[contender](file, mesh)
    dist.barrier()
    seconds = time.perf_counter() - begin
    above_shard = memory("VmHWM") - resident - sum(shard.nbytes for shard in shards)

    result = torch.tensor([seconds, above_shard], dtype=torch.float64)
    dist.all_reduce(result, dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps(dict(zip(PARTS, result.tolist()))), flush=True)
    dist.destroy_process_group()


def run_contender(file: pathlib.Path, contender: str) -> None:
    with tempfile.TemporaryDirectory() as work:
        mp.spawn(run_rank, (file, contender, f"{work}/rendezvous"), nprocs=WORLD_SIZE)


def read_whole(file: pathlib.Path) -> None:
    """Has the file in the page cache."""
    with open(file, "rb", buffering=0) as opened:
        buffer = bytearray(2**24)
        while opened.readinto(buffer):
            pass


def medians(commands: dict[str, list[str]], repetitions: int) -> dict[str, dict[str, float]]:
    """Of what the commands print, which take turns."""
    runs = {name: [] for name in commands}
    for _ in range(repetitions):
        for name, command in commands.items():
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[name].append(json.loads(output.splitlines()[-1]))
    return {name: {part: statistics.median(run[part] for run in runs[name]) for part in PARTS} for name in commands}


def ratio(theirs: float, ours: float) -> float | None:
    return round(theirs / ours, 2) if ours > 0 else None  # A peak may be no higher than the shard.


def compare(file: pathlib.Path, ours: str | None, repetitions: int) -> None:
    commands = {name: [sys.executable, __file__, str(file), f"--contender={name}"] for name in CONTENDERS}
    if ours is not None:
        commands["ours"] = [word.replace("{file}", str(file)) for word in shlex.split(ours)]
    read_whole(file)
    results = medians(commands, repetitions)
    for name, result in results.items():
        line = f"{name}: {result['seconds']:.2f} s, {result['peak_rss_above_shard'] / 1e6:.0f} MB above the shard"
        if ours is not None and name != "ours":
            result["ratios"] = {part: ratio(result[part], results["ours"][part]) for part in PARTS}
            line += "".join(f"; {part} {value} x ours" for part, value in result["ratios"].items() if value is not None)
        print(line)
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--create", action="store_true", help="write the file instead of loading it")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--ours", metavar="LOADER", help="a further command to measure; {file} stands for the file")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--contender", choices=CONTENDERS, help="load once this way, and print what it took")
    arguments = parser.parse_args()
    if arguments.create:
        create(arguments.file, arguments.gigabytes, getattr(torch, arguments.dtype))
    elif arguments.contender:
        run_contender(arguments.file, arguments.contender)
    else:
        compare(arguments.file, arguments.ours, arguments.repetitions)


if __name__ == "__main__":
    main()
