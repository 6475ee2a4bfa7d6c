"""Programs of many ranks, metered as one of them.

    with flopmeter.distributed.world(64, mesh={"dp": 8, "tp": 8}) as mesh:
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        with FlopMeter("h100-sxm5-80gb") as meter:
            model(tokens).sum().backward()

torch's own code runs with torch's `fake` process group, whose collectives return at once. Counted are the ops of this
rank, with its local shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch

if not torch.distributed.is_available():
    raise ImportError("this torch was built without torch.distributed, which flopmeter.distributed runs")

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flopmeter.distributed import (
    programs,
    rules,  # noqa: F401  (it fills the table of cost rules)
)
from flopmeter.distributed.errors import WorldError
from flopmeter.distributed.meta import runs_on_meta
from flopmeter.distributed.objects import lone_store

__all__ = ["WorldError", "world"]


@contextmanager
def world(
    size: int, mesh: Mapping[str, int] | None = None, rank: int = 0, *, gpus_per_node: int | None = None
) -> Iterator[DeviceMesh]:
    """A world of `size` ranks of which this process is `rank`, as torch.distributed's default process group.

    Gives the device mesh: `mesh` has the names of its dimensions, from the outermost, with their sizes; without it
    there is one dimension, "world". Programs in it run on meta tensors. The world ends with the context, also after an
    error. `gpus_per_node`: rank r is on node r // gpus_per_node when collectives are priced. DTensor uses it, too, to
    choose between ways to redistribute a tensor. Without it the cluster's number holds for prices, and 8 for DTensor.

    Raises WorldError for sizes that do not fit, and if a world is open already.
    """
    if not isinstance(mesh, Mapping | None):
        raise WorldError(f"the mesh {mesh!r} is no mapping: write names and sizes of its dimensions, {{'dp': {size}}}")
    shape = {"world": size} if mesh is None else dict(mesh)
    _check(size, shape, rank, gpus_per_node)
    with ExitStack() as undo:
        undo.enter_context(runs_on_meta(gpus_per_node, rank))
        dist.init_process_group("fake", rank=rank, world_size=size, store=lone_store())
        for patch in programs.init_patches():
            undo.enter_context(patch)
        yield init_device_mesh("meta", tuple(shape.values()), mesh_dim_names=tuple(shape))


def _check(size: int, shape: Mapping[str, int], rank: int, gpus_per_node: int | None) -> None:
    numbers: dict[str, Any] = {"size": size}
    if gpus_per_node is not None:
        numbers["gpus_per_node"] = gpus_per_node
    numbers |= {f"mesh[{name!r}]": length for name, length in shape.items()}
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise WorldError(f"{name} is {number!r}: it has to be a whole number from 1 on")
    if not shape or not all(isinstance(name, str) and name.isidentifier() for name in shape):
        raise WorldError(f"the mesh {shape} needs names for its dimensions, such as {{'dp': {size}}}")
    if prod(shape.values()) != size:
        product = " x ".join(map(str, shape.values()))
        raise WorldError(f"the mesh {dict(shape)} has {product} = {prod(shape.values())} ranks, the world {size}")
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise WorldError(f"rank {rank!r} is not in a world of {size}: name one from 0 to {size - 1}")
    if dist.is_initialized():
        raise WorldError(
            f"torch.distributed is initialized already, with {dist.get_world_size()} ranks: leave that world first "
            "(torch.distributed.destroy_process_group())"
        )
