"""Sums along rows and along columns of the same tensors in one kernel of inductor's, as in the gradients of norms.

A block takes some rows, one after another. Each is held in registers, whatever its length; its elements are added to
the sums of the columns. The sums of all blocks go to a workspace in fp32, which torch's own `sum` adds up: it takes the
place of the second stage of a sum that the scheduler had split (`_codegen_mix_order_reduction` in
torch/_inductor/codegen/simd.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch

from flopmeter.records.powers_of_two import power_of_two_up_to
from flopmeter.torch_names import compiler as names

_BLOCKS_OF_SM = 8
_FEWEST_ROWS, _MOST_ROWS = 16, 128  # of a block

WORKSPACE = torch.float32


class ColumnSum(NamedTuple):
    """A sum along columns. `part`: the scheduler's node of it, of its first stage if it is split; `result`: the buffer
    that holds what torch's sum gives."""

    part: Any
    result: Any


class MixedOrders(NamedTuple):
    """The kernel's parts, and what follows it."""

    along_rows: tuple[Any, ...]  # nodes of the scheduler that reduce rows, or compute an element for each of theirs
    along_columns: tuple[ColumnSum, ...]
    afterwards: tuple[Any, ...]  # nodes that came with the sums and run as a kernel of their own

    @property
    def parts(self) -> tuple[Any, ...]:
        return (*self.along_rows, *(each.part for each in self.along_columns))

    @property
    def outputs(self) -> list[Any]:
        """What the kernel writes besides the workspace."""
        return [buffer for part in self.along_rows for buffer in part.get_outputs()]

    @property
    def name_of_workspace(self) -> str:
        return f"{self.along_columns[0].part.get_name()}.workspace"

    @property
    def partial(self) -> frozenset[str]:
        """The names of the buffers that the scheduler has for sums, which the workspace replaces."""
        return frozenset(each.part.node.get_name() for each in self.along_columns)


def mixed_orders(node: Any) -> MixedOrders | None:
    """The parts of such a kernel; None for any other."""
    if not isinstance(node, names.MIXED_ORDERS.value):
        return None
    sums = tuple(ColumnSum(part, _last_stage(part).node) for part in node.node2.get_nodes() if part.is_reduction())
    afterwards = tuple(part for part in node.node2.get_nodes() if not part.is_reduction())
    return MixedOrders(tuple(node.node1.get_nodes()), sums, afterwards)


def blocks_of(rows: int, sm_count: int) -> int:
    """How many blocks share the rows."""
    of_block = power_of_two_up_to(max(rows // (_BLOCKS_OF_SM * sm_count), 1))
    return ceil(rows / min(max(of_block, _FEWEST_ROWS), _MOST_ROWS))


def as_launched(nodes: Iterable[Any]) -> Iterator[Any]:
    """The nodes of the scheduler without the second stages that torch's sums replace."""
    replaced: set[str] = set()
    for node in nodes:
        left = [part for part in node.get_nodes() if part.get_name() not in replaced]
        if len(left) == len(node.get_nodes()):
            yield node
        elif left:
            yield _fused(left, node)
        mixed = mixed_orders(node)
        if mixed is None:
            continue
        replaced.update(_last_stage(each.part).get_name() for each in mixed.along_columns)
        if mixed.afterwards:
            yield _fused(mixed.afterwards, node)
            node.last_usage = set()


def _fused(parts: Sequence[Any], whole: Any) -> Any:
    """The kernel of some parts of another, which it takes the place of."""
    left = parts[0] if len(parts) == 1 else names.FUSED_NODE.value(whole.scheduler, list(parts))
    left.last_usage = whole.last_usage
    return left


def _last_stage(part: Any) -> Any:
    """The node that gives a sum's result: the second stage of one that is split, else its own."""
    return part.get_outputs()[0].users[0].node if part.node._split_size else part
