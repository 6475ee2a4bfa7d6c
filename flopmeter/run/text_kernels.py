"""Kernels that a program gives to torch as CUDA C++ (torch.cuda._compile_kernel): operators that no rule counts.

Works around: NVRTC, which compiles them, and the driver that loads them.
Until: never; where flopmeter runs there is neither.

Which of its tensors a kernel only reads, its parameters tell: those that point to `const`. It is taken to read and
write the others once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.run.patches import Patch
from flopmeter.torch_names.private import COMPILE_TEXT

_NAMESPACE = "cuda_kernels"


def patches(note: Callable[[str], None]) -> Iterator[Patch]:
    def stand_in(kernel_source: str, kernel_name: str, *_: Any, **options: Any) -> TextKernel:
        return TextKernel(kernel_source, kernel_name, note)

    if COMPILE_TEXT.present():
        yield Patch(torch.cuda, COMPILE_TEXT.attribute, stand_in, "neither NVRTC nor a driver is here")


class TextKernel:
    """What torch.cuda._compile_kernel returns."""

    def __init__(self, source: str, name: str, note: Callable[[str], None]) -> None:
        self._operator = _operator(re.sub(r"\W+", "_", name))
        self._only_reads, self._note = _only_reads(source, name), note

    def __call__(
        self, grid: Any = (1, 1, 1), block: Any = (1, 1, 1), args: Sequence[Any] | None = None, *_: Any, **options: Any
    ) -> None:
        self._note(
            f"{self._operator.name()} is a kernel in CUDA C++, which is not compiled here: no FLOPs of it are counted, "
            "and its tensors are taken to be read once, and those that are not const also written"
        )
        read: list[Tensor] = []
        written: list[Tensor] = []
        for arg, only_reads in zip_longest(args or (), self._only_reads):
            if isinstance(arg, Tensor):
                (read if only_reads else written).append(arg)
        self._operator(read, written)

    def set_shared_memory_config(self, shared_mem_bytes: int) -> None:
        """How much shared memory a block may use changes nothing that is counted."""


def _operator(name: str) -> OpOverload:
    if not hasattr(getattr(torch.ops, _NAMESPACE), name):
        torch.library.define(f"{_NAMESPACE}::{name}", "(Tensor[] read, Tensor(a!)[] written) -> ()")
        torch.library.impl(f"{_NAMESPACE}::{name}", "CompositeExplicitAutograd", _in_place)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def _in_place(read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
    """It only writes into its arguments."""


def _only_reads(source: str, name: str) -> list[bool]:
    """Whether each parameter of the kernel points to `const`; an empty list if the source does not show the
    parameters."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name.partition('<')[0])}\s*\(([^)]*)\)", source)
    parameters = re.split(r",(?![^<]*>)", found[1]) if found else []
    return [re.search(r"\bconst\b[^*]*\*", each) is not None for each in parameters]
