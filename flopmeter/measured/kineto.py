"""Read a Chrome trace of torch.profiler (libkineto writes it) into a tree of ops with what the device ran for each.

Events that matter, all complete ones (ph 'X', ts and dur in µs):

    cat                 what it is                                     args
    cpu_op              an op on the host; ops nest by time            External id; with record_shapes=True Input type,
                        within a thread                                Input Dims, Input Strides, Concrete Inputs (older
                                                                       profilers leave out the last two)
    cuda_runtime,       a call of the driver: cudaLaunchKernel, ...    External id (of its op), correlation
    cuda_driver
    kernel, gpu_memcpy, what ran on the device                         External id, correlation, device, stream
    gpu_memset

If the External id of a driver's call is its own correlation (older Kineto), it names no op: then the op is the
innermost one that was running at the time of the call.

Correlations rise with time. What ran on the device with a smaller one than the first driver's call in the trace was
sent before the profile began: it belongs to no op in it.

At the top level `deviceProperties` lists the devices of the host with their `name`, and `distributedInfo` has the
`world_size` of a program of many ranks. (github.com/pytorch/kineto,
libkineto/src/output_json.cpp; torch/csrc/autograd/profiler_kineto.cpp.)
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_DRIVER = ("cuda_runtime", "cuda_driver")
_GZIP_MAGIC = b"\x1f\x8b"


class ProfileError(ValueError):
    """A file that is no trace of torch.profiler, or one that lacks what a check needs."""


class Span(NamedTuple):
    """A stretch of time, in nanoseconds of the trace's clock."""

    start: int
    end: int


class DeviceEvent(NamedTuple):
    """A kernel, a copy or a fill on the device."""

    name: str
    is_copy: bool
    span: Span
    is_sent: bool = True  # the trace has the call that launched it
    is_alone: bool = True  # no other stream of the device runs anything meanwhile


@dataclass(slots=True)
class OpEvent:
    """An op on the host, with the ops that it called and the kernels that it launched itself."""

    name: str
    span: Span
    inputs: OpInputs | None  # None: not in the trace
    sequence: int | None = None  # an op and the node of autograd that differentiates it have the same number
    children: list[OpEvent] = field(default_factory=list)
    launched: list[DeviceEvent] = field(default_factory=list)

    def all_launched(self) -> Iterator[DeviceEvent]:
        """What it launched, itself and through the ops that it called."""
        yield from self.launched
        for child in self.children:
            yield from child.all_launched()


class OpInputs(NamedTuple):
    """The arguments in the order of the schema: C++ type names; sizes and strides of tensors; values as text."""

    types: tuple[Any, ...]
    dims: tuple[Any, ...]
    strides: tuple[Any, ...] | None  # None: not in the trace
    concrete: tuple[Any, ...] | None


class _Recorded(NamedTuple):
    """An op as it stands in the trace."""

    thread: tuple[str, str]
    number: int | None  # its External id
    op: OpEvent


@dataclass(frozen=True)
class Profile:
    """The contents of a trace."""

    roots: list[OpEvent]  # of all threads
    unlinked: list[DeviceEvent]  # not launched by an op: a replayed graph, code that calls the driver itself
    device_events: list[DeviceEvent]  # without the following
    earlier: list[DeviceEvent]  # sent before the profile began
    device_name: str | None  # None: nothing ran on a device
    ranks: int  # of the program on this host
    span: Span  # from the first to the last of ops and device events

    @property
    def is_cuda(self) -> bool:
        """Whether anything ran on a device other than the CPU."""
        return bool(self.device_events)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a trace, gzipped or not. Raises ProfileError if it is no trace or was recorded without shapes."""
    document = _document(Path(path))
    events = [event for event in document["traceEvents"] if _is_complete(event)]
    ops = _ops(events)
    if not ops:
        raise ProfileError(
            f"{path} holds no ops: profile with activities=[ProfilerActivity.CPU, ...] and export_chrome_trace()"
        )
    if not any(recorded.op.inputs for recorded in ops):
        raise ProfileError(f"{path} was recorded without shapes: use torch.profiler.profile(..., record_shapes=True)")
    roots = _nested(ops)
    _tell_parts_of_cats([recorded.op for recorded in ops])
    device_events, unlinked, earlier = _linked(events, ops)
    spans = [*(op.span for op in roots), *(event.span for event in device_events)]
    whole = Span(min(span.start for span in spans), max(span.end for span in spans))
    name = _device_name(document) if device_events else None
    return Profile(roots, unlinked, device_events, earlier, name, _ranks(document), whole)


def _document(path: Path) -> Mapping[str, Any]:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
        document = json.loads(content)
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ProfileError(
            f"{path} is no JSON ({error}): give a trace that torch.profiler wrote with export_chrome_trace()"
        ) from None
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise ProfileError(f"{path} is no trace of torch.profiler: write one with export_chrome_trace()")
    return document


def _is_complete(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and all(isinstance(event.get(key), (int, float)) and isfinite(event[key]) for key in ("ts", "dur"))
        and event["dur"] >= 0
        and isinstance(event.get("name"), str)
        and isinstance(event.setdefault("args", {}), dict)
    )


def _number(event: Mapping[str, Any], key: str) -> int | None:
    value = event["args"].get(key)
    return value if isinstance(value, int) else None


def _span(event: Mapping[str, Any]) -> Span:
    start = round(event["ts"] * 1000)
    return Span(start, start + round(event["dur"] * 1000))


def _ops(events: Iterable[Mapping[str, Any]]) -> list[_Recorded]:
    ops = (event for event in events if event.get("cat") == "cpu_op")
    return [_Recorded(_thread(event), _number(event, "External id"), _op(event)) for event in ops]


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    return str(event.get("pid")), str(event.get("tid"))


def _op(event: Mapping[str, Any]) -> OpEvent:
    types, dims, strides, concrete = (
        _frozen(event["args"].get(key)) for key in ("Input type", "Input Dims", "Input Strides", "Concrete Inputs")
    )
    recorded = [column for column in (types, dims, strides, concrete) if column is not None]
    inputs = None
    if types is not None and dims is not None and all(_are_as_many(column, types) for column in recorded):
        inputs = OpInputs(types, dims, strides, concrete)
    return OpEvent(event["name"], _span(event), inputs, _number(event, "Sequence number"))


def _are_as_many(column: Any, types: Any) -> bool:
    return isinstance(column, tuple) and isinstance(types, tuple) and len(column) == len(types)


def _frozen(value: Any) -> Any:
    """The value with tuples for lists, so that it can be hashed. (A profiler writes no mapping here.)"""
    if isinstance(value, dict):
        return ""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _nested(ops: Iterable[_Recorded]) -> list[OpEvent]:
    """The outermost ops; each other op becomes a child of the op during which it runs."""
    roots: list[OpEvent] = []
    running: dict[Any, list[OpEvent]] = {}
    for thread, _, op in sorted(ops, key=lambda each: (each.op.span.start, -each.op.span.end)):
        stack = running.setdefault(thread, [])
        while stack and stack[-1].span.end <= op.span.start:
            stack.pop()
        (stack[-1].children if stack else roots).append(op)
        stack.append(op)
    return roots


def _tell_parts_of_cats(ops: list[OpEvent]) -> None:
    """An older trace leaves out the tensors in lists. For a `cat` that was differentiated they follow from its node of
    autograd, which has its number and its result's shape, and narrows that to each part. Parts are assumed equal."""
    cats = {op.sequence: op for op in ops if op.name == "aten::cat"}
    for node in ops:
        cat = cats.get(node.sequence) if node.name == "CatBackward0" and node.sequence is not None else None
        if cat is None or not cat.inputs or cat.inputs.dims[0] or not node.inputs or not node.inputs.dims[0]:
            continue
        *others, last = node.inputs.dims[0]
        parts = max(1, sum(child.name == "aten::narrow" for child in node.children))
        sizes = [last * (part + 1) // parts - last * part // parts for part in range(parts)]
        cat.inputs = cat.inputs._replace(dims=(tuple((*others, size) for size in sizes), *cat.inputs.dims[1:]))


def _linked(
    events: list[dict[str, Any]], ops: list[_Recorded]
) -> tuple[list[DeviceEvent], list[DeviceEvent], list[DeviceEvent]]:
    """What ran on the device, the part of it that no op launched, and what was sent before the profile began.

    A kernel names its op; if it does not, the driver's call with the same correlation names it, or else the time of
    that call.
    """
    calls = {_number(event, "correlation"): event for event in events if event.get("cat") in _DRIVER}
    by_number = {each.number: each.op for each in ops if each.number is not None}
    if calls and all(_number(event, "External id") in (correlation, None) for correlation, event in calls.items()):
        by_number, by_time = {}, _running(ops, calls)
    else:
        by_time = {}
    first_sent = min((number for number in calls if number is not None), default=0)
    on_device = [event for event in events if event.get("cat") in _DEVICE]
    crowded = _crowded(on_device)
    ran: list[DeviceEvent] = []
    unlinked: list[DeviceEvent] = []
    earlier: list[DeviceEvent] = []
    for place, event in enumerate(on_device):
        correlation = _number(event, "correlation")
        call = calls.get(correlation)
        device_event = DeviceEvent(
            event["name"], event["cat"] == "gpu_memcpy", _span(event), call is not None, place not in crowded
        )
        numbers = (_number(one, "External id") for one in (event, call) if one is not None)
        op = next((by_number[number] for number in numbers if number in by_number), by_time.get(correlation))
        if op is None and correlation is not None and correlation < first_sent:
            earlier.append(device_event)
            continue
        ran.append(device_event)
        (op.launched if op else unlinked).append(device_event)
    return ran, unlinked, earlier


def _crowded(on_device: Sequence[Mapping[str, Any]]) -> set[int]:
    """Places of the events during which another stream of their device runs something."""
    found: set[int] = set()
    latest: dict[Any, tuple[int, int]] = {}  # by device and stream: an end and the place that has it
    for place in sorted(range(len(on_device)), key=lambda place: float(on_device[place]["ts"])):
        span = _span(on_device[place])
        device, stream = (_number(on_device[place], key) for key in ("device", "stream"))
        for (of_device, other), (end, before) in latest.items():
            if of_device == device and other != stream and end > span.start:
                found |= {place, before}
        latest[device, stream] = max(latest.get((device, stream), (0, place)), (span.end, place))
    return found


def _running(ops: list[_Recorded], calls: Mapping[int | None, dict[str, Any]]) -> dict[int | None, OpEvent]:
    """The innermost op that ran in the thread when the driver was called, by the correlation of the call."""
    starts: list[tuple[int, int, Any, Any]]
    starts = [(op.span.start, -op.span.end, thread, op) for thread, _, op in ops]
    starts += [(_span(call).start, 0, _thread(call), correlation) for correlation, call in calls.items()]
    found: dict[int | None, OpEvent] = {}
    running: dict[Any, list[OpEvent]] = {}
    for start, _, thread, entry in sorted(starts, key=lambda entry: entry[:2]):
        stack = running.setdefault(thread, [])
        while stack and stack[-1].span.end < start:
            stack.pop()
        if isinstance(entry, OpEvent):
            stack.append(entry)
        elif stack:
            found[entry] = stack[-1]
    return found


def _device_name(document: Mapping[str, Any]) -> str | None:
    devices = document.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


def _ranks(document: Mapping[str, Any]) -> int:
    """The ranks of the program on this host, at most one for each device that the trace lists."""
    devices, run = document.get("deviceProperties"), document.get("distributedInfo")
    world = run.get("world_size") if isinstance(run, dict) else None
    return min(world, len(devices)) if isinstance(world, int) and isinstance(devices, list) else 1
