"""The calls of ops of libraries in a scheduled graph: their arguments as inductor lays them out, and their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from flopmeter.compiler.origins import origin_of, own_node, returned_arguments
from flopmeter.compiler.placing import GraphBuffers, Placed, has_memory
from flopmeter.compiler.regions import Sizes
from flopmeter.records import ELEMENTWISE, Call, Origin, TensorSpec
from flopmeter.torch_names import compiler as names
from flopmeter.trace.process_groups import with_groups

UNREAD = "unread"  # ends the names of buffers that inductor has not, of results that nobody reads
CONVOLVED = 2  # tensors that a convolution takes before its bias


class LibraryCalls:
    """Of one graph, for one set of sizes."""

    def __init__(self, nodes: Sequence[Any], sizes: Sizes, buffers: GraphBuffers):
        self._sizes, self._buffers, self._ir = sizes, buffers, names.IR.owner
        extern = (node.node for node in nodes if isinstance(node, names.EXTERN_NODE.value))
        called = {own_node(operation): operation for operation in extern}
        self.nodes = called.keys() - {None}  # of FX
        self._without_bias = {  # convolutions that inductor calls without the bias: by node, the buffer of the result
            fx: operation.get_name()
            for fx, operation in called.items()
            if fx is not None and _adds_bias(fx) and len(self._tensors_of(operation)) == CONVOLVED
        }
        self._biased: set[Any] = set()  # those whose bias a kernel has added
        self._calls: dict[Any, Call] = {}
        self._parts: dict[str, list[Any]] = {}  # of an op with several results: the nodes that stand for them
        for node in nodes:
            if isinstance(node.node, self._ir.MultiOutput):
                self._parts.setdefault(self._source_of(node.node), []).append(node.node)

    def call(self, kernel: Any, fx: Any) -> tuple[Call, tuple[str, ...]]:
        """The call of a node of the graph, and its buffers by their numbers in it."""
        numbers: dict[str, int] = {}
        ours = iter(self._tensors_of(kernel))
        inputs: list[TensorSpec] = []

        def argument(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                held = value.meta.get("val")
                if not isinstance(held, torch.Tensor):
                    return self._sizes(held) if isinstance(held, (torch.SymInt, int)) else held
                placed, ir = self._buffers.like(held, f"{kernel.get_name()}.{len(inputs)}"), next(ours, None)
                laid = None if ir is None else self._buffers.laid(ir)
                if laid is not None and prod(laid.shape) == prod(placed.shape):
                    placed = laid
                inputs.append(placed.spec(numbers))
                return inputs[-1]
            if isinstance(value, (list, tuple)):
                return tuple(map(argument, value))
            return self._sizes(value) if isinstance(value, torch.SymInt) else value

        given = fx.args
        if fx in self._without_bias:
            given = (*given[:CONVOLVED], None, *given[CONVOLVED + 1 :])
        args = with_groups(fx.target, tuple(map(argument, given)))
        kwargs = {name: argument(value) for name, value in fx.kwargs.items()}
        outputs = tuple(_returned(fx.target, args, kwargs))
        outputs = outputs or tuple(placed.spec(numbers) for placed in self._results(kernel, fx))
        # Equal calls, such as those of equal layers, are one, which is priced once.
        key = (fx.target, args, tuple(kwargs.items()), tuple(inputs), outputs)
        call = self._calls.setdefault(key, Call(fx.target, args, kwargs, tuple(inputs), outputs))
        return call, tuple(numbers)

    def call_without_node(self, kernel: Any, op: Any) -> tuple[Call, tuple[str, ...]]:
        """The same of an op that is no node of the graph, made from what inductor passes: tensors and constants, each
        in the op's order."""
        numbers: dict[str, int] = {}
        tensors, named, constants = iter(self._tensors_of(kernel)), kernel.kwargs, iter(kernel.constant_args)
        if isinstance(kernel, self._ir.DeviceCopy):
            named = {"non_blocking": next(constants)}
        inputs: list[TensorSpec] = []

        def argument(parameter: Any) -> Any:
            if not isinstance(parameter.type, torch.TensorType):
                return named.get(parameter.name, next(constants, parameter.default_value))
            ir = next(tensors)
            laid = self._buffers.of(ir)
            inputs.append(laid.spec(numbers))
            return inputs[-1]

        args = tuple(map(argument, op._schema.arguments))
        results = self.parts_of(kernel) or [kernel]  # an op with several results has each in a buffer
        made = (self._buffers.of(each) for each in results if has_memory(each))
        outputs = tuple(_returned(op, args, {})) or tuple(placed.spec(numbers) for placed in made)
        return Call(op, args, {}, tuple(inputs), outputs), tuple(numbers)

    def parts_of(self, operation: Any) -> Sequence[Any]:
        """The nodes that stand for the results of an op with several."""
        name = getattr(operation, "name", None) or ""  # a launch of the program's own kernel has none
        return self._parts.get(name, ())

    def unread(self, operation: Any) -> Iterator[Placed]:
        """The results that nobody reads, where others are read: they are there while the op runs."""
        fx = own_node(operation) if self.parts_of(operation) else None
        for placed in self._results(operation, fx) if fx is not None else ():
            if placed.buffer.endswith(UNREAD) and placed.device == "meta":
                yield placed

    def biases(self, node: Any, *, is_backward: bool) -> Iterator[Origin]:
        """The biases of convolutions that a kernel of loops adds, each once, however many kernels compute it again."""
        for part in node.get_nodes():
            read = {each.name for each in part.read_writes.reads}
            for fx, result in self._without_bias.items():
                if result in read and fx not in self._biased:
                    self._biased.add(fx)
                    whole = origin_of(fx, None, is_backward=is_backward)
                    flops = tuple(each for each in whole.flops_by_class if each[0] == ELEMENTWISE)
                    yield whole._replace(op_class=ELEMENTWISE, flops_by_class=flops, transcendentals=0)

    def _results(self, kernel: Any, fx: Any) -> Iterator[Placed]:
        """What the op returns, unread results included, each where it lies: it may be a part of a larger buffer."""
        parts = {self._place(part): part for part in self.parts_of(kernel)}
        if not parts and has_memory(kernel):
            yield self._buffers.of(kernel)
            return
        returned = dict(_tensors_in(fx.meta.get("val")))
        if not parts.keys() <= returned.keys():  # inductor returns them in a form of its own
            yield from map(self._buffers.of, parts.values())
            return
        for place, value in returned.items():
            if place in parts:
                yield self._buffers.of(parts[place])
            elif not fx.target._schema.is_mutable:
                yield self._buffers.like(value, ".".join((kernel.get_name(), *map(str, place), UNREAD)))

    def _place(self, part: Any) -> tuple[int, ...]:
        """The place of a result of inductor's in what the op returns."""
        source = part.inputs[0]
        before = self._place(source) if isinstance(source, self._ir.MultiOutput) else ()
        return (*before, *(number for _, number in part.indices))

    def _source_of(self, part: Any) -> str:
        """The name of the op that made a result, or a result in a list of results."""
        while isinstance(part, self._ir.MultiOutput):
            part = part.inputs[0]
        return part.get_name()

    def _tensors_of(self, kernel: Any) -> list[Any]:
        return [each for each in _flat(kernel.inputs) if isinstance(each, self._ir.IRNode) and _is_tensor(each)]


def runs_graphs(operation: Any) -> bool:
    """Whether it is control flow (torch.cond, while_loop): what its graphs compute is not known here."""
    return any(isinstance(each, names.IR.owner.Subgraph) for each in _flat(vars(operation)))


def _flat(values: Any) -> Iterator[Any]:
    for value in values.values() if isinstance(values, Mapping) else values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _tensors_in(value: Any, place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors in what an op returns, each with its place in lists of lists."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _tensors_in(each, (*place, number))


def _returned(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[TensorSpec]:
    """The arguments that an op writes into and returns."""
    written = returned_arguments(op)
    for number, argument in enumerate(op._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.name in written and isinstance(value, TensorSpec):
            yield value


def _adds_bias(fx: Any) -> bool:
    return fx.target is torch.ops.aten.convolution.default and fx.args[CONVOLVED] is not None


def _is_tensor(each: Any) -> bool:
    return not hasattr(each, "expr") and getattr(each, "get_size", None) is not None
