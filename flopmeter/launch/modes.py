"""The ways to run one program: eagerly, compiled, or replayed as CUDA graphs, and what each costs the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Literal

from flopmeter.launch.checkpoints import hooked_checkpoints
from flopmeter.launch.fusion import (
    CompiledRegion,
    fuse,
    graphs_of,
    numbered,
    padded,
    pass_of,
    tensors_of,
    whole_program,
)
from flopmeter.launch.stream_assignment import assign_streams
from flopmeter.records import Cost, Kernel, Launches, LaunchMode, Nodes, Op, Trace

# Host time of one call of a compiled graph, in seconds: Dynamo's lookup, the frames of AOTAutograd and of inductor's
# wrapper. For each tensor that goes in or out: its guards, the wrappers' lists, the check of its sizes or its
# allocation, autograd's bookkeeping. Timed on a CPU with torch 2.13, by functions of 2 to 128 tensors of four elements:
# 20 µs and .7 for each without autograd, 40 and .8 forward, 55 and 1.2 backward. A view took .85 µs there.
CALL_SECONDS = 40e-6
TENSOR_SECONDS = 0.8e-6

# The checks of CUDA graph trees before a replay, and the launch of the graph itself. One call taken apart in
# github.com/pytorch/pytorch/issues/150488, in which guards took another 176 µs.
GRAPH_CHECK_SECONDS = 128e-6
GRAPH_LAUNCH_SECONDS = 41e-6

# Least time from one kernel of a replayed graph to the next, on the device, in seconds: 1.1 to 1.3 µs
# (github.com/pytorch/pytorch/issues/161104, an add of 1024 floats; gpu-small-kernels has 1.3 on A100 and H200).
GRAPH_NODE_SECONDS = 1.2e-6

Mode = Literal["eager", "compiled", "cudagraph", "eager-cudagraph"]
"""What callers write: the keys of `MODES`."""

Widened = Literal["as marked", "one graph", "the rest too"]
"""What is compiled of a program that calls torch.compile: what it marks; this as one graph; or the other ops, too, but
the optimizer's."""

ALL_MODES = (
    LaunchMode("eager", "eager", "", has_graphs=False, fuses=False, replays_graph=False),
    LaunchMode(
        "compiled", "torch.compile", "torch.compile",
        has_graphs=True, fuses=True, replays_graph=False, graph_call_seconds=CALL_SECONDS,
        graph_tensor_seconds=TENSOR_SECONDS,
    ),
    LaunchMode(
        "cudagraph", "torch.compile, replayed as CUDA graphs (mode='reduce-overhead')",
        "torch.compile(mode='reduce-overhead')",
        has_graphs=True, fuses=True, replays_graph=True,
        graph_call_seconds=CALL_SECONDS + GRAPH_CHECK_SECONDS + GRAPH_LAUNCH_SECONDS,
        graph_tensor_seconds=TENSOR_SECONDS, node_seconds=GRAPH_NODE_SECONDS,
    ),
    LaunchMode(
        "eager-cudagraph", "eager kernels, replayed as CUDA graphs", "replay it as a CUDA graph (torch.cuda.graph)",
        has_graphs=True, fuses=False, replays_graph=True,
        graph_call_seconds=GRAPH_LAUNCH_SECONDS, node_seconds=GRAPH_NODE_SECONDS,
    ),
)  # fmt: skip
MODES: Mapping[str, LaunchMode] = {mode.name: mode for mode in ALL_MODES}


def mode_called(name: object, error: type[ValueError] = ValueError) -> LaunchMode:
    """The mode of that name. Raises the error for an unknown name, whatever type it has."""
    if not isinstance(name, str) or name not in MODES:
        raise error(f"unknown mode {name!r}; known: {', '.join(MODES)}")
    return MODES[name]


def modes_beyond(name: str) -> list[LaunchMode]:
    """The modes that do all that this one does and more, the simplest first."""
    own = MODES[name]
    more = [
        mode
        for mode in ALL_MODES
        if mode is not own and mode.fuses >= own.fuses and mode.replays_graph >= own.replays_graph
    ]
    return sorted(more, key=lambda mode: mode.fuses + mode.replays_graph)


def compiled_region(ops: Iterable[Op], widened: Widened = "as marked") -> CompiledRegion:
    """What counts as compiled: what runs under torch.compile, or the whole program if it does not use that."""
    if widened == "one graph" or all(op.region is None for op in ops):
        return whole_program
    return _marked(widened)


def _marked(widened: Widened) -> CompiledRegion:
    """Grouped by the regions that the program marks."""
    if widened == "the rest too":
        return lambda op: whole_program(op) if op.region is None else op.region
    return lambda op: op.region


def mode_of(trace: Trace) -> Mode:
    """The mode in which the program itself ran: compiled if it called torch.compile, CUDA graphs if it asked for
    them."""
    graphs = trace.compilation.graphs
    if graphs:
        return "cudagraph" if all(graph.replays for graph in graphs) else "compiled"
    marked = [op for op in trace.ops if op.region is not None]
    if trace.compilation.failures and not all(op.is_replayed for op in marked):
        return "compiled"
    return "eager-cudagraph" if any(op.is_replayed for op in marked) else "eager"


def launches(
    kernels: list[Kernel],
    trace: Trace,
    mode: LaunchMode,
    region: CompiledRegion = whole_program,
    *,
    widened: Widened = "as marked",
) -> Launches:
    """The kernels of a trace as the mode launches them. `region` marks what is compiled or captured by the rules; what
    the compiler compiled keeps its kernels, and as one graph its consecutive calls are merged.

    Raises ValueError where the mode is an eager one and the program ran compiled.
    """
    if trace.compilation.graphs:
        run = _as_compiled(kernels, trace, mode, widened)
    elif not mode.has_graphs:
        run = Launches(kernels, [None] * len(kernels), mode, assign_streams(kernels, trace))
    else:
        made, lives = fuse(kernels, trace, region=region) if mode.fuses else (kernels, None)
        graphs = graphs_of(made, region, is_traced=mode.fuses)
        run = _launched(made, graphs, mode, trace)._replace(lives=lives)
    return run._replace(nodes=_nodes(kernels, trace))


def _nodes(kernels: list[Kernel], trace: Trace) -> Nodes:
    """Which nodes an op of the backward pass belongs to is not known, so that all of these bear the same part.
    Inference outside of torch.no_grad() records for no backward pass."""
    recorded = sum(each.nodes for each in trace.backward_passes or trace.forward_ends)
    if not recorded:
        return Nodes()
    phases = Counter(kernel.op.phase for kernel in kernels)
    again = max(1, phases["recompute"])
    checkpoints, saved = hooked_checkpoints(trace) if phases["recompute"] else (0, 0.0)
    return Nodes(
        recorded / max(1, phases["forward"]), recorded / max(1, phases["backward"]), checkpoints / again, saved / again
    )


def _launched(made: list[Kernel], graphs: list[int | None], mode: LaunchMode, trace: Trace) -> Launches:
    """Each replay of a graph that the program captured is one graph, whatever passes ran in it, and whatever the mode
    of the rest."""
    numbers, first = list(graphs), dict[int | None, int]()
    free = count(1 + max((number for number in graphs if number is not None), default=-1))
    for place, kernel in enumerate(made):
        if kernel.op.is_replayed:
            number = graphs[place]
            numbers[place] = first.setdefault(kernel.op.region, next(free) if number is None else number)
    captured = dict.fromkeys(first.values(), MODES["eager-cudagraph"])
    by_rules = {place for place, kernel in enumerate(made) if graphs[place] is not None and kernel.op.graph is None}
    placements = assign_streams(made, trace, by_rules if mode.fuses else ())
    return Launches(made, numbers, mode, placements, captured, tensors_of(made, numbers) if mode.fuses else None)


def _as_compiled(kernels: list[Kernel], trace: Trace, mode: LaunchMode, widened: Widened) -> Launches:
    """Inductor's kernels are its own; functions that it could not compile are fused by the rules. A graph that the
    program captured replays what it captured."""
    if not mode.fuses:
        raise ValueError(
            f"the program compiled itself, so its {mode.name} run was not metered: meter it with "
            "FlopMeter(compile='rules'), which runs compiled functions eagerly and fuses them by rules"
        )
    marked = _marked(widened)
    is_whole = widened == "the rest too"  # then what a captured graph replays is compiled before it is captured
    by_rules: CompiledRegion = (  # noqa: E731
        lambda op: None if op.graph is not None or (op.is_replayed and not is_whole) else marked(op)
    )
    made, lives = fuse(kernels, trace, region=by_rules)
    known: dict[Cost, Cost] = {}
    made = [kernel if kernel.op.graph is None else kernel._replace(cost=padded(kernel, known)) for kernel in made]
    numbers = graphs_of(made, by_rules)
    first = 1 + max((number for number in numbers if number is not None), default=-1)
    call_of = _calls_joined(made) if widened == "one graph" else {}
    graphs = [
        number if kernel.op.graph is None else first + call_of.get(kernel.op.graph, kernel.op.graph)
        for kernel, number in zip(made, numbers, strict=True)
    ]
    if widened == "the rest too":  # one function holds all: its graphs end at an eager kernel and at another pass
        graphs = numbered(
            None if graph is None else pass_of(kernel.op) for kernel, graph in zip(made, graphs, strict=True)
        )
    return _launched(made, graphs, mode, trace)._replace(lives=lives)


def _calls_joined(kernels: list[Kernel]) -> dict[int, int]:
    """For each call of a compiled graph the first call of its run: calls of one phase with no eager kernel between
    them, each of which reads what the calls before have made (another batch does not)."""
    made, read = defaultdict[int | None, set[int]](set), defaultdict[int | None, set[int]](set)
    for op in (kernel.op for kernel in kernels):
        read[op.graph].update(op.reads)
        made[op.graph].update(op.makes)
    joined: dict[int, int] = {}
    previous: Op | None = None
    of_run: set[int] = set()
    for op in (kernel.op for kernel in kernels):
        if op.graph is not None and op.graph not in joined:
            before = previous.graph if previous is not None and previous.phase == op.phase else None
            goes_on = not of_run.isdisjoint(read[op.graph])
            joined[op.graph] = op.graph if before is None or not goes_on else joined[before]
            of_run = made[op.graph] | (of_run if joined[op.graph] != op.graph else set())
        previous = op
    return joined
