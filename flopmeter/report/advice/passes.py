"""The backward passes of a step, and what they read."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, pairwise

from flopmeter.records import Trace


def backward_passes(trace: Trace) -> list[range]:
    """The ops of each backward pass, with what checkpoints compute again in it."""
    groups = groupby(range(len(trace.ops)), key=lambda index: trace.ops[index].phase in ("backward", "recompute"))
    passes = [list(indices) for is_backward, indices in groups if is_backward]
    return [range(indices[0], indices[-1] + 1) for indices in passes]


def read_in(trace: Trace, part: range) -> set[int]:
    """The storages that these ops read."""
    return set().union(*(trace.ops[index].reads for index in part))


def grown_in(trace: Trace, part: range) -> set[int]:
    """The gradients to which these ops add, and what hooks on gradients read."""
    adding = (trace.ops[each.op] for each in trace.accumulations if each.op in part)
    return {spec.storage for op in adding for spec in op.inputs}


def differentiates_gradients(trace: Trace) -> bool:
    """Whether a backward pass may go through an earlier one, as after autograd.grad(create_graph=True)."""
    return any(each.creates_graph for each in trace.backward_passes[:-1])


def are_differentiated(trace: Trace, ops: Iterable[int]) -> bool:
    """Whether a later backward pass may go through one of these ops of an earlier one."""
    passes = pairwise(trace.backward_passes)
    parts = [range(each.op, after.op) for each, after in passes if each.creates_graph]
    return any(trace.ops[index].phase != "forward" and any(index in part for part in parts) for index in ops)
