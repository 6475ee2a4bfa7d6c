"""torch.compile under the device named cuda: what Dynamo answers the program that it traces, and what it accepts.

Works around: Dynamo traces into functions that stand in for torch's, and its tables know only torch's own.
Until: tensors without memory can call their device cuda.

While Dynamo traces, torch is as it is without a run, and the graph is one of meta tensors, as it would be under a
FlopMeter. What the program asks a traced tensor is answered cuda; where it passes cuda, meta enters the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flopmeter.compiler.hidden import made_inside
from flopmeter.run.device import NamedCuda
from flopmeter.run.named_types import META
from flopmeter.run.patches import Patch, applied, hidden
from flopmeter.torch_names import compiler as names


class Tracing:
    """A call gives the context in which the compiler traces; the context yields the functions of torch that are
    replaced outside of it.
    `undoing`: patches of the run that the compiler must not see."""

    def __init__(self, named: NamedCuda, undoing: list[Patch]) -> None:
        self._named, self._undoing = named, undoing
        self._is_hidden = False

    @contextmanager
    def __call__(self) -> Iterator[tuple[Any, ...]]:
        replaced = tuple(patch.value for patch in self._undoing)
        if self._is_hidden:
            yield replaced
            return
        self._is_hidden = True
        try:
            with hidden(self._undoing), applied(self._patches()):
                yield replaced
        finally:
            self._is_hidden = False

    def tables(self, answers: list[Patch]) -> list[Patch]:
        """What makes Dynamo's tables with torch as it is, also without the `answers` of torch.cuda."""

        @contextmanager
        def around() -> Iterator[None]:
            with self(), hidden(answers):
                yield

        why = "Dynamo knows torch's functions alone"
        return [
            Patch(name.parent, name.attribute.rpartition(".")[2], made_inside(around, name.value), why)
            for name in (names.RULES, names.HANDLERS)
            if name.present()
        ]

    def _patches(self) -> Iterator[Patch]:
        facts, graphs, fake = names.TENSOR_FACTS, names.CREATE_PROXY, names.AVOID_DEVICE_INIT.parent
        yield Patch(fake, "avoid_device_init", property(lambda _: True), "there is no driver to start")
        yield Patch(
            torch.backends.cuda, "is_built", lambda: False, "modules of the compiler import what CUDA builds have"
        )
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
