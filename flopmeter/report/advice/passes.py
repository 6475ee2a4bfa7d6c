"""The backward passes of a step, and what they read."""

from __future__ import annotations

from itertools import groupby

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
    """Whether a backward pass goes through an earlier one, as after autograd.grad(create_graph=True): it reads what
    that one made, other than gradients to which it adds."""
    earlier = set[int]()  # ops
    for part in backward_passes(trace):
        if any(trace.storages[number].born in earlier for number in read_in(trace, part) - grown_in(trace, part)):
            return True
        earlier.update(part)
    return False
