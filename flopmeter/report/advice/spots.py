"""Kernels over the least time that their work can take, by op and place, and why they are above it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import (
    ELEMENTWISE,
    RANDOM,
    ConvolutionWork,
    Cost,
    Kernel,
    MatmulWork,
    Op,
    RecurrentWork,
    Timing,
    VectorWork,
    matmuls_of,
)
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.quantities import figure, percent, percent_of
from flopmeter.report.report import Report
from flopmeter.report.rows import OUTSIDE, as_one_layer
from flopmeter.report.wins import WAITS, WAITS_FOR_LINK, WAITS_FOR_STEPS, HotSpot
from flopmeter.timing import constants
from flopmeter.timing.bandwidth import miss_share
from flopmeter.timing.floors import least_seconds, peak_of
from flopmeter.timing.host import further_seconds
from flopmeter.timing.matmul import tile_count

MOST_PLACES = 2  # modules that a row names
NEAR_PEAK = 0.7  # of the rate that bounds a kernel: above this share a kernel is as good as such kernels get
FEW_ROWS = 64  # that a weight is read for: with fewer, a product is bound by reading it
MANY_SECOND_READS = 0.1  # of a kernel's bytes: above this share it is named as the reason

Timed = tuple[Kernel, Timing]


@draws(VIEWS, "spots")
def hot_spots(report: Report) -> list[HotSpot]:
    """All kernels in groups of one op and one place; those that hold the most wall-clock over their floor first."""
    groups: dict[tuple[str, str], list[Timed]] = defaultdict(list)
    for kernel, timing in timed(report):
        groups[kernel.cost.name, as_one_layer(kernel.op.module)].append((kernel, timing))
    spots = [spot_of(name, group, report) for (name, _), group in groups.items()]
    return sorted(spots, key=lambda spot: -spot.over_floor)


def timed(report: Report) -> list[Timed]:
    """The kernels on the computing stream. Kernels of other streams delay the run only if these wait for them."""
    pairs = zip(report.kernels, report.timings, strict=True)
    return [(kernel, timing) for kernel, timing in pairs if timing.stream == report.compute_stream]


def spot_of(name: str, group: list[Timed], report: Report) -> HotSpot:
    calls = f" ×{len(group)}" if len(group) > 1 else ""
    return HotSpot(
        what=name + calls,
        where=modules_and_lines(kernel for kernel, _ in group),
        seconds_now=wall_clock(group),
        floor_seconds=floor_of(group, report),
        why=_why(group, report),
        places=places_of(group),
    )


def places_of(group: Iterable[Timed]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{kernel.cost.name} in {as_one_layer(kernel.op.module)}" for kernel, _ in group))


def wall_clock(group: Iterable[Timed]) -> float:
    """The time of the kernels and of the device's waits before them. Over all kernels of a stream this is the
    wall-clock of the run."""
    return sum(timing.seconds + timing.wait_seconds + timing.link_wait_seconds for _, timing in group)


def floor_of(group: Iterable[Timed], report: Report) -> float:
    """The least time of the kernels' work; a collective's own time, of which the datasheet says nothing."""
    known: dict[Cost, float] = {}
    total = 0.0
    for kernel, timing in group:
        if kernel.cost not in known:
            known[kernel.cost] = least_seconds(kernel.cost, report.hardware, report.switches)
        total += min(timing.seconds, known[kernel.cost] if not timing.is_collective else timing.seconds)
    return total


def modules_and_lines(kernels: Iterable[Kernel]) -> str:
    return modules_and_lines_of(kernel.op for kernel in kernels)


def modules_and_lines_of(ops: Iterable[Op]) -> str:
    """Modules and source lines, the most frequent first; layers of one kind are one place."""
    modules: dict[str, int] = {}
    lines: dict[str, int] = {}
    for op in ops:
        module = as_one_layer(op.module)
        modules[module] = modules.get(module, 0) + 1
        if op.source:
            line = op.source.removeprefix(os.getcwd() + os.sep)
            lines[line] = lines.get(line, 0) + 1
    if lines and set(modules) == {OUTSIDE}:
        return _most(lines)
    return _most(modules) + (f" ({_most(lines)})" if lines else "")


def _most(counts: dict[str, int]) -> str:
    names = sorted(counts, key=lambda name: -counts[name])
    more = f" and {len(names) - MOST_PLACES} more" if len(names) > MOST_PLACES else ""
    return ", ".join(names[:MOST_PLACES]) + more


def _why(group: list[Timed], report: Report) -> str:
    """What keeps the kernels above their floor: the reason of the largest part of the time over it."""
    waits = sum(timing.wait_seconds for _, timing in group)
    for_link = sum(timing.link_wait_seconds for _, timing in group)
    ramps = sum(timing.floor_seconds for _, timing in group)
    over = wall_clock(group) - floor_of(group, report)
    if any(timing.is_collective for _, timing in group):
        return "nothing computes while it communicates"
    kernel, timing = _furthest_above(group, report)
    if waits + for_link > over / 2:
        if waits <= for_link and report.cluster is not None:
            return WAITS_FOR_LINK
        return WAITS_FOR_STEPS if further_seconds(kernel.cost, report.hardware, report.hardware.host) else WAITS
    over_here = timing.seconds - floor_of([(kernel, timing)], report)
    if ramps > over / 2 or timing.floor_seconds > over_here / 2:
        starts = kernel.cost.work.kernels if isinstance(kernel.cost.work, VectorWork) else 1
        chain = f"{starts:,} kernels one after another, which take longer to start than to work"
        return chain if starts > 1 else "too small: launch and drain take longer than the work"
    if not kernel.cost.bytes and (of_the_call := sum(each.op is kernel.op for each, _ in group)) > 1:
        return f"a call is {of_the_call} kernels one after another, some of which only count what others have read"
    return (_of_products if kernel.cost.macs else _of_bytes)(kernel.cost, timing, report)


def _furthest_above(group: list[Timed], report: Report) -> Timed:
    """A kernel of the kind that holds most of the time over the floor."""
    over: dict[Cost, float] = defaultdict(float)
    for kernel, timing in group:
        over[kernel.cost] += timing.seconds - floor_of([(kernel, timing)], report)
    return max(group, key=lambda pair: over[pair[0].cost])


def _of_products(cost: Cost, timing: Timing, report: Report) -> str:
    device, peak = report.hardware, peak_of(cost, report.hardware, report.switches)
    if _is_converted(cost, peak) and (not timing.is_compute or item_bytes_of(cost.dtype) <= 2):
        return "the layout is NCHW, which matrix units take by way of copies"
    tiles = sum(map(tile_count, matmuls_of(cost.work)))
    few_tiles = f"few tiles: {tiles} for {device.sm_count} SMs" if 0 < tiles < device.sm_count else ""
    if not timing.is_compute:
        holds_up = timing.compute_seconds > timing.memory_seconds  # although it has few FLOPs for its bytes
        return few_tiles if few_tiles and holds_up else f"bound by memory, {_few_flops(cost, timing, device)}"
    if peak.unit != "matrix" and not isinstance(cost.work, ConvolutionWork):
        return f"{cost.dtype} runs on {peak.unit} units"
    if (alignment := alignment_of(cost)) < constants.FULL_ALIGNMENT_BYTES:
        width = odd_width(cost)
        return f"odd width{f' {width}' if width else ''}: rows are aligned to {alignment} bytes, not 16"
    if few_tiles:
        return few_tiles
    share = percent_of(cost.product_flops, timing.seconds * peak.flop_per_s) / 100
    return f"at {percent(share)} % of the peak" + (", as such kernels get" if share > NEAR_PEAK else "")


def _few_flops(cost: Cost, timing: Timing, device: Hardware) -> str:
    work, share = cost.work, f"at {percent(_bandwidth_share(cost, timing, device))} % of the bandwidth"
    if isinstance(work, ConvolutionWork) and work.implicit.batch > 1 and work.shape.channels == 1:
        return f"{share}: one filter for each channel"
    intensity = f"{share}: {figure(cost.executed_flops / max(cost.bytes, 1))} FLOP/B"
    rows = min((min(shape.m, shape.n) for shape in matmuls_of(cost.work)[:1]), default=FEW_ROWS)
    if rows >= FEW_ROWS or isinstance(work, ConvolutionWork):
        return intensity
    return f"{intensity}, {rows} row{'s' * (rows > 1)} for the whole weight"


def _bandwidth_share(cost: Cost, timing: Timing, device: Hardware) -> float:
    return percent_of(cost.bytes, timing.seconds * device.bandwidth_bytes_per_s) / 100


def _is_converted(cost: Cost, peak: Peak) -> bool:
    """Whether a library converts a convolution's tensors to its layout and back."""
    work = cost.work
    if not isinstance(work, ConvolutionWork) or work.shape.channels_last:
        return False
    return peak.unit == "matrix" and work.implicit.batch == 1


def alignment_of(cost: Cost) -> int:
    """The alignment of the operands' rows, in bytes; for other kernels it does not matter."""
    if isinstance(cost.work, MatmulWork | RecurrentWork):
        return cost.work.alignment_bytes
    return constants.FULL_ALIGNMENT_BYTES


def odd_width(cost: Cost) -> int | None:
    """The size of the matmul that is no multiple of 16 bytes; the largest one if there are several."""
    full = constants.FULL_ALIGNMENT_BYTES / item_bytes_of(cost.dtype)
    sizes = [size for shape in matmuls_of(cost.work) for size in (shape.m, shape.n, shape.k) if size % full]
    return max(sizes, default=None)


def _of_bytes(cost: Cost, timing: Timing, report: Report) -> str:
    share = _bandwidth_share(cost, timing, report.hardware)
    if cost.link_bytes:
        return "it crosses the link between host and device"
    work = cost.work if isinstance(cost.work, VectorWork) else VectorWork()
    if work.grid is not None and work.grid.in_turns and share < NEAR_PEAK:
        return f"{work.grid.blocks:,} blocks for {report.hardware.sm_count} SMs load, compute and store in turns"
    rows = max((reread.rows for reread in work.rereads), default=report.hardware.sm_count)
    if work.grid is not None and not work.grid.joiners and not work.grid.by_element:
        rows = work.grid.blocks
    if rows < report.hardware.sm_count and share < NEAR_PEAK:
        return f"few rows: {rows} for {report.hardware.sm_count} SMs, since no row is shared by two"
    if timing.compute_seconds > timing.memory_seconds and share < NEAR_PEAK:
        if cost.op_class == ELEMENTWISE:
            return "its elements take longer to compute than to move"
        return "its threads combine results more than they move bytes"
    if share > NEAR_PEAK:
        return f"bound by memory, at {percent(share)} % of the bandwidth: only fewer bytes help"
    missed = sum(reread.nbytes * miss_share(reread, report.hardware) for reread in work.rereads)
    if missed > MANY_SECOND_READS * cost.bytes:
        return "second reads of rows too long to be held"
    if work.rereads:
        return "the threads of a row wait for memory and for each other: its rows are short"
    if cost.access == "strided":
        return "it goes through memory in another order than its input lies"
    if work.index_operations and work.grid is not None and work.grid.loop is not None:
        return "it looks up where each element goes: inputs have gaps, or their rows are no multiples of 16 bytes"
    if work.index_operations:
        return f"it takes longer to compute {integers_for(cost)} than to move its bytes"
    return f"bound by memory, at {percent(share)} % of the bandwidth"


def integers_for(cost: Cost) -> str:
    """What a kernel without products has integer operations for."""
    if cost.op_class == RANDOM:
        return "random numbers"
    specs = [spec for spec, _ in (*cost.reads, *cost.writes) if spec is not None]
    lie_alike = len({(spec.shape, spec.stride) for spec in specs}) == 1
    if lie_alike and len({spec.dtype for spec in specs}) > 1:
        return "each element in another type"
    if cost.op_class == ELEMENTWISE and not lie_alike:
        return "where each element lies (its operands do not lie alike: one is repeated, or has gaps)"
    return "where each element lies"
