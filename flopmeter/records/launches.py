"""What a mode launches: kernels, the graphs that they belong to, and the streams that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.records.costs import Cost
from flopmeter.records.ops import Op


class Kernel(NamedTuple):
    """One launch on the device: the ops that it runs (one in eager mode) and what it costs."""

    ops: tuple[Op, ...]
    cost: Cost
    views: int  # views and other ops without a kernel that the host ran since the previous kernel
    module_calls: int  # that the host made since the previous kernel; a parameter of an optimizer counts as one
    dtensor_ops: float = 0.0  # ops on DTensors since the previous kernel, whose own ops are counted beside them

    @property
    def op(self) -> Op:
        """The op that stands for the kernel: its only one, or the first of a fused kernel's. All of these belong to one
        graph, so to one compiled region and to one pass."""
        return self.ops[0]


class Placement(NamedTuple):
    """The stream of a kernel, and what it waits for."""

    stream: int  # 0 is the default one; process groups have numbers below 0
    after: tuple[int, ...]  # indices of kernels on other streams that have to end before
    batch: int | None = None  # kernels of a stream with the same number run as one: messages that go together


class Life(NamedTuple):
    """The life of a block of memory. `born`: the index of the op before which it was taken; `died`: that of the op
    before which it was given back, None: not before the end."""

    nbytes: int
    born: int
    died: int | None


class LaunchMode(NamedTuple):
    """How the kernels of a graph are made and launched. Kernels outside of graphs run eagerly in every mode."""

    name: str
    title: str
    asked_by: str  # what a program does to run so
    has_graphs: bool  # False: everything is launched op by op
    fuses: bool  # the kernels are those of fuse()
    replays_graph: bool  # the host launches a graph, not each of its kernels
    graph_call_seconds: float = 0.0  # on the host: once for each graph
    graph_tensor_seconds: float = 0.0  # on the host: for each tensor that a graph takes or returns
    node_seconds: float = 0.0  # on the device: the least time of each kernel of a graph


class Nodes(NamedTuple):
    """How many nodes of autograd there are for each kernel of a forward pass, and for each of a backward pass; how many
    checkpoints with hooks run again, and tensors that these save, for each kernel that runs again."""

    of_forward: float = 0.0
    of_backward: float = 0.0
    checkpoints: float = 0.0
    saved: float = 0.0


class Launches(NamedTuple):
    """What the device runs in one mode."""

    kernels: list[Kernel]
    graphs: list[int | None]  # of each kernel; None: launched eagerly
    mode: LaunchMode
    placements: list[Placement] | None = None  # None: all on one stream
    captured: Mapping[int, LaunchMode] | None = None  # how graphs run that the program captured itself
    tensors: Mapping[int, int] | None = None  # how many each graph takes and returns; None: no graph is compiled
    repeats: bool = False  # one turn of a loop that does not wait for the device: the turn before may still be running
    # By storage, where they differ from the trace's; None: never in memory. Storages below 0 are not in the trace.
    lives: Mapping[int, Life | None] | None = None
    nodes: Nodes = Nodes()

    def mode_of(self, graph: int) -> LaunchMode:
        return (self.captured or {}).get(graph, self.mode)
