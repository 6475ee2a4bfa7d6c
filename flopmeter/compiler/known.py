"""What is known, in a call of a compiled graph, of the tensors that the graph makes.

Nothing is computed here on the device, so what a graph returns is unknown. But which experts tokens take follows from a
stated law, and lengths, offsets and documents from what the program was given. So each call goes once more, on meta
tensors and unrecorded, through the ops that lead to what matters: integers and bools that the graph returns, the ends
of the groups of a grouped product, what the mask of flex_attention reads, and what is on the CPU. They are answered as
in eager mode.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from flopmeter.known_values.lengths import arguments_with_lengths, by_name, lengths
from flopmeter.known_values.values import no_modes, spans_storage
from flopmeter.torch_names.operators import Overloads, Packets, aten_overloads

_prims = Overloads(Packets("prims"))
Held = dict[Node, Any]
"""Meta tensors, and numbers, by the node that makes them."""


class KnownInGraph:
    """The ops of one graph that lead to what has to be known. `read`: the nodes that masks read."""

    def __init__(self, graph: Graph, sizes: Sizes, read: Iterable[Node]) -> None:
        self._sizes, self._outputs = sizes, tree_leaves(graph.output_node().args)
        self._inputs = graph.find_nodes(op="placeholder")
        told = (each for node in graph.nodes for each in makers_of_lengths(node).values())
        counted = [each for each in (*self._outputs, *told) if isinstance(each, Node) and _is_integer(each)]
        on_cpu = [each for each in graph.nodes if _is_on_cpu(each) and (each in self._outputs or _overwrites(each))]
        wanted = before((*read, *on_cpu))
        self._has_counts, self._is_always_wanted = bool(counted), bool(wanted)
        makers = before(counted, _leads_by_integers) | wanted
        self._ops = [
            node
            for node in graph.nodes
            if node in makers and (node.op == "call_function" or isinstance(_attribute(node), Tensor))
        ]

    def computed(self, args: Sequence[Any], values: KnownValues | None) -> Held:
        """What these ops return in a call with these arguments of the graph."""
        if values is None or not (
            self._is_always_wanted or (self._has_counts and (values.assume.routing or _any_known(args, values)))
        ):
            return {}
        held: Held = dict(zip(self._inputs, args, strict=True))
        with no_modes():
            for node, arg in zip(self._inputs, args, strict=True):
                if isinstance(arg, Tensor) and values.values.is_blank(arg):  # nobody has written to it
                    held[node] = torch.empty_like(arg)
            for node in self._ops:
                try:
                    held[node] = self._result(node, held, values)
                except Exception:  # whatever an op of the compiler's raises on meta: its result is not known
                    held[node] = stand_in(node, self._sizes)
        return held

    def hand_on(self, held: Mapping[Node, Any], results: Sequence[Any], values: KnownValues | None) -> None:
        """What is known of these tensors becomes known of the graph's results."""
        if values is None:
            return
        for node, result in zip(self._outputs, results, strict=False):
            tensor = held.get(node)
            if not isinstance(tensor, Tensor) or not isinstance(result, Tensor) or tensor is result:
                continue
            if result.device.type == "cpu" and tensor.is_meta:
                raise DataDependentError(str(node.target))
            with no_modes():
                if result.device.type == "cpu":
                    result.copy_(tensor)
                elif values.values.knows(tensor) and spans_storage(result):
                    values.set(result, values.values.read(tensor).clone())

    def _result(self, node: Node, held: Held, values: KnownValues) -> Any:
        def argument(value: Any) -> Any:
            if isinstance(value, Node):
                return held[value] if value in held else stand_in(value, self._sizes)
            if isinstance(value, torch.device):
                return META if value == CUDA else value
            return self._sizes(value) if isinstance(value, torch.SymInt) else value

        if (constant := _attribute(node)) is not None:
            numbers = torch.tensor(constant.tolist(), dtype=constant.dtype, device="cpu")
            return numbers if _is_on_cpu(node) else values.lift(numbers)
        args: Any = map_aggregate(node.args, argument)
        kwargs: Any = map_aggregate(dict(node.kwargs), argument)
        if node.target is operator.getitem:
            return args[0][args[1]]
        func, args, kwargs = _in_aten(node.target, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return values.run(func, args, kwargs, tensors)


def makers_of_lengths(node: Node) -> dict[str, Node]:
    """The nodes that give the lengths of its groups or packed sequences, by argument; empty for nearly all nodes."""
    if not isinstance(node.target, OpOverload):
        return {}
    names, given = arguments_with_lengths(node.target), by_name(node.target, node.args, node.kwargs)
    return {name: given[name] for name in names if isinstance(given.get(name), Node)}


def groups_in(held: Mapping[Node, Any], node: Node, values: KnownValues | None) -> tuple[int, ...] | None:
    """The lengths of the groups or packed sequences of the node, if they are known."""
    if values is None or not isinstance(node.target, OpOverload):
        return None
    given = by_name(node.target, node.args, node.kwargs)
    given |= {name: held.get(maker) for name, maker in makers_of_lengths(node).items()}
    return lengths(node.target, given.get, values.values)


def before(nodes: Iterable[Node], leads: Callable[[Node], bool] = lambda node: True) -> set[Node]:
    """These nodes and all that they depend on, as far as the way leads through nodes for which `leads` is true."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and leads(node):
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _attribute(node: Node) -> Any:
    """A constant, or a function; None for other nodes."""
    return getattr(node.graph.owning_module, str(node.target)) if node.op == "get_attr" else None


def _is_on_cpu(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type == "cpu"


def _overwrites(node: Node) -> bool:
    """Whether it puts a result into an input of the graph, which the program changed in place."""
    return node.target is aten_overloads.copy_.default


def _leads_by_integers(node: Node) -> bool:
    """Whether known values lead on through the node. Nothing is known of numbers with a fraction, such as the scores by
    which experts are picked."""
    is_op = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return is_op and (_is_integer(node) or not isinstance(node.meta.get("val"), Tensor))


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _in_aten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The op that the program called, where inductor has a primitive of its own for it."""
    if func is _prims.convert_element_type.default:
        return aten_overloads._to_copy.default, args[:1], {"dtype": args[1]}
    if func is _prims.iota.default:
        (length,), start, step = args, kwargs["start"], kwargs["step"]
        options = {name: kwargs[name] for name in ("dtype", "device")}
        return aten_overloads.arange.start_step, (start, start + length * step, step), options
    return func, args, kwargs


def stand_in(node: Node, sizes: Sizes) -> Any:
    """A tensor with the shape and type of what the node makes, of which nothing is known."""

    def of(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return sizes(value) if isinstance(value, torch.SymInt) else value
        shape, stride = (tuple(map(sizes, part)) for part in (value.shape, value.stride()))
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=META)

    value = node.meta["val"]
    with no_modes():
        return tuple(map(of, value)) if isinstance(value, (tuple, list)) else of(value)


def _any_known(args: Sequence[Any], values: KnownValues) -> bool:
    with no_modes():
        return any(not arg.is_floating_point() and values.values.knows(arg) for arg in args if isinstance(arg, Tensor))
