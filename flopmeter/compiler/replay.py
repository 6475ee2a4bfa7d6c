"""Runs a compiled graph on meta tensors: allocates what inductor would allocate, records its kernels, and frees what it
would free."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flopmeter.compiler.known import Held, groups_in
from flopmeter.compiler.lowering import Lowered
from flopmeter.compiler.origins import origin_of
from flopmeter.compiler.placing import Placed
from flopmeter.compiler.plan import Constant, Plan, PlanStep, plan_of
from flopmeter.compiler.pricing import uncounted_in
from flopmeter.compiler.regions import Sizes
from flopmeter.known_values.assumptions import TORCH, caller
from flopmeter.records import Call, CompiledGraph, CompiledKernel, FlexBody, Origin, Phase
from flopmeter.torch_names.frames import callers, locals_of
from flopmeter.torch_names.private import is_compiled_backward, no_dispatch_modes
from flopmeter.trace.recorder import Recorder

_OPTIMIZERS = f"torch{os.sep}optim{os.sep}"


Owner = nn.Module | Optimizer | CodeType
"""The module or optimizer whose method a compiled function is, or calls; of a function of neither its code."""


class Replay:
    """What AOTAutograd calls in place of inductor's code, with a list of arguments that it may empty."""

    def __init__(
        self,
        lowered: Lowered,
        graph: CompiledGraph,
        recorder: Recorder,
        forget: Callable[[Tensor], None],
        meet: Callable[[Owner], None],
    ) -> None:
        self._lowered, self._graph, self._recorder, self._forget = lowered, graph, recorder, forget
        self._inputs = [(name, lowered.graph.graph_inputs[name]) for name in lowered.graph.graph_input_names]
        self._plans: dict[tuple[tuple[Any, int], ...], Plan] = {}
        self._paths = _Paths(recorder, meet)
        self._calls: dict[tuple[Call, FlexBody | None, tuple[int, ...] | None], Call] = {}

    def plan_for(self, inputs: Sequence[Any]) -> None:
        """Makes the plan for the sizes that the graph was traced with, while the program can still do without it."""
        with contextlib.suppress(_NoHintError):
            self._plan(tuple(sorted(self._symbols(inputs), key=str)))

    def __call__(self, args: list[Any]) -> list[Any]:
        plan = self._plan(tuple(sorted(self._symbols(args), key=str)))
        running = self._begin(plan, args)
        held: dict[str, Tensor] = dict(zip(plan.inputs, args, strict=True))
        held |= self._lowered.graph.constants
        args.clear()
        kernels, kept = [], self._kept(plan)
        for step in plan.steps:
            held |= self._allocated(step)
            held |= {placed.buffer: _laid_out(placed, held[name]) for placed, name in step.made.taken}
            if step.call is not None and (kernel := self._launch(step, held, running)):
                kernels.append(kernel)
            for name in step.frees:
                if name not in kept:
                    held.pop(name, None)
        results = [_result(output, held) for output in plan.outputs]
        self._paths.keep(self._graph, running.root, results)
        plan.known.hand_on(running.known, results, self._recorder.values)
        if self._graph.calls == 1:
            self._graph.kernels = tuple(kernels)
        if self._graph.part == "forward":
            self._graph.saved_bytes = self._saved_bytes(plan, results)
        return results

    def _begin(self, plan: Plan, args: list[Any]) -> _GraphCall:
        calls, values = self._recorder.trace.compilation.calls, self._recorder.values
        calls.append(self._graph.number)
        self._graph.calls += 1
        root, phase = self._paths.root(self._graph, args), self._phase(plan)
        known = plan.known.computed(args, values)
        return _GraphCall(len(calls) - 1, root, phase, _Sources(), known, plan.masks.bodies(known, values))

    def _allocated(self, step: PlanStep) -> dict[str, Tensor]:
        """What the step allocates, by name. Memory that it does not write itself, such as that of `torch.empty`, is
        born now, or the kernel that fills it would take it for what was there before the program."""
        allocated = {placed.buffer: _allocate(placed) for placed in step.made.allocated}
        if step.call is None:
            for tensor in allocated.values():
                self._recorder.note_new(tensor)
        return allocated

    def _launch(self, step: PlanStep, held: dict[str, Tensor], running: _GraphCall) -> CompiledKernel | None:
        """Record what the step runs. Gives its kernel, with what this call of the graph knows of it."""
        tensors = [held.get(name) for name in step.buffers]
        present = [_scratch() if tensor is None else tensor for tensor in tensors]
        written = step.written
        for number in written:
            self._forget(present[number])
        main, call = step.main, self._told(step, running.known, running.bodies)
        module = running.root if main is None else _module_path(running.root, main)
        is_again = step.kernel is not None and _is_recomputation(step.kernel.origins)
        phase: Phase = "recompute" if is_again else running.phase
        self._recorder.launch(call, present, module, phase, running.sources.of(main), running.number, written)
        return None if step.kernel is None else self._kernel(step.kernel, step, call)

    def _told(self, step: PlanStep, known: Held, bodies: Mapping[Any, FlexBody]) -> Call:
        """The step's call, with what this call of the graph knows of its work. Equal knowledge gives the same
        object."""
        assert step.call is not None
        body = bodies.get(step.depends)
        groups = None if step.depends is None else groups_in(known, step.depends, self._recorder.values)
        if body is None and groups is None:
            return step.call
        key = step.call, body, groups
        if key not in self._calls:
            self._calls[key] = replace(step.call, body=body, groups=groups)
        return self._calls[key]

    def _kernel(self, kernel: CompiledKernel, step: PlanStep, call: Call) -> CompiledKernel:
        """The step's kernel, with the FLOPs of a call that knows more than the plan does."""
        if call is step.call:
            return kernel
        own = replace(call, kwargs={name: value for name, value in call.kwargs.items() if value is not kernel})
        origin = origin_of(step.depends, own, is_backward=self._graph.part == "backward")
        return replace(kernel, origins=(origin, *kernel.origins[1:]))

    def _plan(self, symbols: tuple[tuple[Any, int], ...]) -> Plan:
        """The plan for these sizes."""
        plan = self._plans.get(symbols)
        if plan is None:
            is_backward = self._graph.part == "backward"
            plan = self._plans[symbols] = plan_of(
                self._lowered, Sizes(dict(symbols)), self._recorder, is_backward=is_backward
            )
            self._graph.sizes = len(self._plans)
            if not self._graph.kernels:
                self._graph.kernels, self._graph.uncounted = plan.kernels, uncounted_in(plan.written)
        return plan

    def _symbols(self, args: Sequence[Any]) -> Iterator[tuple[Any, int]]:
        """What the symbols in sizes stand for in this call."""
        known = set()
        for (_, held), value in zip(self._inputs, args, strict=True):
            numbers = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
            for expression, number in zip(_sizes_of(held), numbers, strict=False):
                if getattr(expression, "is_Symbol", False) and expression not in known:
                    known.add(expression)
                    yield expression, _number(number)

    def _saved_bytes(self, plan: Plan, results: list[Any]) -> int:
        """Bytes that the forward graph made and returns only for the backward graph."""
        user = {getattr(plan.outputs[number], "buffer", None) for number in self._lowered.user_outputs}
        made = set().union(*(step.made.names for step in plan.steps)) - user
        saved = {
            output.buffer: result.untyped_storage().nbytes()
            for output, result in zip(plan.outputs, results, strict=True)
            if isinstance(output, Placed) and output.buffer in made
        }
        return sum(saved.values())

    @staticmethod
    def _kept(plan: Plan) -> set[str]:
        outputs = (getattr(output, "buffer", output) for output in plan.outputs)
        return {name for name in outputs if isinstance(name, str)}

    def _phase(self, plan: Plan) -> Phase:
        if self._graph.part == "backward" or is_compiled_backward():
            return "backward"
        if self._recorder.is_in_step():
            return "optimizer"
        sources = [origin.source or "" for kernel in plan.kernels for origin in kernel.origins]
        is_step = sources and all(_OPTIMIZERS in source for source in sources)
        return "optimizer" if is_step else "forward"


def _is_recomputation(origins: tuple[Any, ...]) -> bool:
    return bool(origins) and all(origin.is_recomputed for origin in origins)


def _sizes_of(held: Any) -> tuple[Any, ...]:
    if not hasattr(held, "maybe_get_layout"):
        return (held,)
    layout = held.maybe_get_layout()  # none for an object, such as a process group
    return () if layout is None else (*layout.size, *layout.stride)


class _NoHintError(Exception):
    """A size of a traced tensor depends on values."""


def _number(size: Any) -> int:
    """A size in numbers; of a traced tensor, the one that it was traced with."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is None:
        raise _NoHintError
    return int(size.node.hint)


def _allocate(placed: Placed) -> Tensor:
    with no_dispatch_modes():
        return torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype, device=placed.device)


def _module_path(root: str, origin: Origin) -> str:
    """`root`: of the module whose method was compiled; '' where it was a function of none."""
    return ".".join(filter(None, (root, origin.module))) if root else origin.path


def _scratch() -> Tensor:
    """A tensor for a result that nobody reads."""
    with no_dispatch_modes():
        return torch.empty(0, device="meta")


def _result(output: Placed | str | Constant, held: dict[str, Tensor]) -> Any:
    if isinstance(output, Constant):
        return output.value
    return held[output] if isinstance(output, str) else _laid_out(output, held[output.buffer])


def _laid_out(output: Placed, tensor: Tensor) -> Tensor:
    """The result in the memory of a tensor."""
    same = (tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype)
    if same == (output.shape, output.stride, output.offset, output.dtype):
        return tensor
    with no_dispatch_modes(), torch.no_grad():
        seen: Any = torch.empty(0, dtype=output.dtype, device=tensor.device)
        return seen.set_(tensor.untyped_storage(), output.offset, output.shape, output.stride)


class _Sources:
    """The lines of the program behind one call of a graph. In a function of torch's own that the program compiles
    (flex_attention, an optimizer's step) Dynamo knows only torch's lines: then it is the line that called the
    function."""

    def __init__(self) -> None:
        self._caller: str | None = None

    def of(self, origin: Origin | None) -> str | None:
        if origin is None or not (origin.source or "").startswith(TORCH):
            return origin.source if origin else None
        self._caller = self._caller or caller()
        return self._caller


class _GraphCall(NamedTuple):
    """A call of a graph while it runs."""

    number: int
    root: str  # the path of the module that it belongs to
    phase: Phase
    sources: _Sources
    known: Held
    bodies: Mapping[Any, FlexBody]  # of flex_attention, by FX node


class _Paths:
    """The path of the module that a call of a graph belongs to. A backward graph belongs to the module in which its
    forward graph ran."""

    def __init__(self, recorder: Recorder, meet: Callable[[Owner], None]) -> None:
        self._recorder, self._meet = recorder, meet

    def root(self, graph: CompiledGraph, args: list[Any]) -> str:
        if graph.part == "backward" or is_compiled_backward():
            tensors = (value for value in args if isinstance(value, Tensor))
            known = (self._recorder.kept_by.get(value.untyped_storage()._cdata) for value in tensors)
            votes = Counter(path for path in known if path is not None)  # several layers may have kept one condition
            return votes.most_common(1)[0][0] if votes else ""
        return self._of_frame(graph)

    def keep(self, graph: CompiledGraph, root: str, results: list[Any]) -> None:
        if graph.part == "forward":
            for value in results:
                if isinstance(value, Tensor):
                    self._recorder.kept_by[value.untyped_storage()._cdata] = root

    def _of_frame(self, graph: CompiledGraph) -> str:
        """The path of the module whose method the program compiled, or that called the compiled function."""
        frame = next((frame for frame in callers() if graph.function == name_of(frame.f_code)), None)
        held = locals_of(frame) if frame else {}
        for value in held.values():
            if isinstance(value, Optimizer):
                self._recorder.roles.note_optimizer(value)
                self._meet(value)
        module = _whose_method(held)
        if module is not None:
            self._meet(module)
            return self._recorder.enter_compiled(module)
        if frame is not None and not self._recorder.is_in_step():
            for each in _modules_held(held):
                self._recorder.roles.note_module(each)
            self._meet(frame.f_code)
        return self._recorder.modules.path


def _whose_method(values: Mapping[str, Any]) -> nn.Module | None:
    """The module whose method has these local variables: the first one, or `self`, which Dynamo may pass in any place
    to the function that it makes of what follows a graph break."""
    first = next(iter(values.values()), None)
    return next((value for value in (first, values.get("self")) if isinstance(value, nn.Module)), None)


def _modules_held(values: Mapping[str, Any]) -> Iterator[nn.Module]:
    """The modules among these local variables, and among the attributes of `self`, which is none: `self.model`."""
    for value in (*values.values(), *getattr(values.get("self"), "__dict__", {}).values()):
        if isinstance(value, nn.Module):
            yield value


def name_of(code: CodeType) -> str:
    """'name (file:line)' of a function."""
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
