"""The world of a script that a launcher starts on many GPUs: one rank runs here, the others are assumed to do the same.

Works around: torch.distributed waits for the other ranks, and torch.multiprocessing starts them; processes that were
started are not metered.
Until: never; one process meters one rank.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.utils._pytree import tree_leaves

from flopmeter.distributed.meta import runs_on_meta
from flopmeter.distributed.objects import lone_store
from flopmeter.distributed.programs import ask_backend
from flopmeter.run.patches import Patch, applied
from flopmeter.torch_names import distributed as private
from flopmeter.torch_names.around import around

RANKS = ("rank", "local_rank")
"""Parameters of functions that are started as processes, one for each GPU."""

_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "flopmeter"}


@contextmanager
def opened(
    world_size: int | None,
    gpus_per_node: int | None,
    rank: int,
    on_gpu: Callable[[Tensor], bool],
    note: Callable[[str], None],
) -> Iterator[None]:
    """In this context torch.distributed opens a world of that size whenever the script asks for one; None: nobody has
    named a size, and if the script does not, it is 1."""
    with runs_on_meta(gpus_per_node, rank, has_host=True), applied(_patches(world_size, rank, on_gpu, note)):
        yield


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """In this context os.environ has these variables."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def no_gpu_for_the_driver() -> Iterator[None]:
    """In this context CUDA's driver finds no GPU of this machine, while os.environ tells the program what it told."""
    name = "CUDA_VISIBLE_DEVICES"
    os.putenv(name, "")
    try:
        yield
    finally:
        if name in os.environ:
            os.putenv(name, os.environ[name])
        else:
            os.unsetenv(name)


def of_torchrun(world_size: int, gpus_per_node: int, rank: int) -> dict[str, str]:
    """The variables that torchrun sets for that rank."""
    node, on_node = divmod(rank, gpus_per_node)
    numbers = {"RANK": rank, "LOCAL_RANK": on_node, "GROUP_RANK": node, "ROLE_RANK": rank}
    numbers |= {"WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size}
    numbers |= {"LOCAL_WORLD_SIZE": gpus_per_node, "GROUP_WORLD_SIZE": world_size // gpus_per_node}
    return {**_ADDRESS, **{name: str(value) for name, value in numbers.items()}}


def _patches(
    world_size: int | None, rank: int, on_gpu: Callable[[Tensor], bool], note: Callable[[str], None]
) -> Iterator[Patch]:
    init = _init_process_group(world_size, rank, note, dist.init_process_group)
    for owner in (dist, distributed_c10d, device_mesh):
        yield Patch(owner, "init_process_group", init, "collectives of a rank whose peers do not run")
    for owner in (dist, distributed_c10d):
        yield Patch(owner, "is_nccl_available", lambda: True, "CUDA wheels bring NCCL")
        yield Patch(owner, "ProcessGroupNCCL", ProcessGroupNCCL, "what is_nccl_available() promises")
        yield Patch(owner, "is_torchelastic_launched", lambda: "TORCHELASTIC_RUN_ID" in os.environ, "as after torchrun")
    accelerator = getattr(private.bindings, private.ACCELERATOR)
    cuda = Patch(private.bindings, private.ACCELERATOR, lambda: torch.device("cuda"), "FSDP2 makes its mesh for it")
    on_host = Patch(cuda.owner, cuda.name, accelerator, "the device of the fake group's barrier")
    barrier = _barrier(on_host, dist.barrier)
    yield cuda
    for owner in (dist, distributed_c10d):
        yield Patch(owner, "barrier", barrier, "there is no other rank to wait for")
    for name in ("_set_pg_timeout", "set_timeout"):
        if hasattr(distributed_c10d, name):
            yield Patch(distributed_c10d, name, lambda timeout, group=None: None, "no rank waits for another")
            if hasattr(dist, name):
                yield Patch(dist, name, getattr(distributed_c10d, name), "the same function")
    for name in ("spawn", "start_processes"):
        yield Patch(torch.multiprocessing, name, _spawning(rank), "one rank runs in this process, the others do not")
    start = _start(world_size or 1, rank, on_gpu, set(), BaseProcess.start)
    yield Patch(BaseProcess, "start", start, "the same, where a program starts them itself")


class ProcessGroupNCCL:
    """Stands in for NCCL's group, which a build for CPUs lacks. No group is one; a program may ask for its options,
    which change nothing for a single rank."""

    class Options(SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())


@around
def _barrier(on_host: Patch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with applied([on_host]):
        return original(*args, **kwargs)


_LONE = (
    "init_process_group was called without a launcher: a world of 1 GPU, where torch would ask for RANK and WORLD_SIZE;"
    " --gpus 8, or torchrun before the script, makes a larger one"
)


@around
def _init_process_group(
    default_size: int | None,
    own: int,
    note: Callable[[str], None],
    original: Callable[..., None],
    backend: Any = None,
    init_method: Any = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    *_: Any,
    **__: Any,
) -> None:
    if world_size <= 0 and default_size is None and "WORLD_SIZE" not in os.environ:
        note(_LONE)
    size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", default_size or 1))
    original("fake", rank=rank if rank >= 0 else own, world_size=size, store=lone_store())
    ask_backend(dist.group.WORLD, backend)


class _EndedRanks:
    """What starts processes without waiting for them returns it: they have all ended."""

    processes: tuple[Any, ...] = ()

    def pids(self) -> list[int]:
        return []

    def join(self, *_timeouts: Any, **_named: Any) -> bool:
        return True


def _spawning(rank: int) -> Callable[..., _EndedRanks | None]:
    """torch.multiprocessing.spawn and start_processes: this rank runs here, and to its end."""

    def spawn(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any
    ) -> _EndedRanks | None:
        fn(rank, *args)
        return None if join else _EndedRanks()

    return spawn


@around
def _start(
    world_size: int,
    own: int,
    on_gpu: Callable[[Tensor], bool],
    ran: set[Any],
    original: Callable[[Any], None],
    process: Any,
) -> None:
    """What takes the place of a process's start. Of processes that are ranks, this rank's runs here; of those that are
    given tensors on the GPU, the first of each kind. The others count as ended. All other processes are started. `ran`:
    the functions of those that have run."""
    rank = _rank_of(process, world_size)
    if rank is None and not _holds_gpu(process, on_gpu):
        original(process)
        return
    process._popen, process._sentinel = _EndedProcess(), 0
    if process._target not in ran and rank in (None, own):
        ran.add(process._target)
        process.run()


def _rank_of(process: Any, world_size: int) -> int | None:
    """The rank that a process is: programs pass it as (rank, size of the world, ...), or by the parameter's name."""
    given: list[Any] = list(process._args[:2])
    if world_size > 1 and [type(each) for each in given] == [int, int] and given[1] == world_size > given[0] >= 0:
        return int(given[0])
    try:
        arguments = inspect.signature(process._target).bind(*process._args, **process._kwargs).arguments
    except (TypeError, ValueError):  # no target, or one without a signature
        return None
    return next((arguments[name] for name in RANKS if type(arguments.get(name)) is int), None)


def _holds_gpu(process: Any, on_gpu: Callable[[Tensor], bool]) -> bool:
    leaves = tree_leaves((process._args, process._kwargs))
    tensors = [*leaves, *(each for leaf in leaves if isinstance(leaf, nn.Module) for each in leaf.parameters())]
    return any(isinstance(each, Tensor) and on_gpu(each) for each in tensors)


class _EndedProcess:
    """What multiprocessing asks of a process that was started."""

    returncode, pid = 0, 0

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def poll(self) -> int:
        return self.returncode

    def close(self) -> None: ...

    kill = terminate = close
