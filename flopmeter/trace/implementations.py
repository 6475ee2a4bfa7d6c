"""What ops run whose kernel is a function in Python.

A custom op with a fake kernel stays one op of the program; its kernels are those of its implementation, of which torch
shows none on meta tensors: there it runs the op's fake kernel. An op of the program's without one, and an op of aten
that a library has replaced, are recorded as the ops that the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from flopmeter.as_cuda.kernels.sparse import MADE_OF_PARTS
from flopmeter.known_values import KnownValues
from flopmeter.known_values.values import Values
from flopmeter.records import Call, OpsBody, TensorSpec, Trace
from flopmeter.records.collectives import MADE_OF_COLLECTIVES
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.private import (
    CUSTOM_DEFINITIONS,
    DYNAMO,
    PYTHON_KERNELS,
    PYTHON_OPS,
    TRITON_OPERATORS,
    DispatchKey,
    has_kernel,
    lost,
)
from flopmeter.trace.tensor_specs import as_tensors

_KEYS = ("CUDA", "CompositeExplicitAutograd")  # where Python registers for GPUs, and for every device
# Namespaces whose kernels are no Python, and those whose Python makes nothing but shapes. Others may be the program's.
_OTHERS = ("aten", "prims", "_c10d_functional", "_dtensor", "flopmeter", "flopmeter_shims", "cuda_kernels")
# What torch itself had replaced when flopmeter was imported (`torch._native`): these kernels are priced as their ops.
_OF_TORCH = frozenset(() if lost(PYTHON_OPS) else (name for name in PYTHON_KERNELS.value if name.startswith("aten/")))


class OpRecorder(AbstractContextManager[Any], Protocol):
    """A recorder that has recorded nothing yet."""

    trace: Trace
    values: KnownValues | None

    def number_of(self, tensor: Tensor) -> int: ...


def python_key(func: OpOverload) -> str | None:
    """The dispatch key under which a Python function implements the op on a GPU; None if none does."""
    if func.namespace in _OTHERS or lost(PYTHON_OPS):
        return None
    return next((key for key in _KEYS if _is_python(func, key)), None)


def key_of_parts(func: OpOverload) -> DispatchKey | None:
    """The dispatch key of the function whose ops are recorded in place of the op; None if the op itself is."""
    schema = func._schema.name
    if schema in (*MADE_OF_COLLECTIVES, *MADE_OF_PARTS) or (
        TRITON_OPERATORS.loaded and schema in TRITON_OPERATORS.value
    ):
        return DispatchKey.Meta
    if lost(PYTHON_OPS) or _has_fake(func):
        return None
    return next((getattr(DispatchKey, key) for key in _KEYS if _is_python(func, key)), None)


@contextmanager
def told_of_kernels(forget: Callable[[], None]) -> Iterator[None]:
    """In this context `forget` is called whenever a kernel is registered: what was known of ops may have changed."""
    libraries: Any = Library
    register = libraries.impl

    def impl(library: Library, *args: Any, **options: Any) -> None:
        register(library, *args, **options)
        forget()

    libraries.impl = impl
    try:
        yield
    finally:
        libraries.impl = register


def _has_fake(func: OpOverload) -> bool:
    """Whether the op runs on meta tensors with torch's own kernel or the program's."""
    if func.namespace == "aten":
        return not _is_python(func, "CUDA") or _name(func, "CUDA") in _OF_TORCH
    if func.namespace in _OTHERS:
        return True
    defined = CUSTOM_DEFINITIONS.value.get(func._schema.name)
    if defined is not None:  # its kernel for meta raises where the program has given none
        return defined._abstract_fn is not None or not func._schema.returns
    return any(has_kernel(func.name(), key) for key in ("Meta", "CompositeImplicitAutograd", _KEYS[-1]))


def _is_python(func: OpOverload, key: str) -> bool:
    return _name(func, key) in PYTHON_KERNELS.value


def _name(func: OpOverload, key: str) -> str:
    """As torch.library lists its registrations."""
    return f"{func.name().replace('::', '/')}/{key}"


def body_of(call: Call, key: str, recorder: OpRecorder, tensors: Sequence[Tensor]) -> OpsBody:
    """What the Python function that implements the op under that key runs on meta tensors like those of the call.
    What the recorder knows of the values of `tensors`, the call's inputs, it knows of these."""
    made: dict[TensorSpec, Tensor] = {}
    try:
        args, kwargs = as_tensors((call.args, dict(call.kwargs)), made)
        if recorder.values is not None:
            for spec, tensor in zip(call.inputs, tensors, strict=False):
                _tell(recorder.values.values, made[spec], tensor)
        with _without_compiler(), recorder:
            result = call.func._op_dk(getattr(DispatchKey, key), *args, **kwargs)
            held = [*zip(tensors_in(result), call.outputs, strict=False), *((made[spec], spec) for spec in made)]
            numbers = {recorder.number_of(tensor): spec.storage for tensor, spec in held}
    except Exception as error:  # whatever code of the program's raises where tensors have no values
        return OpsBody((), f"{type(error).__name__}: {error}".partition("\n")[0])
    ops = recorder.trace.ops
    return OpsBody(tuple(op._replace(storages=tuple(numbers.get(each, -1) for each in op.storages)) for op in ops))


def _tell(values: Values, made: Tensor, tensor: Tensor) -> None:
    """From now on what is known of the one tensor is known of the other. It is copied when it is first read."""
    if tensor.is_meta and values.knows(tensor):
        values.defer(made, lambda blank: blank.copy_(values.read(tensor)))


def _without_compiler() -> AbstractContextManager[object]:
    """A function compiled by torch.compile, called inside of a custom op, is recorded op by op."""
    return torch.compiler.set_stance("force_eager") if DYNAMO.loaded else nullcontext()
