"""Other ways to launch the program: compiled, as one graph, as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flopmeter.launch.fusion import whole_program
from flopmeter.launch.modes import modes_beyond
from flopmeter.launch.templates import with_templates
from flopmeter.records import LaunchMode, Trace
from flopmeter.report.advice.passes import differentiates_gradients
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import in_templates
from flopmeter.report.quantities import counted, percent_of
from flopmeter.report.report import Report
from flopmeter.report.wins import LEAST_GAIN
from flopmeter.torch_names.operators import aten

# What is compiled has one backward pass: going through it again is an error (torch/_functorch/_aot_autograd/
# runtime_wrappers.py), while transforms of torch.func are traced into the forward graph.
_IN_ONE_PASS = (
    "with the inner gradients by torch.func.grad in what it compiles: through those of autograd.grad it raises"
)
_WORTH_MORE_TROUBLE = 1.03  # a less simple way has to be faster by this factor


@remedy
def another_mode(report: Report, trace: Trace) -> Iterator[Proposal]:
    """torch.compile and CUDA graphs."""
    best = _best_mode(report)
    if best is None:
        return
    mode, run = best
    how = mode.asked_by
    if mode.fuses and report.cluster is None and differentiates_gradients(trace):
        how += f", {_IN_ONE_PASS}"
    sizes = max((graph.sizes for graph in report.graphs), default=1)
    if mode.replays_graph and sizes > 1:
        how += f", if its inputs are padded to a few sizes: each is captured by itself ({sizes} so far)"
    yield Proposal(_why_in_mode(report, trace, mode), how, run, is_fault=False)


def _best_mode(report: Report) -> tuple[LaunchMode, Report] | None:
    """The fastest mode that the program could be run in, and the run. A graph cannot wait for values, nor hold the
    collectives of torch's wrappers. Compiled, these stay where the program has them, as inductor leaves them."""
    is_replayed = report.launches.mode.replays_graph
    waits = any(kernel.cost.blocks_host for kernel in report.kernels)
    cannot_be_graph = report.hardware.is_cpu or report.cluster is not None or waits
    best: tuple[LaunchMode, Report] | None = None
    compiled = report
    for mode in modes_beyond(report.mode):
        before = compiled if mode.fuses else report
        has_no_gaps = before.idle_seconds < LEAST_GAIN * before.seconds
        if mode.replays_graph > is_replayed and (cannot_be_graph or has_no_gaps):
            continue  # a graph wins only the time that the device waits for the host
        run = priced(report, mode=mode.name)
        compiled = run if mode.fuses else compiled
        if best is None or run.seconds * _WORTH_MORE_TROUBLE < best[1].seconds:
            best = mode, run
    return best


def _why_in_mode(report: Report, trace: Trace, mode: LaunchMode) -> str:
    idle = percent_of(report.idle_seconds, report.seconds)
    why = "each op's result goes to memory and back"
    if idle > 50 or not mode.fuses:
        why = f"the device waits for the host for {idle:.0f} % of the wall-clock"
    elif mode.replays_graph > report.launches.mode.replays_graph:
        why += ", and the host takes too long for what compiling leaves"
    if report.cluster is not None:
        why += " (collectives stay where they are)"
    if mode.fuses and _multiplies_int8_weights(trace):
        why += (
            "; for weights cast from int8 inductor may take _weight_int8pack_mm, which gives each output to one thread"
            " and is many times slower than the product now: a run with torch.compile tells which"
        )
    return why


def _multiplies_int8_weights(trace: Trace) -> bool:
    """Whether products in bf16 take weights that were int8 (torch/_inductor/fx_passes/quantization.py has the patterns
    of `_register_woq_lowerings`, which depend on views that no rule follows)."""
    cast = set[int]()
    for op in trace.ops:
        types = [spec.dtype for spec in (*op.inputs[:1], *op.outputs[:1])]
        if op.packet is aten._to_copy and types == [torch.int8, torch.bfloat16]:
            cast.add(op.outputs[0].storage)
        elif op.packet in (aten.mm, aten.bmm) and op.inputs[1].storage in cast:
            return True
    return False


@remedy
def one_graph(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The program marks several regions with torch.compile, or breaks its graph between them."""
    regions = {kernel.op.region for kernel in report.kernels}
    graphs = {graph for graph in report.launches.graphs if graph is not None}
    is_marked = bool(report.graphs) or regions != {None}
    if not report.launches.mode.fuses or not is_marked or report.cluster is not None:
        return
    then = priced(report, widened="one graph")
    if len({graph for graph in then.launches.graphs if graph is not None}) >= len(graphs):
        return
    why = f"{len(graphs)} calls of compiled graphs, each with its checks, and nothing fuses across their ends"
    is_whole = bool(report.graphs) and not any(graph.breaks for graph in report.graphs)
    how = (
        "torch.compile on what makes these calls"
        if is_whole
        else "torch.compile(model, fullgraph=True) names what breaks it"
    )
    yield Proposal(why, f"compile it as one: {how}", then)


@remedy
def the_rest_eagerly(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The program compiles parts of its model, as code with flex_attention does, and runs the others eagerly, or as it
    captured them in a CUDA graph."""
    eager = {
        id(kernel.op)
        for kernel, graph in zip(report.kernels, report.launches.graphs, strict=True)
        if (graph is None or (kernel.op.is_replayed and kernel.op.graph is None))
        and whole_program(kernel.op) is not None
    }
    if not report.launches.mode.fuses or not eager or all(kernel.op.graph is None for kernel in report.kernels):
        return
    then = priced(report, widened="the rest too")
    why = "they run eagerly beside what is compiled, and each op's result goes to memory and back"
    what = counted(len(eager), "kernel")
    yield Proposal(why, "torch.compile on these, too", then, lambda kernel: id(kernel.op) in eager, what)


@remedy
def uncompiled_flex_attention(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Eager calls of flex_attention, whose one kernel exists only compiled: torch runs them op by op over the whole
    matrix of scores. The rest may stay eager."""
    inside = in_templates(trace)
    if inside and not report.launches.mode.fuses:
        yield Proposal(
            "outside of torch.compile it writes the whole matrix of scores, and reads it",
            "torch.compile(flex_attention), which is one kernel",
            priced(report, with_templates(trace)),
            of_ops(trace, inside),
        )
