"""Runs a program under a TorchDispatchMode and records its aten ops. Knows no FLOPs and no hardware.

The recorder must not change what it records. It keeps no tensor alive: if it kept an output, autograd would copy
gradients that it otherwise adds in place (38 ops instead of 31 in a small net).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.compiler import is_exporting
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.known_values import KnownValues
from flopmeter.known_values.assumptions import caller
from flopmeter.known_values.values import no_modes
from flopmeter.records import (
    BEFORE,
    DEFAULT_STREAM,
    Call,
    FlexBody,
    Op,
    OptimizerStep,
    Padding,
    Phase,
    Switches,
    TemplateRun,
    Trace,
    TritonBody,
)
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.operators import aten_overloads as aten
from flopmeter.torch_names.private import DispatchKey, dispatch_mode_stack
from flopmeter.trace import higher_order, mixed_devices, streams, triton_kernels
from flopmeter.trace.arrivals import Arrival, Arrivals, KnownCall
from flopmeter.trace.attribution import Attribution
from flopmeter.trace.dtensor import note_dtensor_op
from flopmeter.trace.flex_attention import template_of
from flopmeter.trace.gradients import IN_PLACE, without_a_mode
from flopmeter.trace.handling import FRESH, Handlings
from flopmeter.trace.implementations import body_of, key_of_parts, python_key, told_of_kernels
from flopmeter.trace.mode_flags import tell_modes
from flopmeter.trace.module_paths import ModulePaths
from flopmeter.trace.padding import longest_text
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
from flopmeter.trace.subclasses import is_plain
from flopmeter.trace.tensor_roles import TensorRoles
from flopmeter.trace.tensor_specs import build_call

_COMPOSITE = DispatchKey.CompositeImplicitAutograd


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
        on_op: Callable[[], None] | None = None,
        storage_listener: StorageListener | None = None,
        shapes_only: ShapesOnly | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_new_call, self._on_op = on_new_call, on_op
        self.trace = Trace(switches=switches_now())
        self._shapes_only = shapes_only or ShapesOnly()
        listener = storage_listener or StorageListener()
        self._storages = Storages(self.trace, listener, self._shapes_only, lambda: self._attribution.is_inside())
        self._number = self._storages.number  # asked for every tensor
        self.roles = TensorRoles(self.trace, self._storages)
        self.modules = ModulePaths(self.roles.note_module, self.is_on)
        self._attribution = Attribution(self.trace, self.modules, self._number)
        self._source = source
        self._overrides = overrides or {}
        self.values = values
        self._listen()
        self._cells: Mapping[int, Any] = values.values.cells if values else {}  # what values are known of
        self._handlings = Handlings(values)
        self._groups = ProcessGroups()
        has_host = shapes_only is not None  # a script has one
        self._arrivals = Arrivals(self._storages, self._groups, has_host=has_host)
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
            self._attribution.begin()
            self.roles.begin()
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
            self._arrivals.forget()
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

    def _listen(self) -> None:
        """Be told of tensors that come from outside of any op."""
        if self.values is not None:
            self.values.on_new, self.values.on_numbers = self._note_sent, self._storages.note_numbers

    def note_new(self, tensor: Tensor) -> None:
        """The tensor's storage is new, though no op has written it."""
        self._storages.note_new(tensor)

    def _note_sent(self, tensor: Tensor) -> None:
        """torch.tensor(...) made the tensor: on meta without an op, on CUDA by a copy of one on the host
        (internal_new_from_data in torch/csrc/utils/tensor_new.cpp)."""
        self.note_new(tensor)
        if self.is_on():
            with no_modes():
                host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._storages.note_numbers(host)
            self._record_of_cuda(aten._to_copy.default, (host,), {"device": tensor.device}, tensor)

    def _record_of_cuda(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: Tensor) -> None:
        """Record a call that only CUDA makes."""
        self.note_new(made)
        self._record(self._arrivals.meet(func, args, kwargs, self._handlings[func]), made)

    def with_implementation(self, call: Call, tensors: Sequence[Tensor] = ()) -> Call:
        """The call with what its op runs, where that is a custom op in Python. `tensors` are those of the call's
        inputs: it runs with what is known of their values, as of all else in the program."""
        key = python_key(call.func)
        if key is None:
            return call
        try:
            body = body_of(call, key, Recorder(overrides=self._overrides, values=self.values), tensors)
        finally:
            self._listen()
        return dataclasses.replace(call, body=body)

    def _enter_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook of the step, which then runs with the arguments that are returned, if any."""
        if not self.is_on():
            return None
        self._begin_step(optimizer)
        is_first = len(args) > 1  # after the optimizer
        closure = args[1] if is_first else kwargs.get("closure")
        if not callable(closure):
            return None
        closure = self._attribution.outside_of_step()(closure)
        return ((optimizer, closure, *args[2:]), kwargs) if is_first else (args, {**kwargs, "closure": closure})

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._attribution.enter_step()
        self.modules.calls += sum(len(group["params"]) for group in optimizer.param_groups)

    def _leave_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.is_on():
            return
        self._attribution.leave_step()
        groups = (sum(weight.grad is not None for weight in group["params"]) for group in optimizer.param_groups)
        step = OptimizerStep(len(self.trace.ops), "fused" in optimizer.defaults, tuple(filter(None, groups)))
        self.trace.optimizer_steps.append(step)
        self.roles.note_optimizer(optimizer)

    @contextmanager
    def in_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The step of an optimizer whose hooks no one calls."""
        if self.is_on():
            self._begin_step(optimizer)
        try:
            yield
        finally:
            self._attribution.leave_step()
            self.roles.note_optimizer(optimizer)

    def enter_compiled(self, module: nn.Module) -> str:
        """The path of a module that runs compiled; no hook sees such a module."""
        self.roles.note_module(module)
        return self.modules.path_of(module)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_exporting():  # the program is read, and does not run
            return func(*args, **(kwargs or {}))
        for kind in types:
            if not is_plain(kind):
                note_dtensor_op(self.trace, kind, args)
                return NotImplemented  # let the subclass (DTensor, ...) run; its inner ops come back here
        kwargs = kwargs or {}
        handling = self._handlings[func]
        if handling.is_host:
            return self._open(func, args, kwargs) if isinstance(func, HigherOrderOperator) else func(*args, **kwargs)
        if self._shapes_only.covers(args, kwargs):
            return self._shapes_only.run(func, args, kwargs)
        if handling.is_composite and not any(tensor.is_nested for tensor in tensors_in(args)):
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
            arrival = self._arrivals.meet(func, args, kwargs, handling)
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

    def _meet_kernel(self, func: OpOverload, args: tuple[Any, ...], body: FlexBody | TritonBody) -> Arrival:
        arrival = self._arrivals.meet(func, args, {}, self._handlings[func])
        arrival.body = body
        self._arrivals.look_up(arrival, (arrival.key, body))
        return arrival

    def _ask_values(self, arrival: Arrival, make: ResultMaker | None) -> tuple[Arrival, Any]:
        """The call that really ran, which may be another one, and its result, which `make` gives without running it."""
        assert self.values is not None
        func, args, kwargs = arrival.func, arrival.args, arrival.kwargs
        kernel = self._kernel(arrival) if make is None else lambda *_, **__: make(arrival.tensors)
        try:
            result = self.values.run(func, args, kwargs, arrival.tensors, arrival.addresses, kernel)
        except RuntimeError as error:
            self._explain(error, arrival)
            raise
        before, ran = self.values.taken_calls()
        for call in before:
            self._record_of_cuda(*call)
        if ran is not None:
            func, args, kwargs = ran
            arrival = self._arrivals.meet(func, args, kwargs, self._handlings[func])
        if self.values.groups is not None:
            arrival.groups = self.values.groups
            self._arrivals.look_up(arrival, (arrival.key, arrival.groups))
        return arrival, result

    def _kernel(self, arrival: Arrival) -> Callable[..., Any] | None:
        """The function that runs in place of the op, if there is one."""
        if arrival.handling.is_foreach and reaches_kernel_directly() and all(map(is_dense_meta, arrival.tensors)):
            return functools.partial(once_for_each_geometry, arrival.func)
        return self._overrides.get(arrival.func)

    def _run(self, arrival: Arrival) -> Any:
        try:
            return (self._kernel(arrival) or arrival.func)(*arrival.args, **arrival.kwargs)
        except RuntimeError as error:
            self._explain(error, arrival)
            raise

    def _explain(self, error: RuntimeError, arrival: Arrival) -> None:
        explained = mixed_devices.explain(arrival.func, arrival.tensors, self.modules.outermost)
        if explained is not None and type(error) is RuntimeError:
            raise explained from None  # torch says less, in fifty lines

    def _record(self, arrival: Arrival, result: Any) -> None:
        if arrival.handling.looks_up:
            self._note_padding(arrival.tensors[-1])
        self._append(self._op(arrival, result))

    def _note_padding(self, ids: Tensor) -> None:
        if self.values is None or ids.dim() != 2 or 0 in ids.shape or not self.values.values.knows(ids):
            return
        with no_modes():
            longest = longest_text(self.values.values.read(ids))
        if longest < ids.shape[1]:
            self.trace.padding.append(Padding(len(self.trace.ops), ids.shape[1], longest))

    def _append(self, op: Op) -> None:
        trace = self.trace
        trace.module_calls.append(self.modules.calls)
        if streams.current() != DEFAULT_STREAM:
            trace.stream_use.streams[len(trace.ops)] = streams.current()
        trace.ops.append(op)
        if self._on_op is not None:
            self._on_op()

    def _op(self, arrival: Arrival, result: Any) -> Op:
        trace, numbers = self.trace, arrival.numbers
        if arrival.handling.is_collective:
            self._groups.note_work(result, len(trace.ops))
            result = without_handles(result)
        if isinstance(result, Tensor) and not arrival.handling.shape_depends_on_data:  # nearly always
            numbers.setdefault(self._number(result, len(trace.ops), arrival.addresses), len(numbers))
        else:
            self._arrivals.describe_result(arrival, result, len(trace.ops))
        known = arrival.known
        if known is None:
            known = self._first(arrival, result)
            self._arrivals.learn(arrival, known)
        if known.counts and self.values is not None:
            self.values.keep_stand_ins(result)
        if arrival.handling.changes_storages:
            self._note_changes(arrival.func, tuple(tensors_in((*arrival.tensors, result))))
        phase, module = self._attribution.phase_and_module()
        source = caller() if self._source else None
        return Op(known.call, tuple(numbers), module, phase, source, self._attribution.region(phase))

    def _first(self, arrival: Arrival, result: Any) -> KnownCall:
        """A call of a geometry that was not seen before."""
        func, tensors, numbers = arrival.func, arrival.tensors, arrival.numbers

        def number(tensor: Tensor) -> int:
            return numbers[self.number_of(tensor)]

        call = self.with_implementation(
            build_call(func, arrival.plain_args, arrival.plain_kwargs, result, number, arrival.groups, arrival.body),
            tensors,
        )
        mixed_devices.check(call, tensors, self.modules.outermost)
        self.trace.devices.update(mixed_devices.touched(self.trace.devices, call))
        if self._on_new_call is not None:
            self._on_new_call(call)
        counts = self.values is not None and self.values.stands_in_for(result)
        return KnownCall(call, result_maker(func, tensors, result), counts)

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
