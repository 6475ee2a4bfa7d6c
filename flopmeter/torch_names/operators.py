"""torch's operators for the tables of flopmeter. A table may name an operator that this torch lacks.

Releases of torch add, drop and rename operators. `aten.NAME` is torch's own object if this torch has it. Otherwise it
is an `Absent`, which no call ever has, so that its entry in a table has no effect. So one table works with old and new
torch, and no table asks for versions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

# Those that torch 2.11 to 2.15 bring, collectives among them, which must not run on the CPU; and flopmeter's own.
NAMESPACES_OF_TORCH = frozenset((
    "aten", "prims", "rngprims", "quantized", "_quantized", "quantized_decomposed", "quantization", "sparse", "mkl",
    "mkldnn", "mkldnn_prepacked", "onednn", "onnx", "c10d", "c10d_functional", "_c10d_functional",
    "_c10d_functional_autograd", "_dtensor", "symm_mem", "fsdp", "torch_attn", "inductor", "inductor_prims", "flex_lib",
    "flex_gemm", "streams", "mempool", "export", "profiler", "prim", "static_runtime", "flopmeter", "flopmeter_shims",
    "cuda_kernels",
))  # fmt: skip


class Absent:
    """Stands for an operator, or an overload of one, that this torch lacks. Only calling it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for these, not a table
        return _absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no operator {self._name}")

    def __repr__(self) -> str:
        return f"<no {self._name} in torch {torch.__version__}>"


class Packets:
    """The operators of a namespace, all overloads together: `aten.max`."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __getattr__(self, name: str) -> OpOverloadPacket:
        if name.startswith("__"):
            raise AttributeError(name)
        return _or_absent(getattr(torch.ops, self._namespace), name, f"{self._namespace}.{name}")

    def present(self, *names: str) -> tuple[OpOverloadPacket, ...]:
        """Those of these operators that this torch has."""
        namespace = getattr(torch.ops, self._namespace)
        return tuple(getattr(namespace, name) for name in names if hasattr(namespace, name))


class Overloads:
    """The overloads of the operators of a namespace, one by one: `overloads.max.dim`."""

    def __init__(self, packets: Packets) -> None:
        self._packets = packets

    def __getattr__(self, name: str) -> _OverloadsOf:
        return _OverloadsOf(getattr(self._packets, name), name)


class _OverloadsOf:
    def __init__(self, packet: OpOverloadPacket, name: str) -> None:
        self._packet, self._name = packet, name

    def __getattr__(self, name: str) -> OpOverload:
        return _or_absent(self._packet, name, f"{self._name}.{name}")


def _or_absent(owner: Any, name: str, full_name: str) -> Any:
    return getattr(owner, name) if hasattr(owner, name) else _absent(full_name)


@functools.cache
def _absent(name: str) -> Absent:
    return Absent(name)


def of_tensors(arguments: Iterable[Any]) -> list[Any]:
    """Those arguments, or results, of a schema that are tensors, lists of tensors, or may be one."""
    return [argument for argument in arguments if "Tensor" in str(argument.type)]


def traced_size(size: Any) -> int:
    """The size as a number; a symbolic one of the compiler as that which it was traced with."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


aten = Packets("aten")
aten_overloads = Overloads(aten)
