"""What programs written for CUDA and NCCL ask of torch.distributed, in a world of meta tensors.

Works around: classes and functions that ask for a GPU, a device index or NCCL before they do what meta could do.
Until: they take meta as a device that programs run on.

Each patch says what the original does there. What cannot run ends in one error that says what to do instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from flopmeter.distributed.errors import WorldError
from flopmeter.torch_names import distributed as private

NCCL_VERSION = (2, 27, 0)  # what programs are told; nothing that is counted depends on it
_REFUSED: dict[type, str] = {
    FullyShardedDataParallel: "FSDP1 (FullyShardedDataParallel) asks for an accelerator and does not run on meta: "
    "shard with fully_shard (FSDP2), which sends the same bytes",
    CPUOffloadPolicy: "parameters that are offloaded to the host are copied over its link in each pass, which is not "
    "metered: leave CPUOffloadPolicy out, and read the memory without them off the report",
}


def patches() -> Iterator[Any]:
    """To be entered while a world is open."""
    for kind, why in _REFUSED.items():
        yield mock.patch.object(kind, "__init__", _refusal(why))
    # Meta tensors have no index of a device to be on.
    yield mock.patch.object(DistributedDataParallel, "__init__", _without_device_ids(DistributedDataParallel.__init__))
    # It asks which CUDA and NCCL the bf16 hook would run on.
    yield mock.patch.object(DistributedDataParallel, private.CHECK_HOOK)
    # It takes tensors on GPUs only, and drops ranks without rows by counts that all send each other.
    yield mock.patch.object(nn.SyncBatchNorm, "forward", _in_evaluation(nn.SyncBatchNorm.forward))
    for module in (dist, distributed_c10d):
        # NCCL is not built into torch for the CPU; the fake group stands for any backend.
        yield mock.patch.object(module, "new_group", _of_any_backend(dist.new_group))


def init_patches() -> Iterator[Any]:
    """After a world was opened: a program that opens it, too, goes on in it, and is told that NCCL carries it."""
    yield mock.patch.object(dist, "get_backend", backend_of_gpus)
    yield mock.patch.object(torch.cuda.nccl, "version", return_value=NCCL_VERSION)  # torch logs it with an error
    for module in (dist, distributed_c10d):
        yield mock.patch.object(module, "init_process_group", _already_open(dist.init_process_group))


def backend_of_gpus(group: Any = None) -> str:
    """torch.distributed.get_backend(), as on GPUs: the fake group stands for NCCL's."""
    name = distributed_c10d.get_backend(group)
    return "nccl" if name == "fake" else str(name)


def _refusal(why: str) -> Callable[..., None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise WorldError(why)

    return refuse


def _without_device_ids(init: Any) -> Any:
    @functools.wraps(init)
    def made(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        init(self, module, **kwargs)

    return made


def _in_evaluation(forward: Any) -> Any:
    @functools.wraps(forward)
    def running(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        if self.training:
            raise WorldError(
                "SyncBatchNorm has no kernels on meta: meter the model with BatchNorm. In training each layer also "
                "gathers 2 x channels + 1 numbers of every rank, and sums 2 x channels in its backward pass"
            )
        out: Tensor = forward(self, input)
        return out

    return running


def _of_any_backend(new_group: Any) -> Any:
    @functools.wraps(new_group)
    def made(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **kwargs)

    return made


def _already_open(init: Any) -> Any:
    @functools.wraps(init)
    def opened(*args: Any, world_size: int = -1, rank: int = -1, **kwargs: Any) -> None:
        if not dist.is_initialized():  # the program has ended it
            init(*args, world_size=world_size, rank=rank, **kwargs)
        elif world_size not in (-1, dist.get_world_size()) or rank not in (-1, dist.get_rank()):
            raise WorldError(
                f"init_process_group asks for rank {rank} of {world_size}, but the world that is open is rank "
                f"{dist.get_rank()} of {dist.get_world_size()}: ask for the same, or for none"
            )

    return opened
