"""What torch.compile made of a program: graphs, the kernels of each, and where and why a graph ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from flopmeter.records.costs import Region
from flopmeter.records.tensors import TensorSpec, growth

KernelKind = Literal["triton", "library", "template"]
"""Written by inductor; called as it is (cuBLAS, cuDNN, attention, sorts); or filled into a template of inductor's."""
GraphPass = Literal["inference", "forward", "backward"]


class Origin(NamedTuple):
    """One op of a compiled graph, as part of a kernel. An op that several kernels compute again is part of each."""

    op: str  # the program's own, before it was decomposed
    op_class: str
    flops_by_class: tuple[tuple[str, int], ...]
    transcendentals: int
    module: str  # path below the module that was compiled; '' outside of modules
    source: str | None  # 'file:line'
    result_bytes: int = 0
    is_recomputed: bool = False  # a forward op that the partitioner moved into the backward graph
    random_numbers: int = 0  # that it draws
    path: str = ""  # of its module, from the class of the outermost one in the graph on: for a function of no module

    def times(self, factor: Fraction) -> Origin:
        """The same op on so many times the elements."""
        return self._replace(
            flops_by_class=tuple((name, int(flops * factor)) for name, flops in self.flops_by_class),
            transcendentals=int(self.transcendentals * factor),
            result_bytes=int(self.result_bytes * factor),
            random_numbers=int(self.random_numbers * factor),
        )


@dataclass(frozen=True, slots=True, eq=False)
class CompiledKernel:
    """One kernel of a compiled graph, for one set of sizes. Regions count buffers of the graph by number."""

    name: str
    kind: KernelKind
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    origins: tuple[Origin, ...]
    scheduler_bytes: int  # read and written by inductor's estimate, which counts whole buffers for gathers and slices
    reduced: int = 1  # elements that each reduction of the kernel combines; 1: it reduces nothing
    rows: int = 1  # how many reductions there are
    is_inner: bool = False  # they combine neighbours in memory
    reads_again: bool = False  # what follows them reads what they have read
    instructions: int = 0  # of all its threads
    cached_bytes: int = 0  # of the L2 cache beyond `reads` and `writes`: looked up again, or added to atomically

    @property
    def bytes_read(self) -> int:
        return sum(region.nbytes for region in self.reads)

    @property
    def bytes_written(self) -> int:
        return sum(region.nbytes for region in self.writes)

    @property
    def flops(self) -> int:
        return sum(flops for origin in self.origins for _, flops in origin.flops_by_class)

    def with_tensors(self, change: Callable[[TensorSpec], TensorSpec]) -> CompiledKernel:
        """The kernel on other tensors. Of larger ones it does as much more as the largest has grown: more reductions
        where it writes more, else longer ones."""

        def of(region: Region) -> Region:
            if region.spec is None or (spec := change(region.spec)) == region.spec:
                return region
            return Region(spec, region.nbytes * spec.nbytes // max(region.spec.nbytes, 1))

        reads, writes = tuple(map(of, self.reads)), tuple(map(of, self.writes))
        if (reads, writes) == (self.reads, self.writes):
            return self
        on_read, on_written = (
            growth((before.spec, now.spec) for before, now in zip(old, new, strict=True) if before.spec and now.spec)
            for old, new in ((self.reads, reads), (self.writes, writes))
        )
        more = max(on_read, on_written)
        return replace(
            self,
            reads=reads,
            writes=writes,
            origins=tuple(origin.times(more) for origin in self.origins),
            scheduler_bytes=int(self.scheduler_bytes * more),
            rows=int(self.rows * on_written),
            reduced=self.reduced if self.reduced == 1 else int(self.reduced * more / on_written),
            instructions=int(self.instructions * more),
        )


class GraphBreak(NamedTuple):
    """Where Dynamo had to end a graph, and why."""

    reason: str  # torch's
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(slots=True, eq=False)
class CompiledGraph:
    """One graph that inductor compiled. It has the kernels of its first call, if sizes or values tell what they do.

    `calls` counts how often the program ran it.
    """

    number: int  # 0, 1, ... in the order of compilation
    function: str  # of the program: 'name (file:line)'
    part: GraphPass
    kernels: tuple[CompiledKernel, ...] = ()
    breaks: tuple[GraphBreak, ...] = ()  # that ended the function's graph; a backward graph has none
    recompiled_because: str | None = None  # the guard that failed; None: compiled for the first time
    replays: bool = False  # as a CUDA graph (mode='reduce-overhead')
    saved_bytes: int = 0  # of a forward graph: activations that it keeps for the backward graph
    calls: int = 0
    sizes: int = 0  # how many different sizes of its inputs it was run with
    uncounted: tuple[str, ...] = ()  # ops in Triton kernels that no rule covers


@dataclass(slots=True)
class Compilation:
    """What was compiled while a trace was made."""

    graphs: list[CompiledGraph] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # the graph of each call, by the call's number (`Op.graph`)
    failures: dict[str, None] = field(default_factory=dict)  # errors; their functions are fused by the rules

    def of(self, calls: Iterable[int | None]) -> Compilation:
        """The graphs of these calls only, each counted as often as it is called among them."""
        counts = Counter(self.calls[call] for call in set(calls) if call is not None)
        graphs = [replace(graph, calls=counts[graph.number]) for graph in self.graphs if graph.number in counts]
        return Compilation(graphs, self.calls, self.failures)
