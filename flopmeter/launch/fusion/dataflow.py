"""Which kernel reads what another wrote: regions of storages, so that views and in-place ops come out right.

Two regions of a storage conflict where their spans of bytes overlap. So regions may seem to conflict that do not (the
even and the odd columns of one tensor), but no conflict is missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from flopmeter.launch.fusion.parts import PUT_TOGETHER, Part
from flopmeter.launch.fusion.roles import Role
from flopmeter.records import Cost, Op, Region, TensorSpec

# A storage that is written in more parts than this (a cache filled token by token) is followed as a whole from then
# on, so that the time for a long program stays linear in its kernels.
MOST_REGIONS = 16


class Touch(NamedTuple):
    """A region of a storage that a kernel reads or writes, in bytes."""

    storage: int
    start: int
    stop: int
    nbytes: int  # of its distinct elements: less than the span where the region has gaps
    charged: int  # how many of these the kernel's cost charges (a gather: the rows that it reads)


@dataclass(slots=True, eq=False)
class Value:
    """What one kernel wrote to one region."""

    kernel: int
    touch: Touch
    readers: list[int] = field(default_factory=list)
    overwritten_by: int | None = None
    is_pinned: bool = False  # its region is no longer followed: it stays in memory


@dataclass(slots=True)
class Flow:
    """For each kernel, by its place in the list: what it reads and writes, and what it must come after."""

    roles: list[Role] = field(default_factory=list)
    reads: list[list[tuple[Touch, list[Value]]]] = field(default_factory=list)
    writes: list[list[Value]] = field(default_factory=list)
    befores: list[list[int]] = field(default_factory=list)  # they read or write what it overwrites
    peers: list[list[int]] = field(default_factory=list)  # the last ones to read the very same value


@dataclass(slots=True)
class _Followed:
    """The state of one storage."""

    values: list[Value] = field(default_factory=list)
    readers: list[tuple[Touch, int]] = field(default_factory=list)
    last_reader: dict[Touch, int] = field(default_factory=dict)


def flow_of(parts: list[Part]) -> Flow:
    """Follow every storage through the parts, in one pass."""
    flow = Flow()
    storages: defaultdict[int, _Followed] = defaultdict(_Followed)
    known: dict[Cost, tuple[tuple[Touch, ...], tuple[Touch, ...]]] = {}  # storages are the call's own numbers
    for index, part in enumerate(parts):
        op, cost = part.op, part.cost
        if cost not in known:
            known[cost] = _touches(cost.reads), _touches(cost.writes)
        reads, writes = known[cost]
        flow.roles.append(part.role)
        flow.peers.append([])
        flow.befores.append([])
        flow.reads.append([_read(flow, storages, index, _placed(touch, op)) for touch in reads])
        flow.writes.append([_write(flow, storages, index, _placed(touch, op)) for touch in writes])
        if op.packet in PUT_TOGETHER:  # the operands lie apart, though gaps may make them overlap
            flow.befores[index] = [each for each in flow.befores[index] if parts[each].op.call is not op.call]
    return flow


def _placed(touch: Touch, op: Op) -> Touch:
    """The region, with its storage's number in the trace."""
    storage, *region = touch
    return Touch(op.storages[storage], *region)


def _read(flow: Flow, storages: defaultdict[int, _Followed], index: int, touch: Touch) -> tuple[Touch, list[Value]]:
    followed = storages[touch.storage]
    values = [value for value in followed.values if _overlap(value.touch, touch)]
    for value in values:
        value.readers.append(index)
    peer = followed.last_reader.get(touch)
    if peer is not None:
        flow.peers[index].append(peer)
    followed.last_reader[touch] = index
    followed.readers.append((touch, index))
    return touch, values


def _write(flow: Flow, storages: defaultdict[int, _Followed], index: int, touch: Touch) -> Value:
    followed, befores = storages[touch.storage], flow.befores[index]
    value = Value(index, touch)
    is_crowded = max(len(followed.values), len(followed.readers)) > MOST_REGIONS
    remaining: list[Value] = []
    for old in followed.values:
        if is_crowded or _overlap(old.touch, touch):
            befores.append(old.kernel)
        if _covers(touch, old.touch):
            old.overwritten_by = index
        elif is_crowded:
            old.is_pinned = True
        else:
            remaining.append(old)
    befores += [reader for read, reader in followed.readers if is_crowded or _overlap(read, touch)]
    followed.readers = [] if is_crowded else [entry for entry in followed.readers if not _covers(touch, entry[0])]
    followed.last_reader = {}
    if is_crowded:  # the newest value stands for the whole storage: what comes after it comes after all
        spans = [touch, *(old.touch for old in followed.values)]
        value.touch = touch._replace(start=min(t.start for t in spans), stop=max(t.stop for t in spans))
    followed.values = [*remaining, value]
    return value


def _overlap(a: Touch, b: Touch) -> bool:
    return a.start < b.stop and b.start < a.stop


def _covers(a: Touch, b: Touch) -> bool:
    """Whether writing `a` overwrites all of `b`: all of `a` is written, and it has no gaps or is the same region."""
    if a.charged < a.nbytes:
        return False
    if (a.start, a.stop) == (b.start, b.stop):
        return a.nbytes >= b.nbytes
    return a.start <= b.start and b.stop <= a.stop and a.nbytes == a.stop - a.start


def _touches(regions: Iterable[Region]) -> tuple[Touch, ...]:
    """The spans of the tensors. Bytes that belong to no tensor concern only the eager kernel."""
    return tuple(_touch(region.spec, region.nbytes) for region in regions if region.spec and region.spec.nbytes)


def _touch(spec: TensorSpec, charged: int) -> Touch:
    size = spec.dtype.itemsize
    start = spec.offset * size
    span = sum((count - 1) * stride for count, stride in zip(spec.shape, spec.stride, strict=True))
    return Touch(spec.storage, start, start + (span + 1) * size, spec.nbytes, min(charged, spec.nbytes))
