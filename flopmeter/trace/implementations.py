"""What a custom op in Python runs. The op stays one op of the program; its kernels are those of its implementation, of
which torch shows none on meta tensors: there it runs the op's fake implementation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.records import Call, OpsBody, TensorSpec, Trace
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.private import DYNAMO, PYTHON_KERNELS, PYTHON_OPS, DispatchKey, lost
from flopmeter.trace.tensor_specs import as_tensors

_KEYS = ("CUDA", "CompositeExplicitAutograd")  # where Python registers for GPUs, and for every device
# Namespaces whose kernels are no Python, and those whose Python makes nothing but shapes. Others may be the program's.
_OTHERS = ("aten", "prims", "_c10d_functional", "_dtensor", "flopmeter", "flopmeter_shims", "cuda_kernels")


class OpRecorder(AbstractContextManager[Any], Protocol):
    """A recorder that has recorded nothing yet."""

    trace: Trace

    def number_of(self, tensor: Tensor) -> int: ...


def python_key(func: OpOverload) -> str | None:
    """The dispatch key under which a Python function implements the op on a GPU; None if none does."""
    if func.namespace in _OTHERS or lost(PYTHON_OPS):
        return None
    name = func.name().replace("::", "/")
    return next((key for key in _KEYS if f"{name}/{key}" in PYTHON_KERNELS.value), None)


def body_of(call: Call, key: str, recorder: OpRecorder) -> OpsBody:
    """What the Python function that implements the op under that key runs on meta tensors like those of the call."""
    made: dict[TensorSpec, Tensor] = {}
    try:
        args, kwargs = as_tensors((call.args, dict(call.kwargs)), made)
        with _without_compiler(), recorder:
            result = call.func._op_dk(getattr(DispatchKey, key), *args, **kwargs)
            held = [*zip(tensors_in(result), call.outputs, strict=False), *((made[spec], spec) for spec in made)]
            numbers = {recorder.number_of(tensor): spec.storage for tensor, spec in held}
    except Exception as error:  # whatever code of the program's raises where tensors have no values
        return OpsBody((), f"{type(error).__name__}: {error}".partition("\n")[0])
    ops = recorder.trace.ops
    return OpsBody(tuple(op._replace(storages=tuple(numbers.get(each, -1) for each in op.storages)) for op in ops))


def _without_compiler() -> AbstractContextManager[object]:
    """A function compiled by torch.compile, called inside of a custom op, is recorded op by op."""
    return torch.compiler.set_stance("force_eager") if DYNAMO.loaded else nullcontext()
