"""Runs a program under a TorchDispatchMode and records its aten ops. Knows no FLOPs and no hardware.

The recorder must not change what it records. It keeps no tensor alive: if it kept an output, autograd would copy
gradients that it otherwise adds in place (38 ops instead of 31 in a small net).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.compiler import is_exporting
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.known_values import KnownValues
from flopmeter.known_values.assumptions import caller
from flopmeter.records import (
    BEFORE,
    DEFAULT_STREAM,
    Call,
    FlexBody,
    Op,
    OptimizerStep,
    Phase,
    StorageRole,
    Switches,
    TemplateRun,
    Trace,
    TritonBody,
)
from flopmeter.records.memory_format import torch_strides
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.private import DispatchKey, dispatch_mode_stack, graph_task
from flopmeter.trace import higher_order, mixed_devices, streams, triton_kernels
from flopmeter.trace.attribution import Attribution
from flopmeter.trace.flex_attention import template_of
from flopmeter.trace.gradients import IN_PLACE, without_a_mode
from flopmeter.trace.handling import FRESH, Handling, Handlings
from flopmeter.trace.implementations import body_of, key_of_parts, python_key, told_of_kernels
from flopmeter.trace.mode_flags import tell_modes
from flopmeter.trace.module_paths import ModulePaths
from flopmeter.trace.process_groups import ProcessGroups, without_handles
from flopmeter.trace.result_cache import (
    ResultMaker,
    is_dense_meta,
    once_for_each_geometry,
    reaches_kernel_directly,
    result_maker,
)
from flopmeter.trace.shapes_only import ShapesOnly
from flopmeter.trace.storages import StorageListener, Storages
from flopmeter.trace.subclasses import is_plain, wrapped
from flopmeter.trace.tensor_specs import build_call, has_strides, hashable, unstrided_spec

_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class _Known(NamedTuple):
    """The record of a call, and how to make its result without running it."""

    call: Call
    make_result: ResultMaker | None
    counts: bool  # its results have few integers, for which something stands in where the program may read unknowns


class _Arrival:
    """A call as it arrives: its tensors in order, the addresses of their storages, and their numbers in this call."""

    __slots__ = (
        "addresses", "args", "body", "func", "groups", "handling", "key", "known", "kwargs", "numbers", "plain_args",
        "plain_kwargs", "tensors",
    )  # fmt: skip
    key: Any  # what tells calls of different cost apart
    known: _Known | None

    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], handling: Handling):
        self.func, self.args, self.kwargs, self.handling = func, args, kwargs, handling
        self.plain_args, self.plain_kwargs = args, kwargs  # for the record
        self.tensors: list[Tensor] = []  # of the arguments
        self.addresses: list[int] = []
        self.numbers: dict[int, int] = {}  # trace-wide number -> number in the call
        self.groups: tuple[int, ...] | None = None
        self.body: FlexBody | TritonBody | None = None


class Recorder(TorchDispatchMode):
    """The dispatch mode: appends one Op to `trace` for each aten call that reaches a kernel."""

    supports_higher_order_operators = True

    def __init__(
        self,
        *,
        source: bool = False,
        overrides: Mapping[OpOverload, Callable[..., Any]] | None = None,
        values: KnownValues | None = None,
        on_new_call: Callable[[Call], None] | None = None,
        storage_listener: StorageListener | None = None,
        shapes_only: ShapesOnly | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_new_call = on_new_call
        self.trace = Trace(switches=switches_now())
        self._shapes_only = shapes_only or ShapesOnly()
        self._has_host = shapes_only is not None  # a script's: what it computes on the CPU costs the same at any place
        listener = storage_listener or StorageListener()
        self._storages = Storages(self.trace, listener, self._shapes_only, lambda: self._attribution.is_inside())
        self._number = self._storages.number  # asked for every tensor
        self.modules = ModulePaths(self._note_module, self.is_on)
        self._attribution = Attribution(self.trace, self.modules, self._number)
        self._source = source
        self._overrides = overrides or {}
        self.values = values
        if values is not None:
            values.on_new = self._storages.note_new
        self._cells: Mapping[int, Any] = values.values.cells if values else {}  # what values are known of
        self._calls: dict[Any, _Known] = {}
        self._handlings = Handlings(values)
        self._groups = ProcessGroups()
        self._listener = streams.Listener(self.trace, self._groups.op_of, self._storages.resize)
        self.kept_by: dict[int, str] = {}  # by storage: the module path of the compiled graph that returned it
        self._depth = 0
        self._undo: ExitStack  # of what entering did

    def watch_regions(self, compiled_region: Callable[[], int | None]) -> None:
        """From now on ops get the number of the compiled region that runs, which `compiled_region` returns."""
        self._attribution.watch_regions(compiled_region)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would guard `__torch_dispatch__` against compilation, which costs about a microsecond an op.
        Dynamo does not trace into a mode that ignores compilation, so no guard is needed."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile may compile while the recorder is on; the recorder does not see the compiler's own ops."""
        return True

    def __enter__(self) -> Recorder:
        if self._depth == 0:  # else the recorder is on, and entered again to run a composite
            with ExitStack() as undo:
                undo.enter_context(self.modules)
                undo.enter_context(triton_kernels.recorded(self, self.values))
                undo.enter_context(told_of_kernels(self._handlings.clear))
                undo.callback(register_optimizer_step_pre_hook(self._enter_step).remove)
                undo.callback(register_optimizer_step_post_hook(self._leave_step).remove)
                streams.listeners.append(self._listener)
                undo.callback(streams.listeners.remove, self._listener)
                self._undo = undo.pop_all()
        super().__enter__()  # type: ignore[no-untyped-call]
        if self._depth == 0:
            tell_modes()
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._depth -= 1
        if self._depth == 0:
            tell_modes()
            self._undo.close()
            self._attribution.forget_steps()
            self._storages.outlive()
            self._calls.clear()  # the keys are as large as the calls
            self._groups.clear()

    def is_on(self) -> bool:
        """Whether this thread's ops come here: a mode belongs to the thread that entered it, and to the
        threads in which autograd runs its backward passes. None comes while torch.export reads the program."""
        return not is_exporting() and self in dispatch_mode_stack()

    def launch(
        self,
        call: Call,
        tensors: Sequence[Tensor],
        module: str,
        phase: Phase,
        source: str | None,
        graph: int,
        written: Collection[int],
    ) -> None:
        """Record a kernel of a compiled graph. `tensors` are of the storages of the call, by number; one of those
        `written` that no op has touched before is born here. `graph` is the number of the graph's call."""
        trace = self.trace
        numbers = tuple(
            self._number(tensor, len(trace.ops) if number in written else BEFORE, [])
            for number, tensor in enumerate(tensors)
        )
        for tensor in tensors:
            trace.devices.setdefault("meta" if tensor.is_meta else tensor.device.type)
        self._append(Op(call, numbers, module, phase, source if self._source else None, None, graph))
        if self._on_new_call is not None:
            self._on_new_call(call)

    def is_in_step(self) -> bool:
        """Whether an optimizer makes its step now."""
        return self._attribution.is_in_step()

    def number_of(self, tensor: Tensor) -> int:
        """The number in the trace of the tensor's storage, while the recorder is on."""
        return self._number(tensor, BEFORE, [])

    def with_implementation(self, call: Call) -> Call:
        """The call with what its op runs, where that is a custom op in Python."""
        key = python_key(call.func)
        if key is None:
            return call
        return dataclasses.replace(call, body=body_of(call, key, Recorder(overrides=self._overrides)))

    def _enter_step(self, *_: Any) -> None:
        if self.is_on():
            self._attribution.enter_step()

    def _leave_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_on():
            return
        self._attribution.leave_step()
        self.trace.optimizer_steps.append(OptimizerStep(len(self.trace.ops), "fused" in optimizer.defaults))
        self.note_optimizer(optimizer)

    @contextmanager
    def in_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The step of an optimizer whose hooks no one calls."""
        self._enter_step()
        try:
            yield
        finally:
            self._attribution.leave_step()
            self.note_optimizer(optimizer)

    def note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note which tensors are parameters, gradients and optimizer state."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._note_parameter(parameter)
        for tensor in tensors_in(optimizer.state):
            self._note(tensor, "optimizer state")

    def _note_module(self, module: nn.Module) -> None:
        """When an outermost module is left, its tensors are noted: no op may have touched them, and those that the
        module made late exist by then."""
        if graph_task() == -1:  # else a checkpoint recomputes
            self.trace.forward_ends.append(len(self.trace.ops))
        # as torch defines it: a module may have an attribute of that name (that of Megatron-LM around a model does)
        for parameter in (*module.parameters(), *nn.Module.buffers(module)):
            self._note_parameter(parameter)

    def enter_compiled(self, module: nn.Module) -> str:
        """The path of a module that runs compiled; no hook sees such a module."""
        self._note_module(module)
        return self.modules.path_of(module)

    def _note_parameter(self, parameter: Tensor) -> None:
        self._note(parameter, "parameters")
        if parameter.is_leaf and parameter.grad is not None:
            self._note(parameter.grad, "gradients")

    def _note(self, tensor: Tensor, role: StorageRole) -> None:
        for inner in wrapped(tensor):
            self._storages.note(inner, role)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_exporting():  # the program is read, and does not run
            return func(*args, **(kwargs or {}))
        for kind in types:
            if not is_plain(kind):
                return NotImplemented  # let the subclass (DTensor, ...) run; its inner ops come back here
        kwargs = kwargs or {}
        handling = self._handlings[func]
        if handling.is_host:
            return self._open(func, args, kwargs) if isinstance(func, HigherOrderOperator) else func(*args, **kwargs)
        if self._shapes_only.covers(args, kwargs):
            return self._shapes_only.run(func, args, kwargs)
        if handling.is_composite and all(has_strides(tensor) for tensor in tensors_in(args)):
            with self:
                override = self._overrides.get(func)
                # The C++ composite itself; `func.decompose` would prefer Python re-writes of some of them.
                return override(*args, **kwargs) if override else func._op_dk(_COMPOSITE, *args, **kwargs)
        if handling.has_parts and all(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            key = key_of_parts(func)  # asked again: where a library is gone, so is its function
            if key is not None:
                with self:
                    return func._op_dk(key, *args, **kwargs)
        if func in IN_PLACE:
            func, args = without_a_mode(func, args, self.trace.ops, self.number_of)
            handling = self._handlings[func]
        try:
            arrival = self._meet(func, args, kwargs, handling)
        except RuntimeError:
            if any(is_lazy(tensor) for tensor in tensors_in((args, kwargs))):
                return func(*args, **kwargs)  # an nn.LazyLinear that has met no batch: nothing to count
            raise
        make = arrival.known and arrival.known.make_result
        if make is not None and (types or not reaches_kernel_directly()):
            make = None
        if handling.asks_values or not self._cells.keys().isdisjoint(arrival.addresses):
            arrival, result = self._ask_values(arrival, make)
        else:
            result = self._run(arrival) if make is None else make(arrival.tensors)
        self._record(arrival, result)
        return result

    def _open(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        template = template_of(func, args, kwargs, self.values)
        if template is None:
            with self:
                return higher_order.run(func, args, kwargs)
        if self._attribution.is_compiled():
            return template.to_eager(self.record_kernel(template.func, template.args, template.body))
        start = len(self.trace.ops)
        arrival = self._meet_kernel(template.func, template.args, template.body)
        with self:
            result = higher_order.run(func, args, kwargs)
        launched = self._op(arrival, template.from_eager(result))
        self.trace.templates.append(TemplateRun(start, len(self.trace.ops), launched))
        return result

    def record_kernel(self, func: OpOverload, args: tuple[Any, ...], body: FlexBody | TritonBody) -> Any:
        """Run and record an operator of flopmeter's own that stands for a generated kernel; this mode must be off."""
        arrival = self._meet_kernel(func, args, body)
        result = func(*args)
        self._record(arrival, result)
        return result

    def _meet_kernel(self, func: OpOverload, args: tuple[Any, ...], body: FlexBody | TritonBody) -> _Arrival:
        arrival = self._meet(func, args, {}, self._handlings[func])
        arrival.body = body
        self._look_up(arrival, (arrival.key, body))
        return arrival

    def _meet(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], handling: Handling) -> _Arrival:
        arrival = _Arrival(func, args, kwargs, handling)
        if handling.is_collective:
            arrival.plain_args = args = self._groups.plain_args(func, args)
            arrival.plain_kwargs = kwargs = self._groups.plain_kwargs(kwargs)
        key: list[Any] = [func, torch.get_default_dtype()]  # the quotient of integers is a float of that type
        self._describe(args, arrival, BEFORE, key)
        if kwargs:
            key += kwargs
            self._describe(kwargs.values(), arrival, BEFORE, key)
        self._look_up(arrival, tuple(key))
        return arrival

    def _look_up(self, arrival: _Arrival, key: Any) -> None:
        try:
            known = self._calls.get(key)
        except (TypeError, NotImplementedError):  # some sizes are symbols; a TorchBind object cannot be compared
            key = hashable(key, arrival.func)
            known = self._calls.get(key)
        arrival.key, arrival.known = key, known

    def _ask_values(self, arrival: _Arrival, make: ResultMaker | None) -> tuple[_Arrival, Any]:
        """The call that really ran, which may be another one, and its result, which `make` gives without running it."""
        assert self.values is not None
        func, args, kwargs = arrival.func, arrival.args, arrival.kwargs
        kernel = self._kernel(arrival) if make is None else lambda *_, **__: make(arrival.tensors)
        try:
            result = self.values.run(func, args, kwargs, arrival.tensors, arrival.addresses, kernel)
        except RuntimeError as error:
            self._explain(error, arrival)
            raise
        for func, args, kwargs in self.values.ran:  # in place of the call
            arrival = self._meet(func, args, kwargs, self._handlings[func])
        if self.values.groups is not None:
            arrival.groups = self.values.groups
            self._look_up(arrival, (arrival.key, arrival.groups))
        return arrival, result

    def _kernel(self, arrival: _Arrival) -> Callable[..., Any] | None:
        """The function that runs in place of the op, if there is one."""
        if arrival.handling.is_foreach and reaches_kernel_directly() and all(map(is_dense_meta, arrival.tensors)):
            return functools.partial(once_for_each_geometry, arrival.func)
        return self._overrides.get(arrival.func)

    def _run(self, arrival: _Arrival) -> Any:
        try:
            return (self._kernel(arrival) or arrival.func)(*arrival.args, **arrival.kwargs)
        except RuntimeError as error:
            self._explain(error, arrival)
            raise

    def _explain(self, error: RuntimeError, arrival: _Arrival) -> None:
        explained = mixed_devices.explain(arrival.func, arrival.tensors, self.modules.outermost)
        if explained is not None and type(error) is RuntimeError:
            raise explained from None  # torch says less, in fifty lines

    def _record(self, arrival: _Arrival, result: Any) -> None:
        self._append(self._op(arrival, result))

    def _append(self, op: Op) -> None:
        trace = self.trace
        trace.module_calls.append(self.modules.calls)
        if streams.current() != DEFAULT_STREAM:
            trace.stream_use.streams[len(trace.ops)] = streams.current()
        trace.ops.append(op)

    def _op(self, arrival: _Arrival, result: Any) -> Op:
        trace, numbers = self.trace, arrival.numbers
        if arrival.handling.is_collective:
            self._groups.note_work(result, len(trace.ops))
            result = without_handles(result)
        if isinstance(result, Tensor) and not arrival.handling.shape_depends_on_data:  # nearly always
            numbers.setdefault(self._number(result, len(trace.ops), arrival.addresses), len(numbers))
        else:
            self._describe_result(arrival, result)
        known = arrival.known
        if known is None:
            known = self._calls[arrival.key] = self._first(arrival, result)
        if known.counts and self.values is not None:
            self.values.keep_stand_ins(result)
        if arrival.handling.changes_storages:
            self._note_changes(arrival.func, tuple(tensors_in((*arrival.tensors, result))))
        phase, module = self._attribution.phase_and_module()
        source = caller() if self._source else None
        return Op(known.call, tuple(numbers), module, phase, source, self._attribution.region(phase))

    def _describe_result(self, arrival: _Arrival, result: Any) -> None:
        arguments = len(arrival.tensors)
        described: list[Any] = []
        self._describe((result,), arrival, len(self.trace.ops), described)
        del arrival.tensors[arguments:]
        if arrival.handling.shape_depends_on_data:
            self._look_up(arrival, (arrival.key, *described))

    def _first(self, arrival: _Arrival, result: Any) -> _Known:
        """A call of a geometry that was not seen before."""
        func, tensors, numbers = arrival.func, arrival.tensors, arrival.numbers

        def number(tensor: Tensor) -> int:
            return numbers[self.number_of(tensor)]

        call = self.with_implementation(
            build_call(func, arrival.plain_args, arrival.plain_kwargs, result, number, arrival.groups, arrival.body)
        )
        mixed_devices.check(call, tensors, self.modules.outermost)
        self.trace.devices.update(mixed_devices.touched(self.trace.devices, call))
        if self._on_new_call is not None:
            self._on_new_call(call)
        counts = self.values is not None and self.values.stands_in_for(result)
        return _Known(call, result_maker(func, tensors, result), counts)

    def _describe(self, values: Iterable[Any], arrival: _Arrival, born: int, key: list[Any]) -> None:
        """Add arguments or results to the key: geometry for tensors, the value for all else. Tensors are collected
        and their storages numbered; a storage that is first seen as an argument existed BEFORE the trace.

        This runs for every op, so it is one loop without helper functions.
        """
        tensors, addresses, numbers = arrival.tensors, arrival.addresses, arrival.numbers
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                local = numbers.setdefault(self._number(value, born, addresses), len(numbers))
                if value.layout is torch.strided and not value.is_nested:
                    offset = 0 if self._has_host and value.is_cpu else value.storage_offset()
                    key.append((value.shape, torch_strides(value), value.dtype, local, offset, value.device))
                else:
                    key.append((value.layout, unstrided_spec(value, local)))
            elif isinstance(value, (list, tuple)):
                key.append(len(value))
                self._describe(value, arrival, born, key)
            elif isinstance(value, (bool, float)):  # 1, 1.0 and True hash alike, but make other dtypes
                key.append((type(value), value))
            else:
                key.append(value)

    def _note_changes(self, func: OpOverload, tensors: tuple[Tensor, ...]) -> None:
        if func.overloadpacket in FRESH:
            for tensor in tensors:
                self._storages.note_new(tensor)
        self._storages.note_sizes(tensors)


def switches_now() -> Switches:
    """What the program has allowed so far; a trace has those that held when it began.

    fp32_precision tells what was set by either of torch's two ways; the older allow_tf32 raises after the newer one.
    """
    matmul = torch.backends.cuda.matmul
    convolution: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return Switches(
        matmul.fp32_precision == "tf32",
        convolution.fp32_precision == "tf32",
        getattr(matmul, "allow_fp16_accumulation", False),
    )
