"""Fake tensors that pose as tensors of a CUDA device, and stand-ins that answer for the missing device.

A fake tensor tells Python that it is on `cuda:0`, so that inductor compiles for a GPU, while C++ takes it for a meta
tensor: autograd finds a queue for its backward pass, indexing finds a device guard, and the emulation in `as_cuda`
dispatches what CUDA would. The stand-ins hold for the thread that poses, and are removed when it stops.

Works around: inductor asks a driver about the device, and takes tensors on meta for ones on the CPU.
Until: it compiles for a device that is described to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from flopmeter.device.sm_limits import SM_REGISTERS, WARP_THREADS, sm_limits
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.around import around

CUDA, META = torch.device("cuda", 0), torch.device("meta")

RNG_STATE_BYTES = 16  # a seed and an offset of Philox (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp)


@dataclass(frozen=True)
class PosedDevice:
    """The facts of a device for which inductor asks."""

    name: str
    compute_capability: tuple[int, int]
    sm_count: int


class _Posing(threading.local):
    device: PosedDevice | None = None


_posing = _Posing()


@contextmanager
def posing(device: PosedDevice) -> Iterator[None]:
    """Meta tensors can pose as `device`'s in this context, in this thread."""
    if _posing.device is not None:
        yield
        return
    with ExitStack() as undo:
        for owner, attribute, stand_in in _stand_ins(device):
            undo.enter_context(mock.patch.object(owner, attribute, stand_in))
        undo.callback(setattr, _posing, "device", None)
        _posing.device = device
        _forget_devices()
        undo.callback(_forget_devices)
        yield


def _forget_devices() -> None:
    """Inductor remembers what a device answered, but not which one it was."""
    for function in vars(names.DEVICE_CACHES.value).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def _here(stand_in: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """`stand_in` in the thread that poses, `plain` in others."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return (plain if _posing.device is None else stand_in)(*args, **kwargs)

    return answer


Replacement = tuple[Any, str, Any]
"""Owner, attribute, and what stands in for it."""


def _stand_ins(device: PosedDevice) -> Iterator[Replacement]:
    yield from _answers(device)
    worker = names.CUDA_WORKER
    yield worker.owner.CudaInterface.Worker, "current_device", staticmethod(_here(lambda: 0, worker.value))
    triton = names.SCHEDULER_HAS_TRITON
    yield triton.owner, "has_triton", _here(lambda *_: True, triton.value)
    yield names.TRITON_HASH.owner, "triton_hash_with_backend", _here(lambda: "", names.TRITON_HASH.value)
    loads = names.LOADS_CODE  # of a template; nothing runs it, and Triton may not be there to be imported
    yield loads.owner.PyCodeCache, "load", _here(lambda *_, **__: SimpleNamespace(__file__="", key=""), loads.value)
    folder = names.DEDUCE_VALUE
    yield folder.owner.UniformValueConstantFolder, "_deduce_value", _here(_on_cpu(folder.value), folder.value)
    yield from _posing_tensors()


def _answers(device: PosedDevice) -> Iterator[Replacement]:
    """The facts of the device, for inductor and from torch.cuda."""
    major, minor = device.compute_capability
    facts = {
        "major": major,
        "multi_processor_count": device.sm_count,
        "warp_size": WARP_THREADS,
        "max_threads_per_multi_processor": sm_limits(device.compute_capability).threads,
        "regs_per_multiprocessor": SM_REGISTERS,
    }
    create = names.DEVICE_PROPERTIES
    properties = create.owner.DeviceProperties
    hints = properties(type="cuda", index=0, cc=10 * major + minor, **facts)
    yield properties, "create", staticmethod(_here(lambda _: hints, create.value))
    cuda, of_torch = torch.cuda, SimpleNamespace(name=device.name, minor=minor, gcnArchName="", **facts)
    yield cuda, "is_available", _here(lambda: True, cuda.is_available)
    yield cuda, "current_device", _here(lambda: 0, cuda.current_device)
    for name in names.EXCHANGE_DEVICE:
        yield cuda, name.attribute, _here(lambda _: 0, name.value)
    yield cuda, "get_device_properties", _here(lambda _=None: of_torch, cuda.get_device_properties)
    yield cuda, "get_device_capability", _here(lambda _=None: (major, minor), cuda.get_device_capability)
    yield cuda, "get_rng_state", _here(lambda _=None: _rng_state(), cuda.get_rng_state)


def _rng_state() -> torch.Tensor:
    return torch.zeros(RNG_STATE_BYTES, dtype=torch.uint8)


def _posing_tensors() -> Iterator[Replacement]:
    yield torch.Tensor, "_make_subclass", staticmethod(_here(_make_posing, torch.Tensor._make_subclass))
    avoids = names.AVOID_DEVICE_INIT.value.fget
    yield FakeTensorMode, "avoid_device_init", property(_here(lambda _: True, avoids))
    new_fake = FakeTensor.__new__
    yield FakeTensor, "__new__", staticmethod(_here(_never_on_meta(new_fake), new_fake))
    yield FakeTensor, "is_meta", property(lambda tensor: tensor.device.type == "meta")
    yield FakeTensor, "is_cuda", property(lambda tensor: tensor.device.type == "cuda")


@around
def _never_on_meta(
    new: Callable[..., Any], cls: type, mode: Any, elem: Any, device: torch.device, *args: Any, **options: Any
) -> Any:
    """Puts tensors that C++ makes for a posing tensor, such as the numbers of `where(mask, 1.0, 0.0)`, on the device of
    that tensor."""
    return new(cls, mode, elem, CUDA if device == META else device, *args, **options)


class _MadeOnCpu(TorchDispatchMode):
    """Constants are made, and folded, on the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, _cpu_for_cuda, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu_for_cuda(device: torch.device) -> torch.device:
    return torch.device("cpu") if device == CUDA else device


@around
def _on_cpu(deduce: Callable[..., Any], *args: Any) -> Any:
    with _MadeOnCpu():  # type: ignore[no-untyped-call]
        return deduce(*args)


_make_subclass = torch.Tensor._make_subclass


def _make_posing(cls: type, elem: Any, requires_grad: bool = False, **options: Any) -> Any:
    """Wraps the constructor of FakeTensor: for C++ a posing tensor is a meta tensor."""
    device = options.get("device_for_backend_keys")
    if device is not None and torch.device(device).type == "cuda":
        options = {name: options[name] for name in options.keys() - {"device_for_backend_keys", "dispatch_device"}}
    return _make_subclass(cls, elem, requires_grad, **options)


def pose(graph: Any) -> None:
    """Move a graph of fake meta tensors to the device: the values of its nodes, and the devices that it names."""
    _rename_device(graph, META, CUDA)
    values = [node.meta["val"] for node in graph.graph.nodes if "val" in node.meta]
    twins = {id(leaf): posed(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}
    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(lambda leaf: twins.get(id(leaf), leaf), node.meta["val"])


def unpose(graph: Any) -> None:
    """Makes the devices that a graph names meta again, so that it can run."""
    _rename_device(graph, CUDA, META)
    graph.recompile()


def _rename_device(graph: Any, old: torch.device, new: torch.device) -> None:
    for node in graph.graph.nodes:
        if node.kwargs.get("device") == old:
            node.kwargs = {**node.kwargs, "device": new}
        if any(isinstance(argument, torch.device) and argument == old for argument in node.args):
            node.args = tuple(new if argument == old else argument for argument in node.args)


def unposed(value: Any) -> Any:
    """The twin on meta of a tensor that poses; anything else as it is."""
    if not isinstance(value, FakeTensor) or value.device != CUDA:
        return value
    with value.fake_mode, torch.no_grad():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def posed(tensor: torch.Tensor) -> torch.Tensor:
    """The twin of a meta tensor on the device; a tensor of another device stays as it is."""
    if not isinstance(tensor, FakeTensor) or tensor.device.type != "meta":
        return tensor
    with tensor.fake_mode, torch.no_grad():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
