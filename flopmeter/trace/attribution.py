"""Which phase, module and compiled region the op that arrives now belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flopmeter.records import BEFORE, Accumulation, BackwardPass, Phase, Trace
from flopmeter.torch_names.frames import callers
from flopmeter.torch_names.private import AccumulateGrad, autograd_node, graph_task, is_compiled_backward, node_count
from flopmeter.trace.module_paths import CompiledRegions, ModulePaths
from flopmeter.trace.subclasses import wrapped

StorageNumber = Callable[[Tensor, int, list[int]], int]
"""`flopmeter.trace.storages.Storages.number`."""


class Attribution:
    """Follows the program: its modules, its backward passes, its optimizer steps and its compiled regions."""

    def __init__(self, trace: Trace, modules: ModulePaths, number: StorageNumber) -> None:
        self._trace, self._modules, self._number = trace, modules, number
        # Optimizer steps that run, by the backward pass that each was called in and how many modules ran around it;
        # None: a closure that a step calls.
        self._steps: list[tuple[int, int] | None] = []
        self._creates_graph: tuple[int, bool] = (-1, False)  # of the last backward pass seen
        self._nodes = 0  # of autograd, when a backward pass or an optimizer's step began last
        self._compiled_region: Callable[[], int | None] | None = None  # None: nothing is compiled

    def watch_regions(self, compiled_region: Callable[[], int | None]) -> None:
        """Forget the regions so far and ask `compiled_region` from now on."""
        self._compiled_region, self._regions = compiled_region, CompiledRegions()

    def begin(self) -> None:
        """Recording begins. What autograd records from now on is for the next backward pass."""
        self._nodes = node_count()

    def enter_step(self) -> None:
        """An optimizer begins its step. What a checkpoint recorded when it ran again was for the pass before."""
        self._steps.append((graph_task(), self._modules.depth))
        self.begin()

    def leave_step(self) -> None:
        """An optimizer has made its step. There is none to forget if recording began inside of the step."""
        if self._steps:
            self._steps.pop()

    @contextmanager
    def outside_of_step(self) -> Iterator[None]:
        """A step calls a closure, which computes a loss and its gradients as if it were called before the step."""
        self._steps.append(None)
        try:
            yield
        finally:
            self.leave_step()

    def forget_steps(self) -> None:
        """Recording ends, perhaps inside of a step."""
        self._steps.clear()

    def is_in_step(self) -> bool:
        """Whether an optimizer makes its step now, outside of its closure and of any module that it calls."""
        return bool(self._steps) and self._steps[-1] == (graph_task(), self._modules.depth)

    def phase_and_module(self) -> tuple[Phase, str]:
        """The phase, and the path of the module that the op belongs to."""
        task = graph_task()
        if self.is_in_step():
            return "optimizer", ""
        if task == -1:
            return ("backward" if is_compiled_backward() else "forward"), self._modules.path
        if task != self._creates_graph[0]:
            self._creates_graph = (task, _creates_graph())
            recorded = node_count() - self._nodes
            self._trace.backward_passes.append(BackwardPass(len(self._trace.ops), recorded, self._creates_graph[1]))
            self.begin()
        recompute = torch.is_grad_enabled() and not self._creates_graph[1]
        return ("recompute" if recompute else "backward"), self._path_in_backward()

    def region(self, phase: Phase) -> int | None:
        """The compiled region of the op: the one that runs or, in the backward pass, the one whose forward made the
        autograd node. An optimizer that steps in a hook of the backward pass counts as what runs."""
        if self._compiled_region is None:
            return None
        running = self._compiled_region()
        if phase == "optimizer":
            return running
        if graph_task() == -1:
            self._regions.note(running)
            return running
        found = self._regions.of_node(autograd_node())
        return running if found is None else found

    def is_compiled(self) -> bool:
        """Whether the op belongs to a compiled region."""
        return self._compiled_region is not None and self.region(self.phase_and_module()[0]) is not None

    def is_inside(self) -> bool:
        """Whether a module or a compiled function runs."""
        return bool(self._modules.path) or (self._compiled_region is not None and self._compiled_region() is not None)

    def _path_in_backward(self) -> str:
        if self._modules.was_entered_in(graph_task()):  # a checkpoint computes it again
            return self._modules.path
        node, ops = autograd_node(), self._trace.ops
        if isinstance(node, AccumulateGrad):
            for variable in wrapped(node.variable):
                leaf = self._number(variable, BEFORE, [])
                self._trace.accumulations.append(Accumulation(len(ops), leaf))
        path = None if node is None else self._modules.path_of_node(node)
        if path is None:  # accumulation follows the op that made the gradient
            return ops[-1].module if ops else ""
        return path


def _creates_graph() -> bool:
    """Whether the running backward pass was called with create_graph=True. Then gradient mode is on in all of it; else
    gradient mode inside a backward pass means that a checkpoint recomputes."""
    for frame in callers():
        if frame.f_code.co_name == "_engine_run_backward":  # torch/autograd/graph.py
            arguments = frame.f_locals["args"]  # (grad_tensors, retain_graph, create_graph, inputs)
            return bool(arguments[2]) if len(arguments) > 2 else False
    return False
