"""Writes sharded checkpoints as the libraries save them, and the shards that PyTorch makes of them on four ranks.

    python tests/parity/make_checkpoint_fixture.py [--check]

For the tests of the C++ loader, into tests/testdata:
  wan_checkpoint/     a WanTransformer3DModel in float32, saved by diffusers: safetensors files and their index
  llama_checkpoint/   a LlamaForCausalLM in bfloat16, saved by transformers
  wan_shards.json, llama_shards.json
    {mesh: {rank: {key: {"shape": [..], "dtype": "F32", "fnv1a": ".."}}}}: the local tensor of a rank, and the 64-bit
    FNV-1a hash of its bytes, row-major, as 16 hexadecimal digits. Ranks are numbered row-major over the mesh.
    MESHES below has the meshes.
Every value is random and none is zero, so that a tensor that was left out, or went to the wrong place, shows.

Each run writes the same bytes. --check writes nothing: it compares with what is there, and fails if anything differs.
diffusers 0.42.1, transformers 5.24.0, safetensors 0.8.0 and torch 2.11.0 wrote the committed files.
"""

import argparse
import dataclasses
import filecmp
import json
import pathlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

TESTDATA = pathlib.Path(__file__).parents[1] / "testdata"
WORLD_SIZE = 4


def make_wan() -> nn.Module:
    return diffusers.WanTransformer3DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=3,
        out_channels=3,
        text_dim=10,
        freq_dim=8,
        ffn_dim=46,  # Uneven over four ranks; scale_shift_table has a single row and leaves three of them empty.
        rope_max_seq_len=16,
    )


def make_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=45,  # Over 2 x 2 ranks its rows are 12, 11, 11, 11, over four 12, 12, 12, 9.
        vocab_size=61,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    make: Callable[[], nn.Module]
    library_class: type[nn.Module]
    blocks: Callable[[nn.Module], nn.ModuleList]  # The units of fully_shard, beside the root.
    max_shard_size: str  # Such that there are several files.


CHECKPOINTS = {
    "wan": Checkpoint(make_wan, diffusers.WanTransformer3DModel, lambda model: model.blocks, "32KB"),
    "llama": Checkpoint(make_llama, transformers.LlamaForCausalLM, lambda model: model.model.layers, "16KB"),
}

# mesh: (its sizes, the placements of DTensors; None for those of fully_shard). Of two dimensions, fully_shard replicates
# over the first.
MESHES = {
    "fully_shard_4": ((4,), None),
    "fully_shard_2x2": ((2, 2), None),
    "shard0_shard0_2x2": ((2, 2), [Shard(0), Shard(0)]),
    "shard1_4": ((4,), [Shard(1)]),
}


def fully_shard_model(checkpoint: Checkpoint, model: nn.Module, mesh: DeviceMesh) -> dict[str, DTensor]:
    """The parameters that FSDP2 makes of the model's."""
    for block in checkpoint.blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return dict(model.named_parameters())


def distribute_parameters(model: nn.Module, mesh: DeviceMesh, placements: list[Shard]) -> dict[str, DTensor]:
    """DTensors of the parameters that have the dimensions of `placements`."""
    dims = 1 + max(placement.dim for placement in placements)
    return {
        name: distribute_tensor(parameter.detach(), mesh, placements)
        for name, parameter in model.named_parameters()
        if parameter.dim() >= dims
    }


def fill(model: nn.Module, seed: int) -> None:
    """Multiples of 2^-24 in (0, 1), rounded to the parameter's type: the same on every machine, and never zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        values = torch.randint(1, 2**24, parameter.shape, generator=generator)
        parameter.data.copy_(values / 2**24)


def save_checkpoints(work: pathlib.Path) -> None:
    """Has the libraries save each checkpoint, with its configuration, as a folder of `work`."""
    for seed, (name, checkpoint) in enumerate(CHECKPOINTS.items()):
        model = checkpoint.make()
        fill(model, seed)
        model.save_pretrained(work / name, max_shard_size=checkpoint.max_shard_size)
        (index,) = (work / name).glob("*.index.json")
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert files.keys() == dict(model.named_parameters()).keys()
        assert len(set(files.values())) >= 3


def fnv1a(data: bytes) -> str:
    """As config/internal/fnv1a.h."""
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return f"{value:016x}"


def describe(local: torch.Tensor) -> dict:
    data = local.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[local.dtype]
    return {"shape": list(local.shape), "dtype": dtype, "fnv1a": fnv1a(data)}


def run_rank(rank: int, work: pathlib.Path) -> None:
    """Writes `rank<rank>.json` into `work`: {checkpoint: {mesh: {key: description}}}."""
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    shards = {}
    for name, checkpoint in CHECKPOINTS.items():
        shards[name] = {}
        for mesh_name, (sizes, placements) in MESHES.items():
            model = checkpoint.library_class.from_pretrained(work / name)
            # fully_shard takes no mesh of two dimensions without their names.
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
            if placements is None:
                parameters = fully_shard_model(checkpoint, model, mesh)
            else:
                parameters = distribute_parameters(model, mesh, placements)
            shards[name][mesh_name] = {key: describe(value.to_local()) for key, value in parameters.items()}
    (work / f"rank{rank}.json").write_text(json.dumps(shards), encoding="utf-8")
    dist.destroy_process_group()


def make_shards(work: pathlib.Path) -> dict:
    """What PyTorch makes of the checkpoints in `work`: {checkpoint: {mesh: {rank: {key: description}}}}."""
    # Forked, as importing the libraries takes longer than all the rest.
    mp.start_processes(run_rank, (work,), nprocs=WORLD_SIZE, start_method="fork")
    ranks = [json.loads((work / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(WORLD_SIZE)]
    return {
        name: {mesh: {str(rank): shards[name][mesh] for rank, shards in enumerate(ranks)} for mesh in MESHES}
        for name in CHECKPOINTS
    }


def to_json(shards: dict) -> str:
    """A description a line."""
    return re.sub(r"{[^{}]*}", lambda match: re.sub(r"\n *", "", match[0]), json.dumps(shards, indent=1)) + "\n"


def write_fixtures(directory: pathlib.Path) -> None:
    torch.set_num_threads(1)  # A process that has started threads must not fork.
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        work = pathlib.Path(temporary)
        save_checkpoints(work)
        shards = make_shards(work)
        for name in CHECKPOINTS:
            folder = directory / f"{name}_checkpoint"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for pattern in ("*.safetensors", "*.index.json"):
                for file in (work / name).glob(pattern):
                    shutil.copyfile(file, folder / file.name)
            (directory / f"{name}_shards.json").write_text(to_json(shards[name]), encoding="utf-8")


def fixture_files(directory: pathlib.Path) -> list[str]:
    """The files that write_fixtures() writes, relative to `directory`."""
    patterns = [pattern for name in CHECKPOINTS for pattern in (f"{name}_checkpoint/*", f"{name}_shards.json")]
    return sorted(str(file.relative_to(directory)) for pattern in patterns for file in directory.glob(pattern))


def differing_files(made: pathlib.Path, committed: pathlib.Path) -> list[str]:
    """The files that only one of the two has, or that have other bytes."""
    names = sorted({*fixture_files(made), *fixture_files(committed)})
    _, different, missing = filecmp.cmpfiles(made, committed, names, shallow=False)
    return sorted(different + missing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is there instead of writing")
    if not parser.parse_args().check:
        write_fixtures(TESTDATA)
        return
    with tempfile.TemporaryDirectory() as made:
        write_fixtures(pathlib.Path(made))
        different = differing_files(pathlib.Path(made), TESTDATA)
    if different:
        sys.exit(f"not what {TESTDATA} has, run this without --check and look at the changes: {', '.join(different)}")


if __name__ == "__main__":
    main()
