"""torch.compile under the device named cuda: what Dynamo answers the program that it traces, and what it accepts.

Works around: Dynamo traces into functions that stand in for torch's, and its tables know only torch's own.
Until: tensors without memory can call their device cuda.

While Dynamo traces, torch is as it is without a run, and the graph is one of meta tensors, as it would be under a
FlopMeter. What the program asks a traced tensor is answered cuda; where it passes cuda, meta enters the graph.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flopmeter.compiler.hidden import made_inside
from flopmeter.known_values.entry_points import scripting_inside
from flopmeter.known_values.values import no_modes
from flopmeter.run.device import NamedCuda
from flopmeter.run.named_types import META
from flopmeter.run.patches import Patch, applied, hidden
from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.private import PIN_BATCHES, pin_batch

TENSORBOARD = "torch.utils.tensorboard."


def jit_traces(note: Callable[[str], None]) -> Patch:
    """While torch.jit.trace is on, sizes are tensors, from which Python code computes no shapes: most ops fail on meta.
    TensorBoard asks for a trace to draw the model, and gets one of nothing."""
    trace: Any = torch.jit.trace

    @functools.wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        try:
            return trace(*args, **kwargs)
        except (TypeError, RuntimeError) as error:
            if not str(sys._getframe(1).f_globals.get("__name__", "")).startswith(TENSORBOARD):
                raise NotImplementedError("torch.jit.trace needs a GPU: call the module itself") from error
        note("TensorBoard's graph of the model (add_graph) is empty: torch.jit.trace needs a GPU")
        with no_modes():
            return trace(torch.nn.Identity(), torch.zeros(1, device="cpu"))

    return Patch(torch.jit, "trace", traced, "it cannot trace what has no memory")


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

        @functools.wraps(pin_batch)
        def pin_memory(*args: Any, **kwargs: Any) -> Any:
            with self._traces:
                return pin_batch(*args, **kwargs)

        return Patch(importlib.import_module(PIN_BATCHES), "pin_memory", pin_memory, "they run beside the program")

    def tables(self, answers: list[Patch]) -> list[Patch]:
        """What makes Dynamo's tables, and compiles TorchScript, with torch as it is, also without the `answers` of
        torch.cuda."""

        @contextmanager
        def around() -> Iterator[None]:
            with self(), hidden(answers):
                yield

        why = "compilers know torch's own functions alone"
        scripting = Patch(torch.jit, "script", scripting_inside(around, torch.jit.script), why)
        return [scripting] + [
            Patch(name.parent, name.attribute.rpartition(".")[2], made_inside(around, name.value), why)
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

    def _telling(self, plain: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(plain)
        def facts(value: torch.Tensor) -> dict[str, Any]:
            told = plain(value)
            return {**told, "device": self._named.name} if told["device"] == META else told

        return facts

    def _taking(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def create_proxy(tracer: Any, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any) -> Any:
            if kind in ("call_function", "call_method"):
                target, args, kwargs = self._on_meta(kind, target, args, kwargs)
            return plain(tracer, kind, target, args, kwargs, *rest, **more)

        return create_proxy

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
