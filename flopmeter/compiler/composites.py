"""Composite ops differentiate on meta as they do on CUDA.

Works around: torch has Python kernels on meta for about a hundred composites (nll_loss, var, prelu, interpolations).
Where a compiler traces, autograd takes those for kernels of a backend without a derivative, and the gradient is lost.
Until: torch no longer registers them for composites (torch/_decomp registers them with those of other ops; one is
registered by itself in torch/_refs/__init__.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch._ops import OpOverload

from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.private import DispatchKey, has_kernel

COMPOSITE = "CompositeImplicitAutograd"
_BY_ITSELF = aten_overloads.broadcast_tensors.default  # in no table; mse_loss, l1_loss and the like begin with it


@contextmanager
def composites_differentiate() -> Iterator[None]:
    """In this context composites have no kernel of their own on meta, so autograd sees the ops in them."""
    hidden = {op: op.py_kernels.pop(DispatchKey.Meta) for op in _composites_with_a_kernel()}
    try:
        _forget_dispatch(hidden)
        yield
    finally:
        for op, kernel in hidden.items():
            op.py_kernels[DispatchKey.Meta] = kernel
        _forget_dispatch(hidden)


def _composites_with_a_kernel() -> list[OpOverload]:
    registered = {_BY_ITSELF, *(op for table in names.DECOMPOSITIONS.value.values() for op in table)}
    return [
        op
        for op in registered
        if isinstance(op, OpOverload) and DispatchKey.Meta in op.py_kernels and has_kernel(op.name(), COMPOSITE)
    ]


def _forget_dispatch(ops: Iterable[OpOverload]) -> None:
    for op in ops:
        op._dispatch_cache.clear()
