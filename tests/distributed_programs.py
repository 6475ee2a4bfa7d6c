"""Training steps of a 2-layer transformer on many ranks: run on meta by the meter, and on the CPU by real processes.

    python tests/distributed_programs.py RANK WORLD_SIZE STORE PROGRAM...

runs programs over gloo, as one of the processes, and prints the collectives of each as JSON: kind and bytes. It knows
nothing of flopmeter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, LENGTH, WIDTH, HEADS, HIDDEN, LAYERS, CLASSES = 2, 8, 16, 4, 64, 2, 12


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(context.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN, bias=False), nn.GELU(), nn.Linear(HIDDEN, WIDTH, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def run(program: str, mesh: DeviceMesh, device: str, recorder: AbstractContextManager[object]) -> nn.Module:
    """Two recorded training steps of a program that PROGRAMS names. (DDP makes its buckets after the first.)"""
    with torch.device(device):
        model = Transformer()
        x = torch.zeros(BATCH, LENGTH, WIDTH)
    model = PROGRAMS[program](model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    with recorder:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def data_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, device_mesh=mesh["dp"], bucket_cap_mb=1e-3)  # several buckets


def fully_sharded(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


MEGATRON = {
    "attention": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.out": RowwiseParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "mlp.0": ColwiseParallel(),
    "mlp.2": RowwiseParallel(),
}
SEQUENCE = MEGATRON | {
    "norm1": SequenceParallel(),
    "norm2": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
}


def tensor_parallel(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], MEGATRON)
        block.attention.heads //= mesh["tp"].size()
    return model


def sequence_parallel(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    first = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
    parallelize_module(model, mesh["tp"], {"blocks.0": first, "head": ColwiseParallel(input_layouts=Shard(1))})
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], SEQUENCE)
        block.attention.heads //= mesh["tp"].size()
    return model


def flat(model: Transformer, mesh: DeviceMesh, keeps_originals: bool = False) -> nn.Module:
    """FSDP1: each block is one flat parameter, padded."""
    on_cpu = mesh.device_type == "cpu"
    return FullyShardedDataParallel(
        model,
        mesh.get_group("dp"),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
        device_id=torch.device("cpu") if on_cpu else 0,
        use_orig_params=keeps_originals,
    )


def two_dimensional(model: Transformer, mesh: DeviceMesh) -> nn.Module:
    return fully_sharded(tensor_parallel(model, mesh), mesh)


PROGRAMS: dict[str, Callable[[Transformer, DeviceMesh], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp": fully_sharded,
    "fsdp1": flat,
    "fsdp1, original parameters": partial(flat, keeps_originals=True),
    "tp": tensor_parallel,
    "sp": sequence_parallel,
    "fsdp x tp": two_dimensional,
}
MESHES = {
    **dict.fromkeys(("ddp", "fsdp", "fsdp1", "fsdp1, original parameters"), ("dp",)),
    **dict.fromkeys(("tp", "sp"), ("tp",)),
    "fsdp x tp": ("dp", "tp"),
}


# Kind, and which argument is the whole; None: the result.
KINDS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all_reduce", 0), "all_reduce": ("all_reduce", 0), "_allgather_base_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", None), "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0), "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),  # FSDP1's on the CPU
}  # fmt: skip


class Collectives(TorchDispatchMode):
    """Writes down the kind and the bytes of what the processes exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # what they run comes back
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name in KINDS:
            kind, whole = KINDS[name]
            tensors = result if whole is None else args[whole]
            tensors = tree_leaves(tensors)
            self.found.append((kind, sum(tensor.nbytes for tensor in tensors)))
        return result


def mesh_shape(program: str, size: int) -> dict[str, int]:
    """Of the mesh that the program runs on; two dimensions are as square as 2^n ranks allow."""
    names = MESHES[program]
    return {names[0]: size} if len(names) == 1 else {names[0]: size // 2, names[1]: 2}


def main(rank: int, size: int, store: str, *programs: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    found = {}
    for program in programs:
        shape = mesh_shape(program, size)
        mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        collectives = Collectives()
        run(program, mesh, "cpu", collectives)
        found[program] = collectives.found
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
