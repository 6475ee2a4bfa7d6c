"""What torch.compile made of the program, in words: graphs, breaks, recompiles, kernels, and what traffic is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from textwrap import shorten

from tabulate import tabulate

from flopmeter.records import CompiledGraph, CompiledKernel
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report

MOST_REASON = 200  # characters of why a function was compiled again
LARGEST = 5  # kernels by the bytes that they move


def in_short(graphs: tuple[CompiledGraph, ...]) -> Iterator[str]:
    """The summary for a report: one line of counts, one for each break and for each recompilation."""
    ran = [graph for graph in graphs if graph.calls]
    if not ran:
        return
    kinds = Counter(kernel.kind for graph in ran for kernel in graph.kernels for _ in range(graph.calls))
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    recompiled = [graph for graph in ran if graph.recompiled_because and graph.part != "backward"]
    broken = [each for graph in graphs for each in graph.breaks]
    yield (
        f"compiled graphs: {len(ran)} in {sum(graph.calls for graph in ran):,} calls · kernels: {counts}"
        f" · graph breaks: {len(broken)} · recompiled: {len(recompiled)}"
    )
    for each, times in Counter(broken).items():
        reason = each.reason.split(" Explanation:")[0].split(" Hint:")[0]
        yield f"graph break at {each.file}:{each.line}{f' ({times:,} times)' if times > 1 else ''}: {reason}"
    for graph in recompiled:
        reason = (graph.recompiled_because or "").partition(" User stack trace")[0]
        yield f"recompiled {graph.function}: {shorten(reason, MOST_REASON, placeholder=' ...')}"


@draws(VIEWS, "compilation")
def explained(report: Report) -> str:
    """Graph by graph: what it launches, what each kernel holds, what fusion saved and where traffic is left.

    Raises ValueError where nothing was compiled.
    """
    ran = [graph for graph in report.graphs if graph.calls]
    if not ran:
        raise ValueError(
            "nothing was compiled by torch.compile in this run: compile the model, as in model = torch.compile(model)"
        )
    return "\n".join((*in_short(report.graphs), *(line for graph in ran for line in ("", *_graph(graph)))))


def _graph(graph: CompiledGraph) -> Iterator[str]:
    kernels, inside = graph.kernels, _kept_inside(graph.kernels)
    ops = sum(len(kernel.origins) for kernel in kernels)
    moved = sum(kernel.bytes_read + kernel.bytes_written for kernel in kernels)
    again = sum(
        flops
        for kernel in kernels
        for origin in kernel.origins
        if origin.is_recomputed
        for _, flops in origin.flops_by_class
    )
    yield f"graph {graph.number}, {graph.part} of {graph.function}: {len(kernels)} kernels, called {graph.calls} times"
    yield (
        f"  moves {with_prefix(moved, 'B')} a call; as kernels of their own its {ops} ops would move about"
        f" {with_prefix(moved + inside, 'B')} · recomputed for the backward pass: {with_prefix(again, 'FLOP')}"
    )
    if graph.saved_bytes:
        yield f"  keeps {with_prefix(graph.saved_bytes, 'B')} for the backward pass"
    largest = sorted(kernels, key=lambda kernel: -(kernel.bytes_read + kernel.bytes_written))[:LARGEST]
    table = tabulate([_row(kernel) for kernel in largest], headers=_HEADERS, tablefmt="simple")
    yield from (f"  {line}" for line in table.splitlines())


_HEADERS = ("largest traffic", "kind", "ops", "read", "written", "at")


def _row(kernel: CompiledKernel) -> tuple[str, ...]:
    place = next((origin.source for origin in reversed(kernel.origins) if origin.source), None)
    return (
        kernel.name,
        kernel.kind,
        str(len(kernel.origins)),
        with_prefix(kernel.bytes_read, "B"),
        with_prefix(kernel.bytes_written, "B"),
        place or "",
    )


def _kept_inside(kernels: Iterable[CompiledKernel]) -> int:
    """Bytes of results that only the kernel itself reads. If its ops were kernels of their own, these would be written
    once and read once."""
    return sum(
        2 * max(0, sum(origin.result_bytes for origin in kernel.origins) - kernel.bytes_written)
        for kernel in kernels
        if kernel.kind == "triton"
    )
