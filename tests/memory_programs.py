"""Training steps on two ranks, and the most memory that they hold.

    python tests/memory_programs.py RANK WORLD_SIZE STORE

runs each program on the CPU over gloo under torch's MemTracker, and prints its peaks in bytes as JSON. It knows nothing
of flopmeter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WIDTH, HIDDEN, ROWS = 128, 512, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


BUCKETS: list[Tensor] = []  # of the last step, which are made in C++, where the tracker does not see it


def data_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    def summed(state, bucket):
        BUCKETS.append(bucket.buffer())
        return allreduce_hook(None, bucket)

    wrapped = DistributedDataParallel(model, device_mesh=mesh, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, summed)
    return wrapped


def fully_sharded(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return model


def tensor_parallel(model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


PROGRAMS: dict[str, Callable[[nn.Sequential, DeviceMesh], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp": fully_sharded,
    "tp": tensor_parallel,
}


Held = list[nn.Module | torch.optim.Optimizer | Tensor]


def made(program: str, mesh: DeviceMesh, device: str) -> tuple[Held, Callable[[], None]]:
    """What holds memory between steps, and a step."""
    with torch.device(device):
        model = nn.Sequential(*(Block() for _ in range(4)))
        x = torch.zeros(ROWS, WIDTH)
    model = PROGRAMS[program](model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def step() -> None:
        BUCKETS.clear()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return [model, optimizer, x], step


def main(rank: int, size: int, store: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    mesh, peaks = init_device_mesh("cpu", (size,)), {}
    for program in PROGRAMS:
        held, step = made(program, mesh, "cpu")
        for _ in range(2):  # DDP makes its buckets after the first one
            step()
        tracker = MemTracker()
        tracker.track_external(*held, *BUCKETS)
        with tracker:
            step()
        peaks[program] = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    dist.destroy_process_group()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
