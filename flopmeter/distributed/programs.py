"""Lets programs that were written for CUDA and NCCL run in a world of meta tensors.

Works around: classes and functions ask for a GPU, a device index or NCCL before they do what meta could do too.
Until: they take meta as a device that programs run on.

Each patch says what the original does there. A feature that cannot run ends in one error that says what to do instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_sharded_data_parallel
from torch.nn.parallel import DistributedDataParallel

from flopmeter.distributed import sync_batch_norm
from flopmeter.distributed.errors import WorldError
from flopmeter.torch_names import distributed as private
from flopmeter.torch_names.around import around

NCCL_VERSION = (2, 27, 0)  # what programs are told; nothing that is counted depends on it
_OFFLOADED = (
    "parameters that are offloaded to the host are copied over its link in each pass, which is not metered here: leave "
    "{} out, and read the memory without them off the report, or meter FSDP2's CPUOffloadPolicy with flopmeter run"
)
_META = torch.device("meta")
_asked_backends = WeakKeyDictionary[Any, str]()  # by group


def patches(*, has_host: bool) -> Iterator[Any]:
    """To be entered while a world is open. `has_host`: tensors may be on the CPU, too."""
    if not has_host:
        yield mock.patch.object(CPUOffloadPolicy, "__init__", _refusal(_OFFLOADED.format("CPUOffloadPolicy")))
    # FSDP2 without a mesh shards over the accelerator that torch was built for, else over CPUs.
    yield mock.patch.object(private.bindings, private.ACCELERATOR, _accelerator)
    # DTensor keeps the state of the generator of the device, whose values decide nothing here. Dynamo traces the call,
    # and breaks a graph at a Mock.
    yield mock.patch.object(private.tensor_random, private.RNG_SUPPORTED, _without_generator)
    yield mock.patch.object(private.tensor_random, private.RNG_TRACKER, _StatelessGenerator())
    yield from _of_fsdp1()
    # FSDP2 brings a model that was made on the CPU to the GPU.
    for fsdp2 in private.FSDP2_MODULES:
        if hasattr(fsdp2, private.FSDP_MOVES):  # which of them has it depends on torch
            yield mock.patch.object(fsdp2, private.FSDP_MOVES, _move)
    # It takes an index of a device for tensors that have one.
    yield mock.patch.object(DistributedDataParallel, "__init__", _ids_on_meta(DistributedDataParallel.__init__))
    # It asks which CUDA and NCCL the bf16 hook would run on.
    yield mock.patch.object(DistributedDataParallel, private.CHECK_HOOK)
    # It takes tensors on GPUs only, and drops ranks without rows by counts that all send each other.
    yield mock.patch.object(nn.SyncBatchNorm, "forward", sync_batch_norm.on_meta(nn.SyncBatchNorm.forward))
    for module in (dist, distributed_c10d):
        # NCCL is not built into torch for the CPU; the fake group stands for any backend.
        yield mock.patch.object(module, "new_group", _of_any_backend(dist.new_group))
    yield mock.patch.object(dist, "get_backend", _backend_of_gpus)
    yield mock.patch.object(torch.cuda.nccl, "version", return_value=NCCL_VERSION)  # torch logs it with an error


def _accelerator(*_: Any) -> torch.device:
    return _META


def _without_generator(_mesh: DeviceMesh) -> bool:
    return False


def init_patches() -> Iterator[Any]:
    """After a world was opened: a program that opens it, too, goes on in it."""
    for module in (dist, distributed_c10d):
        yield mock.patch.object(module, "init_process_group", _already_open(dist.init_process_group))


def ask_backend(group: Any, backend: Any) -> None:
    """Remember which backend the program asked for when it made the group; None: it named none."""
    if backend is not None and isinstance(group, dist.ProcessGroup):  # a rank that is not in it gets another object
        _asked_backends[group] = str(backend).lower()


def _backend_of_gpus(group: Any = None) -> str:
    """torch.distributed.get_backend(), as on GPUs: the fake group stands for the backend that was asked for, as
    "cpu:gloo,cuda:nccl" or, if none was, for NCCL's."""
    name = distributed_c10d.get_backend(group)
    return _asked_backends.get(group or dist.group.WORLD, "nccl") if name == "fake" else str(name)


def _of_fsdp1() -> Iterator[Any]:
    """FSDP1 asks for an accelerator, whose module is here torch.meta; makes parameters that are on meta anew; and takes
    memory without an address for memory that was given back."""
    init = FullyShardedDataParallel.__init__
    yield mock.patch.object(FullyShardedDataParallel, "__init__", _without_offload(init))
    yield mock.patch.object(fully_sharded_data_parallel, private.FSDP1_DEVICE, _handle_of_meta)
    yield mock.patch.object(private.fsdp1_init, private.FSDP1_COMPUTES_ON, return_value=_META)
    yield mock.patch.object(
        private.fsdp1_init, private.FSDP1_DEVICE_ID, lambda asked, *_: None if asked is None else _META
    )
    yield mock.patch.object(private.fsdp1_init, private.FSDP_MOVES, _move)
    # A state dict for the host would move the flat parameter there and back; here it has no data.
    yield mock.patch.object(private.fsdp1_flat.FlatParamHandle, "flat_param_to")
    yield mock.patch.object(private.fsdp1_init, private.FSDP1_MATERIALIZES, return_value=(False, False))
    yield mock.patch.object(
        private.fsdp1_flat, private.FSDP1_IS_ALLOCATED, lambda each: each.untyped_storage().nbytes() > 0
    )


class _StatelessGenerator:
    """Stands for DTensor's tracker of random states."""

    distribute_region_enabled = False

    def _distribute_region(self, *_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()


@around
def _without_offload(init: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(init).bind(*args, **kwargs).arguments
    if getattr(given.get("cpu_offload"), "offload_params", False):
        raise WorldError(_OFFLOADED.format("cpu_offload"))
    init(*args, **kwargs)


def _move(parameters: Iterable[nn.Parameter], buffers: Iterable[Tensor], device: torch.device) -> None:
    """Moves a module that was made on the CPU. torch assigns `.data`, which it refuses between the CPU and meta."""
    for parameter in parameters:
        if parameter.is_meta:
            continue
        moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        torch.utils.swap_tensors(parameter, moved)
    for buffer in buffers:
        torch.utils.swap_tensors(buffer, buffer.to(device))


def _handle_of_meta(state: Any, *args: Any) -> Any:
    state._device_handle = private.FSDPDeviceHandle.from_device(_META)
    return state


def _refusal(why: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise WorldError(why)

    return refuse


@around
def _ids_on_meta(
    init: Any, self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any
) -> None:
    """By these ids DDP brings a batch from the host to the GPU, where tensors have a GPU's name."""
    init(self, module, **kwargs)
    if self.device_type == "cuda" and device_ids:
        self.device_ids = [private.index_of_device(device_ids[0], True)]


@around
def _of_any_backend(
    new_group: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
) -> Any:
    group = new_group(ranks, timeout, None, *args, **kwargs)
    ask_backend(group, backend or _asked_backends.get(dist.group.WORLD))
    return group


@around
def _already_open(init: Any, *args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any) -> None:
    if not dist.is_initialized():  # the program has ended it
        init(*args, world_size=world_size, rank=rank, **kwargs)
    elif world_size not in (-1, dist.get_world_size()) or rank not in (-1, dist.get_rank()):
        raise WorldError(
            f"init_process_group asks for rank {rank} of {world_size}, but the world that is open is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}: ask for the same, or for none"
        )
