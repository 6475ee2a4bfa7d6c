"""torch.compile under the device named cuda: what Dynamo answers the program that it traces, and what it accepts.

Works around: Dynamo traces into functions that stand in for torch's, and its tables know only torch's own.
Until: tensors without memory can call their device cuda.

While Dynamo traces, torch is as it is without a run, and the graph is one of meta tensors, as it would be under a
FlopMeter. What the program asks a traced tensor is answered cuda; where it passes cuda, meta enters the graph.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from flopmeter.compiler.hidden import made_inside
from flopmeter.known_values.entry_points import scripting_inside
from flopmeter.known_values.values import no_modes
from flopmeter.run.device import NamedCuda
from flopmeter.run.named_types import META, true_type
from flopmeter.run.patches import Patch, applied, hidden
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.around import around
from flopmeter.torch_names.dispatcher import switched_on
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.private import PIN_BATCHES, PROFILING_SWITCHES, SET_TRACING_STATE, TRACING_STATE, pin_batch

_CONVOLUTION = aten_overloads.convolution.default
_BACKENDS = (False, False, True, True)  # benchmark, deterministic, cudnn_enabled, allow_tf32: torch's defaults


class _Untraced(TorchDispatchMode):
    """While torch.jit.trace records an op, sizes are tensors, from which no kernel in Python can compute a shape. What
    runs below the op is no part of the trace, which pauses there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = TRACING_STATE.value()
        if state is not None and func is _CONVOLUTION:  # which the trace takes by what its kernel calls
            with _traced_again():
                return aten_overloads._convolution.default(*args, *_BACKENDS)
        _set_tracing(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _set_tracing(state)


def _set_tracing(state: Any) -> None:
    with _traced_again():  # else torch refuses it
        SET_TRACING_STATE.value(state)


def _traced_again() -> AbstractContextManager[None]:
    """Resumes the trace, which pauses below an op."""
    return switched_on("Tracer")


def jit(named: NamedCuda, note: Callable[[str], None], aside: Callable[..., Callable[..., Any]]) -> Iterator[Patch]:
    """What TorchScript makes of a model on the GPU. TensorBoard asks for a trace, too."""
    for switch in PROFILING_SWITCHES:
        if switch.present():
            yield Patch(switch.owner, switch.attribute, _kept_on(note, switch.value), "its fuser knows no meta tensors")
    yield Patch(torch.jit, "load", _loaded(named, torch.jit.load), "takes the device named cuda")
    annotations: Any = importlib.import_module("torch.jit.annotations")
    to_type = _of_torchs_own(annotations.try_ann_to_type)
    yield Patch(annotations, "try_ann_to_type", to_type, "it knows torch.device, not what stands in for it")
    yield Patch(torch.jit, "trace", _traced(aside(torch.jit.trace)), "it traces what has no memory")
    for name in ("freeze", "optimize_for_inference"):
        yield Patch(torch.jit, name, _unfrozen(note, getattr(torch.jit, name)), "it computes with the weights")


@around
def _of_torchs_own(to_type: Callable[..., Any], annotation: Any, *args: Any, **kwargs: Any) -> Any:
    """The type of TorchScript for an annotation, which a stand-in may have been when the function was made."""
    return to_type(true_type(annotation), *args, **kwargs)


@around
def _traced(trace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _Untraced():  # type: ignore[no-untyped-call]
        return trace(*args, **{**kwargs, "check_trace": False})  # what has no memory has no values to compare


@around
def _loaded(
    named: NamedCuda, load: Callable[..., Any], file: Any, map_location: Any = None, *args: Any, **kwargs: Any
) -> Any:
    if named.real(map_location) is not META:
        return load(file, map_location, *args, **kwargs)
    with no_modes():  # torch reads the file's values through what is loaded
        module = load(file, "cpu", *args, **kwargs)
    return module.to(map_location)


@around
def _kept_on(note: Callable[[str], None], switch: Callable[[bool], bool], is_on: bool) -> bool:
    """Keeps TorchScript's older executor from fusing, which knows no meta tensors ("Unknown device for ...")."""
    if not is_on:
        note("TorchScript's older executor is left out: ops of scripted functions are counted one by one, unfused")
    return switch(True)


@around
def _unfrozen(note: Callable[[str], None], own: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(tensor.is_meta for tensor in module.state_dict().values()):
        return own(module, *args, **kwargs)
    note(f"torch.jit.{own.__name__} leaves the model as it is: a batch norm is not folded into its convolution")
    return module


class Tracing:
    """A call gives the context in which the compiler traces; the context yields the functions of torch that are
    replaced outside of it.
    `undoing`: patches of the run that the compiler must not see."""

    def __init__(self, named: NamedCuda, undoing: list[Patch]) -> None:
        self._named, self._undoing = named, undoing
        self._is_hidden = False
        self._traces = threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[tuple[Any, ...]]:
        replaced = tuple(patch.value for patch in self._undoing)
        if self._is_hidden:
            yield replaced
            return
        with self._traces:
            self._is_hidden = True
            try:
                with hidden(self._undoing), applied(self._patches()):
                    yield replaced
            finally:
                self._is_hidden = False

    def pinning(self) -> Patch:
        """The threads of data loaders that pin batches wait while the compiler traces."""

        waiting = self._not_while_tracing(pin_batch)
        return Patch(importlib.import_module(PIN_BATCHES), "pin_memory", waiting, "they run beside the program")

    @around
    def _not_while_tracing(self, pin: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._traces:
            return pin(*args, **kwargs)

    def tables(self, answers: list[Patch]) -> list[Patch]:
        """Compilers make their tables, and script, with torch as it is, without the `answers` of torch.cuda."""

        @contextmanager
        def around() -> Iterator[None]:
            with self(), hidden(answers):
                yield

        why = "compilers know torch's own functions alone"
        scripting = Patch(torch.jit, "script", scripting_inside(around, torch.jit.script), why)
        return [scripting] + [
            Patch(name.parent, name.own_name, made_inside(around, name.value), why)
            for name in (names.RULES, names.HANDLERS)
            if name.present()
        ]

    def _patches(self) -> Iterator[Patch]:
        facts, graphs, fake = names.TENSOR_FACTS, names.CREATE_PROXY, names.AVOID_DEVICE_INIT.parent
        yield Patch(fake, "avoid_device_init", property(lambda _: True), "there is no driver to start")
        yield Patch(
            facts.parent, "method_attr_is_meta", lambda tensor, _: self._is_meta(tensor), "tells the name to programs"
        )
        yield Patch(facts.parent, "specialize", staticmethod(self._telling(facts.value)), "tells the name to programs")
        yield Patch(graphs.parent, "create_proxy", self._taking(graphs.value), "takes the name from programs")

    def _is_meta(self, traced: Any) -> Any:
        return names.TRACED_CONSTANT.value(traced.device == META)

    @around
    def _telling(self, plain: Callable[..., dict[str, Any]], value: torch.Tensor) -> dict[str, Any]:
        told = plain(value)
        return {**told, "device": self._named.name} if told["device"] == META else told

    @around
    def _taking(
        self,
        plain: Callable[..., Any],
        tracer: Any,
        kind: str,
        target: Any,
        args: Any,
        kwargs: Any,
        *rest: Any,
        **more: Any,
    ) -> Any:
        if kind in ("call_function", "call_method"):
            target, args, kwargs = self._on_meta(kind, target, args, kwargs)
        return plain(tracer, kind, target, args, kwargs, *rest, **more)

    def _on_meta(self, kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """The argument with meta for cuda. Devices are nearly always objects; names and numbers count only where the
        parameter is a device."""
        real = self._named.real
        args, kwargs = tree_map_only(torch.device, real, (args, dict(kwargs)))
        if kwargs.get("device") is not None:
            kwargs["device"] = real(kwargs["device"])
        if kind == "call_method" and target == "to" and len(args) > 1:
            args = (args[0], real(args[1]), *args[2:])
        if kind == "call_method" and target == "cuda":
            device = real(kwargs.pop("device", args[1] if len(args) > 1 else self._named.name))
            return "to", (args[0], device), kwargs
        return target, args, kwargs
