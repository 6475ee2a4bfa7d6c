"""Pipelines of a small model: run on meta by the meter, and on the CPU by real processes.

    python tests/pipeline_programs.py RANK WORLD_SIZE STORE PROGRAM...

runs programs over gloo, as one of the processes, and prints the messages of each one's second step as JSON: kind, peer
and bytes. (In the first step stages also tell each other shapes.) It knows nothing of flopmeter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.utils._python_dispatch import TorchDispatchMode

V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
Step = Callable[[], object]


class Layer(nn.Module):
    """Two products, so that forward, the gradient of the input and that of the weights take equally long. With the
    shift, also the first layer of all has to know the gradient of what its first product reads."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.up = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.down = nn.Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x + self.shift))


def stages_of(schedule: type, rank: int, ranks: int, chunks: int) -> list[int]:
    """Which stages a rank holds."""
    if chunks == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in V_SHAPED else [rank + ranks * i for i in range(chunks)]


def scheduled(
    schedule: type,
    mesh: DeviceMesh,
    device: str = "meta",
    *,
    chunks: int = 1,
    microbatches: int = 8,
    rows: int = 2,
    width: int = 16,
    hidden: int = 32,
    dtype: torch.dtype = torch.float32,
    layers: Callable[[int], int] = lambda stage: 1,
) -> Step:
    """A step of torch's own schedule; a microbatch has `rows` rows."""
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
    stages = []
    for stage in stages_of(schedule, rank, ranks, chunks):
        with torch.device(device):
            module = nn.Sequential(*(Layer(width, hidden, dtype) for _ in range(layers(stage))))
        stages.append(PipelineStage(module, stage, ranks * chunks, torch.device(device), group=mesh.get_group("pp")))
    made = schedule(
        stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages,
        microbatches,
        loss_fn=lambda out, target: out.sum(),
        scale_grads=False,
    )
    x = torch.zeros(rows * microbatches, width, dtype=dtype, device=device)
    args = (x,) if any(stage.is_first for stage in stages) else ()
    target = x if any(stage.is_last for stage in stages) else None
    return lambda: made.step(*args, target=target)


def by_hand(mesh: DeviceMesh, device: str = "meta") -> Step:
    """GPipe with blocking messages, two microbatches."""
    rank, ranks, width = mesh.get_local_rank("pp"), mesh["pp"].size(), 8
    layer = nn.Linear(width, width, device=device)

    def step() -> None:
        kept = []
        for _ in range(2):
            x = torch.zeros(4, width, device=device)
            if rank > 0:
                dist.recv(x, rank - 1)
            y = layer(x.requires_grad_())
            if rank < ranks - 1:
                dist.send(y.detach(), rank + 1)
            kept.append((x, y))
        for x, y in kept:
            gradient = torch.ones_like(y)
            if rank < ranks - 1:
                dist.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank > 0:
                dist.send(x.grad, rank - 1)

    return step


def around_a_ring(mesh: DeviceMesh, device: str = "meta") -> Step:
    """As in ring attention: all send to the next rank, which first has to be told how much."""
    rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()

    def exchange(sent: Tensor, received: Tensor) -> Tensor:
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        batch = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return received

    def step() -> None:
        sent = torch.zeros(3 + rank, 4, device=device)
        sizes = torch.tensor(sent.shape, device=device)
        rows, columns = exchange(sizes, torch.empty_like(sizes)).tolist()
        exchange(sent, torch.empty(rows, columns, device=device))

    return step


def coalesced(mesh: DeviceMesh, device: str = "meta") -> Step:
    """Sums of several tensors in one call."""
    a, b = torch.zeros(8, device=device), torch.zeros(3, device=device)
    return lambda: dist.all_reduce_coalesced([a, b]) if device == "meta" else None


def of_torch(schedule: type, chunks: int = 1) -> Callable[[DeviceMesh, str], Step]:
    return lambda mesh, device="meta": scheduled(schedule, mesh, device, chunks=chunks)


PROGRAMS: dict[str, Callable[[DeviceMesh, str], Step]] = {
    "gpipe": of_torch(ScheduleGPipe),
    "1f1b": of_torch(Schedule1F1B),
    "interleaved": of_torch(ScheduleInterleaved1F1B, 2),
    "breadth first": of_torch(ScheduleLoopedBFS, 2),
    "interleaved zero bubble": of_torch(ScheduleInterleavedZeroBubble, 2),
    "zero bubble v": of_torch(ScheduleZBVZeroBubble, 2),
    "dualpipe v": of_torch(ScheduleDualPipeV, 2),
    "by hand": by_hand,
    "around a ring": around_a_ring,
}


class Messages(TorchDispatchMode):
    """Writes down which messages a process sends and receives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = func.overloadpacket.__name__.rstrip("_")
            self.found.append((kind, args[2], sum(tensor.nbytes for tensor in args[0])))
        return func(*args, **(kwargs or {}))


def main(rank: int, size: int, store: str, *programs: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    found = {}
    for program in programs:
        step = PROGRAMS[program](init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), "cpu")
        step()
        with Messages() as messages:
            step()
        found[program] = messages.found
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
