"""flex_attention in a compiled graph: a template of inductor's, into which ops that come after it may fuse.

How much the template computes depends on values: on the blocks that the mask leaves. So each call of the graph asks
what is known of them (known.py), such as the documents of a batch of tokens. What is not known then counts as in eager
programs: mask_mod tells, or every block is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from flopmeter.compiler.known import Held, stand_in
from flopmeter.compiler.lowering import copied
from flopmeter.compiler.posing import unpose
from flopmeter.compiler.regions import Sizes
from flopmeter.known_values import KnownValues
from flopmeter.records import BlockCount, Call, FlexBody
from flopmeter.torch_names.own_operators import own_overloads
from flopmeter.torch_names.private import no_dispatch_modes
from flopmeter.trace.flex_attention import template_of

FORWARD, BACKWARD = "flex_attention", "flex_attention_backward"
_MASK, _MASK_READS = {FORWARD: 4, BACKWARD: 9}, {FORWARD: 8, BACKWARD: 13}  # their places among the arguments
_JOINT, _SCORE_READS, _OPTIONS = 8, 12, {FORWARD: 6, BACKWARD: 11}
_SCALARS = 5  # the score and four indices: their gradients come first in the results of the joint graph


def is_flex(node: Node) -> bool:
    return isinstance(node.target, HigherOrderOperator) and node.target.name() in _MASK


def flex_node(operation: Any) -> Node | None:
    """The call of flex_attention from which an operation of inductor's stems."""
    return next(filter(is_flex, operation.origins), None)


class TemplateTensors(NamedTuple):
    """The tensors of a template, in the order of `input_nodes` in torch/_inductor/kernel/flex."""

    read: Sequence[Any]
    written: Sequence[Any]
    blocks: Sequence[Any]
    captured: Sequence[Any]

    @classmethod
    def of(cls, node: Node, template: Any) -> TemplateTensors:
        inputs, result = template.inputs, template
        if node.target.name() == FORWARD:  # type: ignore[union-attr]
            statistics = [
                tensor
                for tensor, name in zip(inputs[3:5], ("LOGSUMEXP", "MAX"), strict=True)
                if splits_keys(template) or node.args[_OPTIONS[FORWARD]].get(f"OUTPUT_{name}")  # type: ignore[union-attr]
            ]
            return cls(inputs[:3], [result, *statistics], inputs[5:9], inputs[9:])
        grad_query, grad_value = inputs[6:8]
        known = {each.get_name() for each in (grad_query, grad_value)}
        learned = [each for each in template.mutated_inputs if each.get_name() not in known]
        known |= {each.get_name() for each in learned}
        captured = [each for each in inputs[16:] if each.get_name() not in known]
        return cls(inputs[:6], [grad_query, result, grad_value, *learned], inputs[8:16], captured)


def splits_keys(template: Any) -> bool:
    """Whether it is the template for few queries, whose result has a dimension for the parts."""
    return len(template.get_size()) > 4


def call_of(node: Node, tensors: TemplateTensors) -> Call:
    """The template's call, with specs for tensors, as if its mask left everything."""
    read, written, blocks, captured = map(tuple, tensors)
    if node.target.name() == FORWARD:  # type: ignore[union-attr]
        func, args = own_overloads.flex_attention.default, (*read, blocks, captured, len(written) > 1, len(written) > 2)
    else:
        func, args = own_overloads.flex_attention_gradients.default, (*read, blocks, captured, written[3:])
    queries, keys = read[0].shape[2], read[1].shape[2]
    every = BlockCount(1, (queries, keys), 1, queries * keys, 0, keys, passes_diagonal=True)
    body = FlexBody(every, (), (), splits_keys=False)
    return Call(func, args, {}, (*read, *blocks, *captured), written, body=body)


class Masks:
    """What the calls of flex_attention in a graph compute. `nodes`: whether each has the template for few queries."""

    def __init__(self, nodes: Mapping[Node, bool], sizes: Sizes) -> None:
        self._nodes, self._sizes = nodes, sizes
        self._functions: dict[Node, Any] = {}

    def bodies(self, held: Held, values: KnownValues | None) -> dict[Node, FlexBody]:
        """What each node computes, in a call of the graph that has these tensors."""
        given = dict(held)

        def argument(value: Any) -> Any:
            if not isinstance(value, Node):
                return self._sizes(value) if isinstance(value, torch.SymInt) else value
            if value not in given:
                given[value] = self._function(value) if value.op == "get_attr" else stand_in(value, self._sizes)
            return given[value]

        bodies = {}
        for node, splits in self._nodes.items():
            arguments = list(map_aggregate(node.args, argument))
            if node.target.name() == BACKWARD:  # type: ignore[union-attr]
                arguments[_SCORE_READS] = self._learning(node, arguments[_SCORE_READS])  # type: ignore[arg-type]
            template = template_of(node.target, tuple(arguments), {}, values)  # type: ignore[arg-type]
            assert template is not None
            bodies[node] = template.body._replace(splits_keys=splits)
        return bodies

    def _function(self, node: Node) -> Any:
        if node not in self._functions:
            found = getattr(node.graph.owning_module, node.target)  # type: ignore[arg-type]
            if isinstance(found, GraphModule):
                found = copied(found)
                unpose(found)
            self._functions[node] = found
        return self._functions[node]

    def _learning(self, node: Node, read: Iterable[Any]) -> tuple[Any, ...]:
        """What score_mod reads, with a gradient where the joint graph computes one."""
        joint = self._function(node.args[_JOINT])  # type: ignore[arg-type]
        (gradients,) = joint.graph.output_node().args
        learned = [each is not None for each in gradients[_SCALARS:]]
        with no_dispatch_modes():
            return tuple(
                torch.empty_like(tensor).requires_grad_() if learns else tensor
                for tensor, learns in zip(read, learned, strict=True)
            )


def mask_reads(nodes: Iterable[Node]) -> list[Node]:
    """What the masks of these calls read."""
    return [
        each
        for node in nodes
        for place in (_MASK, _MASK_READS)
        for each in tree_leaves(node.args[place[node.target.name()]])  # type: ignore[union-attr]
        if isinstance(each, Node)
    ]
