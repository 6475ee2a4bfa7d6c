"""The predicted timeline in the Chrome trace event format, laid out as torch.profiler lays out a recorded one.

The host's track holds phases, in them modules, in them a slice for each launch; the device's tracks hold the kernels.
An arrow leads from each launch to its kernel. A counter shows the memory that is alive. It follows the host, since the
allocator works when the host launches. Two calls of a module in a row are one slice.

The format is that of 'Trace Event Format', docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from flopmeter.records import DEFAULT_STREAM, Kernel, Timing
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.report import Report

Event = dict[str, Any]


class Track(NamedTuple):
    """A row of the picture: a thread of the host or a stream of a device."""

    process: int
    thread: int
    title: str

    @property
    def place(self) -> Event:
        return {"pid": self.process, "tid": self.thread}


DEVICE, HOST = 0, 1  # processes
PROGRAM = Track(HOST, 1, "the program: phases, modules, launches")
FIRST_STREAM = 7  # the number that torch.profiler gives to the default stream


class Slice(NamedTuple):
    """A stretch of a track, in whole nanoseconds, so that nested slices end together where their times are equal."""

    start: int
    end: int
    depth: int
    name: str
    category: str
    args: Event

    def event(self, track: Track) -> Event:
        place = {"ts": self.start / 1000, "dur": (self.end - self.start) / 1000, **track.place}
        return {"ph": "X", "name": self.name, "cat": self.category, **place, "args": self.args}


@draws(VIEWS, "timeline")
def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write the trace, compressed where the path ends in `.gz`. Raises OSError where it cannot be written."""
    _write(report, events(report), path)


def save_together(reports: Mapping[str, Report], path: str | os.PathLike[str]) -> None:
    """Write the traces of ranks that run at the same time into one, each rank with a host and a device of its own.

    Raises OSError where the file cannot be written.
    """
    _write(next(iter(reports.values())), _events_together(reports), path)


def _events_together(reports: Mapping[str, Report]) -> Iterator[Event]:
    arrows = 0
    for number, (name, report) in enumerate(reports.items()):
        for event in events(report):
            event["pid"] += 2 * number
            if event["name"] == "process_name":
                event["args"]["name"] = f"{name}: {event['args']['name']}"
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] += 2 * number
            elif "id" in event:  # of an arrow
                event["id"] += arrows
            yield event
        arrows += len(report.timings)


def _write(report: Report, events: Iterator[Event], path: str | os.PathLike[str]) -> None:
    """Writes the file, with the facts of `report` about the device and about assumptions."""
    head = {
        "displayTimeUnit": "ms",
        "deviceProperties": [{"id": 0, "name": report.hardware.title}],
        "otherData": {"mode": report.mode, "notes": list(report.notes), "assumptions": list(report.assumptions)},
    }
    with open(path, "wb") as file:
        # No name and no date in the archive, so that the same report gives the same file.
        packed = gzip.GzipFile("", "wb", fileobj=file, mtime=0) if os.fspath(path).endswith(".gz") else file
        with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as text:
            text.write(json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": [\n')
            for number, event in enumerate(events):
                text.write((",\n" if number else "") + json.dumps(event, allow_nan=False))
            text.write("\n]}\n")


def events(report: Report) -> Iterator[Event]:
    """All events, track by track, each track in the order of time; an outer slice before those inside it. In a turn of
    a loop the host may be ahead of the device; time begins with it."""
    early = _ns(-_host_start(report)) / 1000
    for event in _from_free_device(report):
        if "ts" in event:
            event["ts"] += early
        yield event


def _host_start(report: Report) -> float:
    """When the host begins, if the device is free at 0."""
    return min(0.0, report.timings[0].enqueued_seconds) if report.timings else 0.0


def _from_free_device(report: Report) -> Iterator[Event]:
    launches = _launches(report)
    streams = _streams(report)
    yield from _names(report, [PROGRAM, *streams.values()])
    own = (launch for number, launch in enumerate(launches) if launch.args["External id"] == number)
    slices = [*own, *_waits(report), *_scopes(report, launches)]
    for piece in sorted(slices, key=lambda piece: (piece.start, -piece.end, piece.depth)):
        yield piece.event(PROGRAM)
    for number, (kernel, timing) in enumerate(zip(report.kernels, report.timings, strict=True)):
        track = streams[timing.stream]
        yield _kernel(kernel, timing, number, track).event(track)
    yield from _arrows(report, launches, streams)
    if not report.launches.mode.fuses:  # a mode that fuses has other tensors alive, in another order
        yield from _memory(report, launches)


def _streams(report: Report) -> dict[int, Track]:
    """The track of each stream of the device, by the number that the timeline has for it; the default one first."""
    runs_collectives = {timing.stream for timing in report.timings if timing.is_collective}
    streams = sorted(
        {timing.stream for timing in report.timings}, key=lambda stream: (stream != DEFAULT_STREAM, stream)
    )
    return {
        stream: Track(
            DEVICE,
            FIRST_STREAM + place,
            "communication" if stream in runs_collectives and stream != DEFAULT_STREAM else "kernels",
        )
        for place, stream in enumerate(streams)
    }


def _names(report: Report, tracks: list[Track]) -> Iterator[Event]:
    """Titles of processes and threads, the host above the device."""
    unit = "CPU" if report.hardware.is_cpu else "GPU 0"
    for order, (process, title, label) in enumerate(
        ((HOST, "host (predicted)", "CPU"), (DEVICE, f"{report.hardware.title} (predicted)", unit))
    ):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
        yield {"ph": "M", "name": "process_labels", "pid": process, "args": {"labels": label}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": order}}
    for track in tracks:
        yield {"ph": "M", "name": "thread_name", **track.place, "args": {"name": track.title}}


def _kernel(kernel: Kernel, timing: Timing, number: int, track: Track) -> Slice:
    cost, op = kernel.cost, kernel.op
    args = {
        "External id": number,
        "device": 0,
        "stream": track.thread,
        "module": op.module,
        "phase": op.phase,
        "class": cost.op_class,
        "dtype": cost.dtype,
        "flops": cost.flops,
        "bytes read": cost.bytes_read,
        "bytes written": cost.bytes_written,
        "bound by": timing.regime,
        **(cost.collective._asdict() if cost.collective else {}),
        **({"source": op.source} if op.source else {}),
    }
    return Slice(_ns(timing.start_seconds), _ns(timing.end_seconds), 0, cost.name, "kernel", args)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


# --- the host ------------------------------------------------------------------------------------------------------


def _launches(report: Report) -> list[Slice]:
    """What the host does for each kernel: the Python, views and module calls before its launch, and the launch.
    Kernels that a graph replays share the slice of its one launch."""
    slices: list[Slice] = []
    ready = _host_start(report)  # when the host begins with the kernel
    graph_before: int | None = None
    for number, (kernel, timing, graph) in enumerate(
        zip(report.kernels, report.timings, report.launches.graphs, strict=True)
    ):
        replays = graph is not None and report.launches.mode_of(graph).replays_graph
        if replays and graph == graph_before:
            slices.append(slices[-1])
        else:
            name = f"replay graph {graph}" if replays else f"launch {kernel.cost.name}"
            args = {"External id": number, "module": kernel.op.module}
            slices.append(Slice(_ns(ready), _ns(timing.enqueued_seconds), _DEEPEST, name, "cpu_op", args))
        graph_before = graph
        ready = timing.end_seconds if _host_waits(report, kernel) else timing.enqueued_seconds
    return slices


def _host_waits(report: Report, kernel: Kernel) -> bool:
    """Whether the host goes on only when the kernel has ended. A CPU runs its kernels itself."""
    return kernel.cost.blocks_host or report.hardware.is_cpu


_DEEPEST = 1_000_000  # launches lie below any module


def _waits(report: Report) -> Iterator[Slice]:
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        if _host_waits(report, kernel):
            start, end = _ns(timing.enqueued_seconds), _ns(timing.end_seconds)
            yield Slice(start, end, _DEEPEST, f"wait for {kernel.cost.name}", "cuda_runtime", {})


def _scopes(report: Report, launches: list[Slice]) -> Iterator[Slice]:
    """Phases and modules: each from the first launch in it to the last, as long as launches follow one another."""
    open_scopes: list[tuple[str, str, int]] = []  # name, module, start
    end = 0
    for kernel, graph, launch in zip(report.kernels, report.launches.graphs, launches, strict=True):
        path = _path(kernel, graph)
        kept = 0
        while kept < min(len(path), len(open_scopes)) and open_scopes[kept][:2] == path[kept]:
            kept += 1
        yield from _closed(open_scopes, kept, end)
        open_scopes += [(*scope, launch.start) for scope in path[kept:]]
        end = launch.end
    yield from _closed(open_scopes, 0, end)


def _closed(open_scopes: list[tuple[str, str, int]], kept: int, end: int) -> Iterator[Slice]:
    for depth in range(kept, len(open_scopes)):
        name, module, start = open_scopes[depth]
        yield Slice(start, end, depth, name, "user_annotation", {"module": module} if module else {})
    del open_scopes[kept:]


def _path(kernel: Kernel, graph: int | None) -> list[tuple[str, str]]:
    """Names and module paths from the phase inwards; `layers.0` is one level, since a list of modules is not called.
    The host knows nothing of what is inside of a compiled graph."""
    op = kernel.op
    if graph is not None:
        return [(f"graph {graph}", "")]
    scopes = [(str(op.phase), "")]
    parts = op.module.split(".") if op.module else []
    for depth, part in enumerate(parts):
        if depth > 1 and part.isdigit() and not parts[depth - 1].isdigit():
            part = f"{scopes.pop()[0]}.{part}"
        scopes.append((part, ".".join(parts[: depth + 1])))
    return scopes


# --- between the tracks ----------------------------------------------------------------------------------------------


def _arrows(report: Report, launches: list[Slice], streams: dict[int, Track]) -> Iterator[Event]:
    """From the launch to its kernel; each end lies in its slice."""
    for number, (timing, launch) in enumerate(zip(report.timings, launches, strict=True)):
        arrow = {"name": "launch", "cat": "ac2g", "id": number}
        yield {"ph": "s", **arrow, "ts": launch.start / 1000, **PROGRAM.place}
        yield {"ph": "f", "bp": "e", **arrow, "ts": _ns(timing.start_seconds) / 1000, **streams[timing.stream].place}


def _memory(report: Report, launches: list[Slice]) -> Iterator[Event]:
    """Bytes alive by category, where they change."""
    place = {id(op): step for step, op in enumerate(report.memory.trace.ops[: report.memory.steps])}
    timeline = report.memory.timeline
    before: Event = {}
    for kernel, launch in zip(report.kernels, launches, strict=True):
        step = place.get(id(kernel.op))
        alive = before if step is None else {str(category): sizes[step] for category, sizes in timeline.items()}
        if alive != before:
            yield {"ph": "C", "name": "memory (bytes)", "pid": HOST, "ts": launch.start / 1000, "args": alive}
            before = alive
