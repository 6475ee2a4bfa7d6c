"""Lengths that are data and decide how much work a kernel does: those of the groups of a grouped matmul, and those of
the sequences that attention takes packed into one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import Values, no_modes

_ENDS_OF_GROUPS = "offs"


class _PackedNames(NamedTuple):
    """What an op of attention calls these arguments."""

    queries: str  # where each sequence of queries begins
    keys: str  # the same of keys
    used_keys: str  # how many keys of each sequence are in use, where it has more


_PACKED = (
    _PackedNames("cum_seq_q", "cum_seq_k", "seqused_k"),
    _PackedNames("cu_seqlens_q", "cu_seqlens_k", "seqlen_k"),
    _PackedNames("cu_seq_q", "cu_seq_k", "seqused_k"),  # torch.nn.attention.varlen
)


@functools.cache
def arguments_with_lengths(func: OpOverload) -> tuple[str, ...]:
    """The tensor arguments that tell the lengths of its groups or sequences; () for nearly all ops."""
    names = {argument.name for argument in func._schema.arguments}
    if _ENDS_OF_GROUPS in names:
        return (_ENDS_OF_GROUPS,)
    packed = _packed(func)
    return () if packed is None else tuple(name for name in packed if name in names)


def lengths(func: OpOverload, argument: Callable[[str], Any], values: Values) -> tuple[int, ...] | None:
    """`Call.groups` of a call with these arguments; None if it has no groups, or if their lengths are not known."""
    packed = _packed(func)
    if packed is None:
        return _between(argument(_ENDS_OF_GROUPS), values, start=(0,))
    queries = _between(argument(packed.queries), values)
    if queries is None:
        return None
    used = argument(packed.used_keys) if packed.used_keys in arguments_with_lengths(func) else None
    keys = _between(argument(packed.keys), values) if used is None else _numbers(used, values)
    return None if keys is None else (*queries, *keys)


def by_name(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments by the schema's names."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)


def with_lengths(known: Knowledge, call: Invocation) -> Any:
    """A call whose work depends on lengths. If those of groups are unknown, they are assumed equal; those of sequences
    as long as the longest, which the report tells (costs/contractions/varlen.py)."""
    given = by_name(call.func, call.args, call.kwargs)
    known.groups = lengths(call.func, given.get, known.values)
    if known.groups is None and given.get(_ENDS_OF_GROUPS) is not None:
        known.assume.note("groups of equal length", call.func)
    return known.run_unknown(call)


@functools.cache
def _packed(func: OpOverload) -> _PackedNames | None:
    names = {argument.name for argument in func._schema.arguments}
    return next((packed for packed in _PACKED if packed.queries in names), None)


def _between(bounds: Any, values: Values, start: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """The distances from each bound to the next."""
    numbers = _numbers(bounds, values)
    return None if numbers is None else tuple(max(end - begin, 0) for begin, end in pairwise((*start, *numbers)))


def _numbers(tensor: Any, values: Values) -> tuple[int, ...] | None:
    if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or not values.knows(tensor):
        return None
    if values.is_blank(tensor):  # nobody has written to it
        return None
    with no_modes():
        return tuple(values.read(tensor).flatten().tolist())
