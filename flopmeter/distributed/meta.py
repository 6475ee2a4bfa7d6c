"""Removes what keeps torch.distributed from running on meta tensors, while a world is open.

Works around: DDP, FSDP2 and DTensor read values that are on meta, or refuse parameters there.
Until: they accept meta as a device that programs run on.

Each patch says what the original does there. None changes which kernels or collectives run on a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import Backend, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from flopmeter.distributed import objects, programs, symmetric_memory, sync_batch_norm
from flopmeter.distributed.values import with_values
from flopmeter.known_values import messages
from flopmeter.torch_names import distributed as private
from flopmeter.torch_names.around import around
from flopmeter.trace import streams


@contextmanager
def runs_on_meta(gpus_per_node: int | None, rank: int, *, has_host: bool = False) -> Iterator[None]:
    """DDP, FSDP2 and DTensor run on meta tensors in this context; recorders hear of streams, waits and resizes. The
    world that is open at its end is closed.

    `has_host`: the program may have tensors on the CPU, too.
    """
    with ExitStack() as undo:
        undo.callback(setattr, sys, "excepthook", sys.excepthook)  # torch sets its own for ranks, and leaves it
        kernels = _KERNELS | sync_batch_norm.KERNELS | symmetric_memory.KERNELS
        undo.callback(private.unregister, private.registered(kernels, "Meta"))
        undo.callback(private.unregister, private.registered(_KERNELS_ON_CPU, "CPU"))
        patches: tuple[Any, ...] = (
            # The module of the device type.
            mock.patch.object(torch, "meta", meta_device(gpus_per_node, rank), create=True),
            # Programs ask for meshes of the device that they run on.
            mock.patch.object(DeviceMesh, "__init__", _on_meta(DeviceMesh.__init__)),
            # Meshes are compared, and joined, rank by rank, and the same ones again and again.
            mock.patch.object(DeviceMesh, "__eq__", _asked_once(DeviceMesh.__eq__)),
            mock.patch.object(DeviceMesh, private.CONCATENATE, _joined_once()),
            # FSDP2 refuses parameters on meta, since on a GPU somebody would have forgotten to initialize them.
            mock.patch.object(private.FSDPParamGroup, "_validate_no_meta_params", _skip),
            # DDP compares the parameters' shapes among ranks, by values that meta tensors do not have.
            mock.patch.object(torch.nn.parallel.distributed, private.VERIFY_PARAMETERS, _skip),
            # TORCH_DIST_INIT_BARRIER=1: whoever makes a group waits until every rank has been at its store.
            mock.patch.object(distributed_c10d, private.STORE_BARRIER, _skip),
            # DDP reads on the host which parameters rank 0 puts into which bucket.
            mock.patch.object(private.Reducer, "_rebuild_buckets", with_values(private.Reducer._rebuild_buckets)),
            *(
                mock.patch.object(module, name, answer(getattr(module, name)))
                for name, answer in objects.ANSWERS.items()
                for module in (torch.distributed, torch.distributed.distributed_c10d)
            ),
            # Torch 2.12's pipelines name devices, and not their type: those of CUDA are asked for random states.
            mock.patch.object(torch.random, "fork_rng", _with_type(torch.random.fork_rng)),
            # Batches of messages ask which backend the device has.
            mock.patch.dict(Backend.backend_capability, fake=[*Backend.backend_capability["fake"], "meta"]),
            mock.patch.object(distributed_c10d, private.CHECK_BATCH, _heard_batch(_check_batch)),
            *(mock.patch.object(kind, "wait", _heard_wait(kind.wait)) for kind in (private.FakeWork, private.Work)),
            mock.patch.object(torch.UntypedStorage, "resize_", _heard_resize(torch.UntypedStorage.resize_)),
            *programs.patches(has_host=has_host),
        )
        undo.callback(_forget_device_module)
        for patch in patches:
            undo.enter_context(patch)
        undo.callback(_close)
        yield


def _close() -> None:
    if torch.distributed.is_initialized():  # the program may have ended it
        torch.distributed.destroy_process_group()
    # DTensor remembers what an op does on a mesh. The next world may have an equal one with groups of other names.
    private.forget_shardings()


def _forget_device_module() -> None:
    """torch remembers the module of a device type that it was asked for; the next world has another."""
    if hasattr(torch.get_device_module, "cache_clear"):
        torch.get_device_module.cache_clear()


def _all_reduce(tensors: list[Tensor], *args: Any) -> tuple[list[Tensor], torch.ScriptObject]:
    """DDP takes the sums from the future of the collective. The fake group's future does not hold them."""
    return tensors, _done(tensors)


def _done_at_once(*args: Any) -> torch.ScriptObject:
    """Coalesced collectives, which have no Meta kernels."""
    return _done([])


def _all_gather(output: Tensor, part: Tensor, group: torch.ScriptObject, *args: Any) -> tuple[Tensor, Any]:
    """The fake group takes any sizes."""
    _check_sizes(output, part, group)
    return output, _done([])


def _reduce_scatter(part: Tensor, whole: Tensor, group: torch.ScriptObject, *args: Any) -> tuple[Tensor, Any]:
    """The fake group takes any sizes."""
    _check_sizes(whole, part, group)
    return part, _done([])


def _check_sizes(whole: Tensor, part: Tensor, group: torch.ScriptObject) -> None:
    """The checks of NCCL's process group."""
    size = torch.distributed.ProcessGroup.unbox(group).size()
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"a group of {size} ranks gathers {size} equal parts or scatters as many: {list(whole.shape)} is not "
            f"{size} times {list(part.shape)}"
        )
    if whole.dtype != part.dtype:
        raise TypeError(f"a collective has one type: {whole.dtype} is not {part.dtype}")


def _done(tensors: list[Tensor]) -> torch.ScriptObject:
    """The handle of a finished collective that has these results."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return private.work_of_future(future).boxed()


def _waits_on_first_use(tensor: Tensor) -> Tensor:
    """Waits when the result is first used, as on devices. torch's own Meta kernel returns a plain tensor, so the
    program would never wait."""
    return private.functional_collectives.AsyncCollectiveTensor(tensor)


_KERNELS: dict[str, Any] = {
    "c10d::allreduce_": _all_reduce,
    "c10d::_allgather_base_": _all_gather,
    "c10d::allreduce_coalesced_": _done_at_once,
    "c10d::allgather_coalesced_": _done_at_once,
    "c10d::allgather_into_tensor_coalesced_": _done_at_once,
    "c10d::reduce_scatter_tensor_coalesced_": _done_at_once,
    "c10d::_reduce_scatter_base_": _reduce_scatter,
    "_c10d_functional::_wrap_tensor_autograd": _waits_on_first_use,
}


def _scatter(parts: list[Tensor], whole: list[list[Tensor]], group: Any, root: int, *args: Any) -> tuple[Any, Any]:
    """The root keeps its part. The fake group does nothing before torch 2.13."""
    if whole:
        parts[0].copy_(whole[0][root])
    return parts, _done(parts)


def _gather(whole: list[list[Tensor]], parts: list[Tensor], *args: Any) -> torch.ScriptObject:
    """The root gets from each rank what it has itself. The fake group does nothing before torch 2.13."""
    for gathered in whole[0] if whole else ():
        gathered.copy_(parts[0])
    return _done(parts)


_KERNELS_ON_CPU: dict[str, Any] = {"c10d::scatter_": _scatter, "c10d::gather_": _gather}


@around
def _on_meta(make: Any, self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
    make(self, "meta" if device_type == "cuda" else device_type, *args, **kwargs)


@around
def _with_type(fork: Any, devices: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(devices, list) and torch.device("meta") in devices:
        kwargs["device_type"] = "meta"
    return fork(devices, *args, **kwargs)


def _asked_once(plain: Any) -> Any:
    """A mesh of 16,384 ranks keeps them in a tuple, so to compare two takes as long as dozens of ops, and DTensor does
    for nearly each. FSDP2 joins the same two anew for each parameter."""
    answers: dict[tuple[int, ...], tuple[Any, Any]] = {}  # by the identities of arguments, which it keeps

    @functools.wraps(plain)
    def answer(*meshes: Any) -> Any:
        key = tuple(map(id, meshes))
        if key not in answers:
            answers[key] = meshes, plain(*meshes)
        return answers[key][1]

    return answer


def _joined_once() -> Any:
    plain = getattr(DeviceMesh, private.CONCATENATE)
    joined = _asked_once(lambda *meshes: plain([*meshes]))
    return staticmethod(lambda meshes: joined(*meshes))


@around
def _heard_wait(wait: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
    for listener in streams.listeners:
        listener.on_wait_for_work(work, streams.current())
    messages.waited_for(work)
    return wait(work, *args, **kwargs)


_check_batch = getattr(distributed_c10d, private.CHECK_BATCH)


@around
def _heard_batch(check: Any, messages: list[Any]) -> None:
    """`batch_isend_irecv` begins with this check. NCCL runs the messages of a batch as one kernel."""
    check(messages)
    if torch.distributed.get_rank(messages[0].group) >= 0:
        for listener in streams.listeners:
            listener.on_batch(len(messages))


@around
def _heard_resize(resize: Any, storage: torch.UntypedStorage, nbytes: int) -> Any:
    for listener in streams.listeners:
        listener.on_resize(storage, nbytes)
    return resize(storage, nbytes)


def _skip(*args: Any) -> None:
    """Takes the place of a check and does nothing."""


USUAL_GPUS_PER_NODE = 8


def meta_device(gpus_per_node: int | None, rank: int) -> SimpleNamespace:
    """The module `torch.meta`, which exists while a world is open: what torch.distributed expects of `torch.cuda`.
    FSDP2 gets its streams and events from it, of which recorders hear; DTensor the number of devices in a node, to
    weigh links."""
    count = gpus_per_node or USUAL_GPUS_PER_NODE
    return SimpleNamespace(
        gpus_per_node=gpus_per_node,  # no module of torch has this one; recorders ask for it (trace/process_groups.py)
        Event=streams.MetaEvent,
        Stream=streams.MetaStream,
        current_stream=streams.current_stream,
        default_stream=streams.default_stream,
        stream=streams.stream,
        current_device=lambda: rank % count,
        device_count=lambda: count,
        is_available=lambda: True,
        is_initialized=lambda: True,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
    )
