"""Writes what DTensors and Gloo make of the gradients of LoRA layers, for the test of the C++ gradient sync.

    python gradient_sync_fixture.py --output tests/testdata/gradient_sync.safetensors

Two processes hold the factors of a few layers as DTensors on a mesh (replicate=2, shard=1), and average the gradients
after one micro-batch, and again after a second one was accumulated on top. The sync is the plain loop of the contract.
The file has, for each rank r, step s (0, 1) and parameter, all as local tensors:
  rank{r}.gradient{s}.{parameter}   what the micro-batch s adds; absent where it made no gradient
  rank{r}.result{s}.{parameter}     the gradient after the sync; absent where there is none
Its metadata has `synchronized`, the number of parameters that a sync counts. torch 2.11.0 and safetensors 0.8.0 wrote the
committed file.
"""

import argparse
import pathlib
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

WORLD_SIZE = 2
IN_FEATURES = 5
LORA_RANK = 2
STEPS = 2
# layer: (out_features of a rank, dtype, placements). As in lora_gradient_sync_parity_test.cc.
LAYERS = {
    "to_q": (7, torch.float32, (Replicate(), Replicate())),
    "to_k": (3, torch.bfloat16, (Replicate(), Replicate())),
    "to_v": (3, torch.float32, (Replicate(), Replicate())),
    "sharded_once": (3, torch.float32, (Replicate(), Shard(0))),
    "sharded": (3, torch.float32, (Shard(0), Shard(0))),
}
FROZEN = {"to_v.lora_B"}
# (rank, step, parameter): the loss of the micro-batch did not use it.
MISSING = {
    (1, 0, "to_q.lora_A"),
    (0, 0, "to_q.lora_B"),
    (0, 1, "to_q.lora_B"),
    (0, 0, "to_v.lora_A"),
    (1, 0, "to_v.lora_A"),
    (0, 1, "to_v.lora_A"),
    (1, 1, "to_v.lora_A"),
    (1, 0, "to_k.lora_B"),
    (0, 1, "sharded_once.lora_A"),
    (1, 0, "sharded.lora_A"),
    (1, 1, "sharded.lora_A"),
}


def synchronize(parameters) -> int:
    """Averages over every mesh dimension that replicates the parameter; a missing gradient counts as zeros."""
    count = 0
    for parameter in parameters:
        mesh = parameter.device_mesh
        dims = [dim for dim, placement in enumerate(parameter.placements) if placement.is_replicate()]
        if not parameter.requires_grad or not dims:
            continue
        if parameter.grad is None:
            zeros = torch.zeros_like(parameter.to_local())
            parameter.grad = DTensor.from_local(zeros, mesh, parameter.placements, run_check=False)
        local = parameter.grad.to_local()
        for dim in dims:
            dist.all_reduce(local, group=mesh.get_group(dim))
            local.div_(mesh.size(dim))
        count += 1
    return count


def run_rank(rank: int, port: int, queue):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    mesh = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("replicate", "shard"))
    parameters = {}
    for layer, (out_features, dtype, placements) in LAYERS.items():
        for factor, shape in (("lora_A", (LORA_RANK, IN_FEATURES)), ("lora_B", (out_features, LORA_RANK))):
            local = torch.zeros(shape, dtype=dtype)
            parameter = torch.nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))
            name = f"{layer}.{factor}"
            parameter.requires_grad_(name not in FROZEN)
            parameters[name] = parameter

    tensors = {}
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            if not parameter.requires_grad or (rank, step, name) in MISSING:
                continue
            local = torch.randn(parameter.to_local().shape, generator=generator).to(parameter.dtype)
            tensors[f"rank{rank}.gradient{step}.{name}"] = local.clone()
            gradient = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        count = synchronize(parameters.values())
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                tensors[f"rank{rank}.result{step}.{name}"] = parameter.grad.to_local().clone()
    # As lists: tensors would go through shared memory, which ends with this process.
    queue.put((count, {name: (tensor.dtype, tensor.double().tolist()) for name, tensor in tensors.items()}))
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    arguments = parser.parse_args()

    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = mp.spawn(run_rank, (free_port(), queue), nprocs=WORLD_SIZE, join=False)
    tensors = {}
    counts = set()
    for _ in range(WORLD_SIZE):
        count, values = queue.get()
        counts.add(count)
        tensors |= {name: torch.tensor(value, dtype=dtype) for name, (dtype, value) in values.items()}
    while not processes.join():
        pass

    (count,) = counts
    save_file(tensors, arguments.output, metadata={"synchronized": str(count)})
    print(f"{len(tensors)} tensors, {count} parameters synchronized")


if __name__ == "__main__":
    main()
