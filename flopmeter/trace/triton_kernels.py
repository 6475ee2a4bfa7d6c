"""Triton kernels that a program launches on meta tensors, recorded instead of run.

Works around: a launch needs the driver of a device, and data. What a kernel does is read off its TTIR, the code that
Triton makes before it asks for a device; what it reads and writes comes from torch's own analysis of the TTIR.
Until: Triton launches on tensors without data.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar
from unittest import mock

import torch
from torch import Tensor

from flopmeter.known_values import KnownValues
from flopmeter.known_values.values import no_modes
from flopmeter.records import TritonBody
from flopmeter.torch_names.own_operators import own_overloads
from flopmeter.torch_names.private import HOST_DESCRIPTORS, TRITON, TRITON_TTIR, lost, no_dispatch_modes
from flopmeter.torch_names.shared_patch import SharedPatch
from flopmeter.trace.triton_tuning import FIRST_FITTING, first_fitting
from flopmeter.trace.ttir import body_of, parse
from flopmeter.trace.ttir_accesses import accesses_of

LAUNCH = own_overloads.triton_kernel.default
_CAPABILITY = 90  # TTIR is the same for all capabilities, but those before 89 lack a type of 8 bits (e4m3)
_WARP = 32


class KernelRecorder(Protocol):
    """Something that records launches: the recorder."""

    def is_on(self) -> bool: ...

    def record_kernel(self, func: Any, args: tuple[Any, ...], body: TritonBody) -> Any: ...


T = TypeVar("T")


class Analysed(NamedTuple):
    """What a kernel does in a launch of these types, constants and grid, and with which of its arguments."""

    body: TritonBody
    read: frozenset[str]
    written: frozenset[str]

    def by_use(self, tensors: Mapping[str, T]) -> tuple[tuple[T, ...], tuple[T, ...], tuple[T, ...]]:
        """Divides these arguments into those that are only read, only written, and both."""
        only_read, only_written = self.read - self.written, self.written - self.read
        read, written, updated = (
            tuple(tensor for name, tensor in tensors.items() if name in names)
            for names in (only_read, only_written, self.read & self.written)
        )
        return read, written, updated


_listeners: list[tuple[KernelRecorder, KnownValues | None]] = []
_known: dict[Any, Analysed] = {}
_chosen: dict[Any, Any] = {}  # configurations of autotuned kernels


@contextmanager
def recorded(recorder: KernelRecorder, values: KnownValues | None) -> Iterator[None]:
    """Record launches on meta tensors while the recorder is on, if the program has imported Triton before."""
    with _patch:
        _listeners.append((recorder, values))
        try:
            yield
        finally:
            _listeners.remove((recorder, values))


def _install() -> ExitStack:
    undo = ExitStack()
    undo.callback(_known.clear)
    undo.callback(_chosen.clear)
    jit, autotuner = (sys.modules.get(f"triton.runtime.{name}") for name in ("jit", "autotuner"))
    if jit is None or autotuner is None:
        return undo
    run, tune = jit.JITFunction.run, autotuner.Autotuner.run

    def run_or_record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        listeners = _metering(args, kwargs)
        if not listeners:
            return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        if not warmup:
            _record(listeners, kernel, args, kwargs, grid)
        return None

    def tune_or_record(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        listeners = _metering(args, kwargs)
        if not listeners:
            return tune(kernel, *args, **kwargs)
        config = _configuration(kernel, args, kwargs)
        note_choice(kernel, *(recorder for recorder, _ in listeners))
        kernel.best_config = config  # programs read it after a launch, for the tiles of what it wrote
        if config.pre_hook is not None:
            config.pre_hook({**_by_name(kernel, args), **kwargs, **config.all_kwargs()})
        return kernel.fn.run(*args, **kwargs, **config.all_kwargs())

    undo.enter_context(mock.patch.object(jit.JITFunction, "run", run_or_record))
    undo.enter_context(mock.patch.object(autotuner.Autotuner, "run", tune_or_record))
    if HOST_DESCRIPTORS.present():  # torch asks the driver, and else takes no kernel's word for what it writes by them
        undo.enter_context(HOST_DESCRIPTORS.replaced(_they_do))
    return undo


def _they_do() -> bool:
    return True


_patch = SharedPatch(_install)


def note_choice(tuner: Any, *recorders: KernelRecorder) -> None:
    """Reports of these say that the configuration of an autotuned kernel was not measured."""
    for recorder, values in _listeners:
        if values is not None and recorder in recorders and len(tuner.configs) > 1:
            values.assume.note(FIRST_FITTING, tuner.base_fn.__name__)


def _configuration(tuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The configuration of a launch. As on a GPU it is chosen once for all launches whose keys are alike, among those
    that the kernel itself leaves for these arguments."""
    named = _by_name(tuner, args)
    given = {**named, **kwargs}
    types = tuple(value.dtype for value in given.values() if isinstance(value, Tensor))
    key = (tuner, types, *(_described(given[name]) for name in tuner.keys if name in given))
    if key not in _chosen:
        prune = tuner.early_config_prune
        configs = prune(tuner.configs, named, **kwargs) if prune is not None else tuner.configs
        launches = [partial(_seen, tuner.fn, args, {**kwargs, **config.all_kwargs()}) for config in configs]
        _chosen[key] = configs[first_fitting(launches) if len(configs) > 1 else 0]
    return _chosen[key]


def _by_name(tuner: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(tuner.arg_names, args, strict=False))


class _Probe:
    """Takes what a launch does, and records nothing."""

    body: TritonBody

    def is_on(self) -> bool:
        return True

    def record_kernel(self, func: Any, args: tuple[Any, ...], body: TritonBody) -> None:
        self.body = body


def _seen(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TritonBody:
    """What a launch would do."""
    probe, listening = _Probe(), list(_listeners)
    _listeners[:] = [(probe, None)]
    try:
        kernel.run(*args, **kwargs)
    finally:
        _listeners[:] = listening
    return probe.body


def _metering(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[KernelRecorder, KnownValues | None]]:
    """Who records a launch with these arguments."""
    tensors = map(_tensor_of, (*args, *kwargs.values()))
    if not any(tensor is not None and tensor.is_meta for tensor in tensors):
        return []
    return [listener for listener in _listeners if listener[0].is_on()]


def _record(
    listeners: list[tuple[KernelRecorder, KnownValues | None]],
    kernel: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    grid: Any,
) -> None:
    names = kernel.arg_names
    bound = kernel.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    size = grid(arguments) if callable(grid) else grid
    size = (size,) if isinstance(size, int) else tuple(map(int, size))
    if not prod(size):
        return
    tensors = {name: tensor for name, value in arguments.items() if (tensor := _tensor_of(value)) is not None}
    key = (kernel, size, tuple((name, _described(value)) for name, value in arguments.items()))
    found = _known.get(key)
    if found is None:
        tiles = {name: tile for name, value in arguments.items() if (tile := _tile_of(value)) is not None}
        found = _known[key] = analysed(kernel, arguments | tensors, size, tiles)
    read, written, updated = found.by_use(tensors)
    for recorder, values in listeners:
        with no_dispatch_modes():
            recorder.record_kernel(LAUNCH, (read, written, updated), found.body)
        if values is not None:
            values.forget((*written, *updated))


def _described(value: Any) -> Any:
    """The part of an argument that the generated code depends on."""
    tensor, tile = _tensor_of(value), _tile_of(value)
    return (type(value), value) if tensor is None else (tensor.dtype, tile and tuple(tile))


def _tensor_of(value: Any) -> Tensor | None:
    """The tensor that an argument is, or that a descriptor made on the host tells the kernel of."""
    tensor = value if _tile_of(value) is None else value.base
    return tensor if isinstance(tensor, Tensor) else None


def _tile_of(value: Any) -> list[int] | None:
    """How many numbers a descriptor (triton.tools.tensor_descriptor) loads or stores at once, by dimension."""
    return value.block_shape if type(value).__name__ == "TensorDescriptor" else None


def analysed(
    kernel: Any, arguments: Mapping[str, Any], grid: tuple[int, ...], tiles: Mapping[str, Sequence[int]]
) -> Analysed:
    """What the kernel does. `tiles`: those of the arguments that are descriptors of tensors. Raises NotImplementedError
    where this torch names its analysis differently."""
    TRITON_TTIR.owner  # noqa: B018  (imported, so that a name that is not there is found to be missing)
    if missing := lost(TRITON):
        raise NotImplementedError(f"a Triton kernel cannot be metered with torch {torch.__version__}: {missing[0]}")
    with no_modes(), without_device():
        real = {
            name: torch.empty(2, dtype=value.dtype, device="cpu") if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        descriptors = {name: ("stable", (list(tile),)) for name, tile in tiles.items()}
        module, names = TRITON_TTIR.value(kernel, dict(real), descriptors)
        text = module.str_nodebug() if hasattr(module, "str_nodebug") else str(module)
        functions = parse(text)
        body = body_of(kernel.fn.__name__, functions, grid, [arguments.get(name) for name in names])
    read, written = (frozenset(names[place] for place in places) for places in accesses_of(functions))
    return Analysed(body, read, written)


class _NoDevice:
    """Stands in for the driver while code is generated. It is asked only for which device."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", _CAPABILITY, _WARP)


def is_imported() -> bool:
    """Whether the program has imported Triton."""
    return "triton.runtime" in sys.modules


@contextmanager
def without_device() -> Iterator[None]:
    """In this context Triton generates code without a driver, provided the program has imported Triton."""
    if not is_imported():
        yield
        return
    from triton.runtime import driver

    with mock.patch.object(type(driver), "active", _NoDevice()):
        yield
