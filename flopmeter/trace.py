"""Run a program under a TorchDispatchMode and write down its aten ops. Knows no FLOPs and no hardware.

The recorder must not change what it records. It keeps no tensor alive (an output held back makes autograd
copy gradients: 38 ops instead of 31 in a small net); storages are watched through weak references, which
also tell when memory is freed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.known_values import KnownValues
from flopmeter.known_values.assumptions import caller
from flopmeter.modules import ModulePaths
from flopmeter.records import Call, Op, Phase, Switches, TensorSpec

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward pass
_autograd_node = torch._C._current_autograd_node
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_HOST_NAMESPACES = ("prim", "profiler")  # questions about metadata; no kernel anywhere


@dataclass(slots=True)
class Storage:
    """A block of memory of the program, by the index of the op before which it appeared and went away."""

    nbytes: int
    device: str
    born: int  # 0 for what was there before: parameters, inputs
    died: int | None = None  # None: alive when the context ended


@dataclass(slots=True)
class Trace:
    """What ran, in order. `module_calls[i]` is the number of module calls made before op i."""

    ops: list[Op] = field(default_factory=list)
    module_calls: list[int] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    switches: Switches = field(default_factory=lambda: _switches())

    @property
    def device(self) -> str:
        """Where the program runs: 'meta' if any op does, else the device of its first op.
        Ops that touch nothing there are the host's own work (Adam's step counters live on the CPU)."""
        seen = dict.fromkeys(spec.device for op in self.ops for spec in (*op.call.inputs, *op.call.outputs))
        return "meta" if "meta" in seen else next((kind for kind in seen if kind != "cpu"), "cpu")


class _Handling(NamedTuple):
    """How the recorder treats an op; looked up once per op."""

    is_host: bool  # pass through unrecorded
    is_composite: bool  # arrives undecomposed under inference_mode
    shape_depends_on_data: bool  # the inputs' geometry does not determine the outputs'


class _Seen(NamedTuple):
    """The tensors of one call in order, the addresses of their storages, and the call's own numbering."""

    tensors: list[Tensor]
    addresses: list[int]
    numbers: dict[int, int]  # trace-wide number -> number in the call


class Recorder(TorchDispatchMode):
    """The dispatch mode: appends one Op to `trace` for each aten call that reaches a kernel."""

    def __init__(
        self,
        *,
        source: bool = False,
        overrides: Mapping[OpOverload, Callable[..., Any]] | None = None,
        values: KnownValues | None = None,
        on_new_call: Callable[[Call], None] | None = None,
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_new_call = on_new_call
        self.trace = Trace()
        self.modules = ModulePaths()
        self._source = source
        self._overrides = overrides or {}
        self._values = values
        self._calls: dict[Any, Call] = {}
        self._handlings: dict[Any, _Handling] = {}
        self._storages: dict[int, _StorageRef] = {}
        self._shared_number: int | None = None  # of tensors without a storage
        self._optimizer_steps = 0  # depth
        self._creates_graph: tuple[int, bool] = (-1, False)  # of the last backward pass seen
        self._undo = ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap the dispatch below in a guard against being compiled, about a microsecond an
        op; while a dispatch mode is active nothing is compiled anyway."""
        return False

    def __enter__(self) -> Recorder:
        with ExitStack() as undo:
            undo.enter_context(self.modules)
            undo.callback(register_optimizer_step_pre_hook(self._enter_step).remove)
            undo.callback(register_optimizer_step_post_hook(self._leave_step).remove)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._undo.close()
        self._optimizer_steps = 0

    def _enter_step(self, *_: Any) -> None:
        self._optimizer_steps += 1

    def _leave_step(self, *_: Any) -> None:
        self._optimizer_steps -= 1

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types:
            if not _is_plain(kind):
                return NotImplemented  # let the subclass (DTensor, ...) run; its inner ops come back here
        kwargs = kwargs or {}
        handling = self._handlings.get(func) or self._handle(func)
        if handling.is_host:
            return func(*args, **kwargs)
        if handling.is_composite:
            with self:
                override = self._overrides.get(func)
                # The C++ composite itself; `func.decompose` would prefer Python re-writes of some of them.
                return override(*args, **kwargs) if override else func._op_dk(_COMPOSITE, *args, **kwargs)
        seen = _Seen([], [], {})
        key = self._key(func, args, kwargs, seen)
        if self._values is None:
            result = func(*args, **kwargs)
        else:
            result = self._values.run(func, args, kwargs, seen.tensors, seen.addresses)
            for func, args, kwargs in self._values.ran:  # in place of the call
                handling = self._handlings.get(func) or self._handle(func)
                seen = _Seen([], [], {})
                key = self._key(func, args, kwargs, seen)
        self._record(handling, key, func, args, kwargs, result, seen)
        return result

    def _key(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], seen: _Seen) -> Any:
        """What tells calls of different cost apart."""
        key = (func, self._describe(args, seen, 0))
        return (key, tuple(kwargs), self._describe(kwargs.values(), seen, 0)) if kwargs else key

    def _record(
        self, handling: _Handling, key: Any, func: OpOverload, args: Any, kwargs: Any, result: Any, seen: _Seen
    ) -> None:
        trace = self.trace
        described = self._describe((result,), seen, len(trace.ops))
        if handling.shape_depends_on_data:
            key = (key, described)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _build(func, args, kwargs, result, self._spec_reader(seen.numbers))
            if self._on_new_call is not None:
                self._on_new_call(call)
        phase, module = self._place()
        source = caller() if self._source else None
        trace.module_calls.append(self.modules.calls)
        trace.ops.append(Op(call, tuple(seen.numbers), module, phase, source))

    def _describe(self, values: Iterable[Any], seen: _Seen, born: int) -> tuple[Any, ...]:
        """A hashable description of arguments or results: geometry for tensors, the value for the rest.
        Notes the tensors and numbers their storages; one that is first seen as an argument (born 0) was
        there before the trace.
        """
        tensors, addresses, numbers = seen
        key: list[Any] = []
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
                number = self._number(value, born, addresses)
                local = numbers.setdefault(number, len(numbers))
                if value.layout is torch.strided:
                    offset = value.storage_offset()
                    key.append((value.shape, value.stride(), value.dtype, local, offset, value.is_meta))
                else:
                    key.append((value.shape, value.layout, value.dtype, local))
            elif isinstance(value, (list, tuple)):
                key.append(self._describe(value, seen, born))
            elif isinstance(value, (bool, float)):  # 1, 1.0 and True hash alike, but make other dtypes
                key.append((type(value), value))
            else:
                key.append(value)
        return tuple(key)

    def _number(self, tensor: Tensor, born: int, addresses: list[int]) -> int:
        """The trace-wide number of the tensor's storage, whose address is noted."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors and others that have none
            return self._no_storage(tensor, born)
        address = storage._cdata
        addresses.append(address)
        known = self._storages.get(address)
        if known is not None:
            return known.number
        number = len(self.trace.storages)
        self.trace.storages.append(Storage(storage.nbytes(), tensor.device.type, born))
        self._storages[address] = _StorageRef(storage, self._on_death, address, number)
        return number

    def _no_storage(self, tensor: Tensor, born: int) -> int:
        """All tensors without a storage share one number, of a block of no size."""
        if self._shared_number is None:
            self._shared_number = len(self.trace.storages)
            self.trace.storages.append(Storage(0, tensor.device.type, born))
        return self._shared_number

    def _on_death(self, reference: _StorageRef) -> None:
        self._storages.pop(reference.address, None)
        self.trace.storages[reference.number].died = len(self.trace.ops)

    def _spec_reader(self, numbers: dict[int, int]) -> Callable[[Tensor], TensorSpec]:
        def spec(tensor: Tensor) -> TensorSpec:
            local = numbers[self._number(tensor, 0, [])]
            strided = tensor.layout is torch.strided
            stride, offset = (tensor.stride(), int(tensor.storage_offset())) if strided else ((), 0)
            return TensorSpec(tuple(tensor.shape), stride, tensor.dtype, local, offset, tensor.device.type)

        return spec

    def _place(self) -> tuple[Phase, str]:
        """The phase, and the path of the module that the op belongs to."""
        task = _graph_task()
        if task == -1:
            in_step = self._optimizer_steps and not self.modules.path
            return ("optimizer" if in_step else "forward"), self.modules.path
        if task != self._creates_graph[0]:
            self._creates_graph = (task, _creates_graph())
        recompute = torch.is_grad_enabled() and not self._creates_graph[1]
        return ("recompute" if recompute else "backward"), self._path_in_backward()

    def _path_in_backward(self) -> str:
        if self.modules.path:
            return self.modules.path
        node = _autograd_node()
        path = None if node is None else self.modules.path_of_node(node)
        if path is None:  # accumulation follows the op that made the gradient
            return self.trace.ops[-1].module if self.trace.ops else ""
        return path

    def _handle(self, func: Any) -> _Handling:
        handling = _handling(func)
        self._handlings[func] = handling
        return handling


class _StorageRef(weakref.ref[Any]):
    """A weak reference that remembers which storage it was."""

    __slots__ = ("address", "number")

    def __new__(cls, storage: Any, callback: Any, address: int, number: int) -> _StorageRef:
        return super().__new__(cls, storage, callback)

    def __init__(self, storage: Any, callback: Any, address: int, number: int):
        self.address = address
        self.number = number


@functools.cache
def _is_plain(kind: type) -> bool:
    """Whether tensors of the type run aten kernels themselves, rather than through code of their own."""
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]


def _handling(func: Any) -> _Handling:
    # A higher-order op is no OpOverload: its body is traced op by op.
    if not isinstance(func, OpOverload) or func.namespace in _HOST_NAMESPACES:
        return _Handling(True, False, False)
    name = func.name()
    is_composite = _has_kernel(name, "CompositeImplicitAutograd") and not (
        _has_kernel(name, "CPU") or _has_kernel(name, "Meta")
    )
    by_data = torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags
    return _Handling(False, is_composite, by_data)


def _switches() -> Switches:
    matmul = torch.backends.cuda.matmul
    return Switches(
        matmul.allow_tf32, torch.backends.cudnn.allow_tf32, getattr(matmul, "allow_fp16_accumulation", False)
    )


def _build(func: OpOverload, args: Any, kwargs: Any, result: Any, spec: Callable[[Tensor], TensorSpec]) -> Call:
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []

    def freeze(value: Any, into: list[TensorSpec]) -> Any:
        if isinstance(value, Tensor):
            into.append(spec(value))
            return into[-1]
        if isinstance(value, (list, tuple)):
            return tuple(freeze(item, into) for item in value)
        return value

    frozen_args = freeze(args, inputs)
    frozen_kwargs = {name: freeze(value, inputs) for name, value in kwargs.items()}
    freeze(result, outputs)
    return Call(func, frozen_args, frozen_kwargs, tuple(inputs), tuple(outputs))


def _creates_graph() -> bool:
    """Whether the running backward pass was called with create_graph=True (then gradient mode is on in
    all of it; else gradient mode inside a backward pass means that a checkpoint recomputes)."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":  # torch/autograd/graph.py
            arguments = frame.f_locals["args"]  # (grad_tensors, retain_graph, create_graph, inputs)
            return bool(arguments[2]) if len(arguments) > 2 else False
        frame = frame.f_back
    return False
