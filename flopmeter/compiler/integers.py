"""Integers that a compiled graph returns: what its inputs and the routing that the user stated say of them.

Nothing is computed here, so what a graph returns is unknown. But which experts tokens take follows from a stated law,
and lengths and offsets from what the program was given. So each call goes once more, on meta tensors and unrecorded,
through the ops that make its integers and bools, as it would in eager mode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from flopmeter.compiler.posing import CUDA, META
from flopmeter.compiler.regions import Sizes
from flopmeter.known_values import DataDependentError, KnownValues
from flopmeter.known_values.values import no_modes, spans_storage
from flopmeter.torch_names.operators import Overloads, Packets, aten_overloads

_prims = Overloads(Packets("prims"))
Held = dict[Node, Any]
"""Meta tensors, and numbers, by the node that makes them."""


class Integers:
    """The ops of one graph that make the integers and bools that it returns, in their order."""

    def __init__(self, graph: Graph, sizes: Sizes) -> None:
        self._sizes, self._outputs = sizes, tree_leaves(graph.output_node().args)
        self._inputs = graph.find_nodes(op="placeholder")
        makers = _makers(node for node in self._outputs if isinstance(node, Node) and _is_integer(node))
        self._ops = [node for node in graph.nodes if node in makers]

    def computed(self, args: Sequence[Any], values: KnownValues | None) -> Held:
        """What the ops give in a call with these arguments of the graph."""
        if not self._ops or values is None or not (values.assume.routing or _any_known(args, values)):
            return {}
        held: Held = dict(zip(self._inputs, args, strict=True))
        with no_modes():
            for node, arg in zip(self._inputs, args, strict=True):
                if isinstance(arg, Tensor) and values.values.is_blank(arg):  # nobody has written to it
                    held[node] = torch.empty_like(arg)
            for node in self._ops:
                held[node] = self._result(node, held, values)
        return held

    def hand_on(self, held: Mapping[Node, Any], results: Sequence[Any], values: KnownValues | None) -> None:
        hand_on(self._outputs, held, results, values)

    def _result(self, node: Node, held: Held, values: KnownValues) -> Any:
        def argument(value: Any) -> Any:
            if isinstance(value, Node):
                return held[value] if value in held else stand_in(value, self._sizes)
            if isinstance(value, torch.device):
                return META if value == CUDA else value
            return self._sizes(value) if isinstance(value, torch.SymInt) else value

        args: Any = map_aggregate(node.args, argument)
        kwargs: Any = map_aggregate(dict(node.kwargs), argument)
        if node.target is operator.getitem:
            return args[0][args[1]]
        func, args, kwargs = _in_aten(node.target, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            return values.run(func, args, kwargs, tensors)
        except (DataDependentError, NotImplementedError):
            return stand_in(node, self._sizes)


def _in_aten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that the program called, where inductor has a primitive of its own for it."""
    if func is _prims.convert_element_type.default:
        return aten_overloads._to_copy.default, args[:1], {"dtype": args[1]}
    if func is _prims.iota.default:
        (length,), start, step = args, kwargs["start"], kwargs["step"]
        options = {name: kwargs[name] for name in ("dtype", "device")}
        return aten_overloads.arange.start_step, (start, start + length * step, step), options
    return func, args, kwargs


def hand_on(
    outputs: Sequence[Any], held: Mapping[Node, Any], results: Sequence[Any], values: KnownValues | None
) -> None:
    """What is known of these tensors is known of the graph's results too."""
    if values is None:
        return
    for node, result in zip(outputs, results, strict=False):
        tensor = held.get(node)
        if isinstance(tensor, Tensor) and isinstance(result, Tensor) and tensor is not result:
            with no_modes():
                if values.values.knows(tensor) and spans_storage(result):
                    values.set(result, values.values.read(tensor).clone())


def stand_in(node: Node, sizes: Sizes) -> Any:
    """Something of the shape and type of what the node makes, of which nothing is known."""

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return sizes(value) if isinstance(value, torch.SymInt) else value
        shape, stride = (tuple(map(sizes, part)) for part in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=META)

    value = node.meta["val"]
    with no_modes():
        return tuple(map(of, value)) if isinstance(value, (tuple, list)) else of(value)


def _makers(outputs: Any) -> set[Node]:
    """The ops that lead to these nodes by integers alone. Of numbers with a fraction nothing is known."""
    found: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        is_op = isinstance(node.target, OpOverload) or node.target is operator.getitem
        if node not in found and is_op and (_is_integer(node) or not isinstance(node.meta.get("val"), Tensor)):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _any_known(args: Sequence[Any], values: KnownValues) -> bool:
    with no_modes():
        return any(not arg.is_floating_point() and values.values.knows(arg) for arg in args if isinstance(arg, Tensor))
