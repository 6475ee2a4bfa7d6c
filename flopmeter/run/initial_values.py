"""Large weights on the CPU, before a script moves them to the device named cuda: they get no random values.

Works around: a model of many billion weights that is built on the CPU fills the memory of a machine without a GPU, and
drawing its weights takes minutes; nothing that is counted depends on them.
Until: never. A tensor's memory is taken by the page when it is first written, so weights that nobody writes take none
(and are zero).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.run.device import NamedCuda
from flopmeter.run.patches import Patch

LEAST_BYTES = 32 * 1024 * 1024  # from here on the C library asks the system for memory of its own, which is zero
_DRAWS = ("uniform_", "normal_", "trunc_normal_")


class InitialValues:
    """Leaves out the drawing of large parameters on the CPU."""

    def __init__(self, named: NamedCuda, note: Callable[[str], None]) -> None:
        self._named, self._note = named, note
        self._left_out: set[int] = set()  # addresses: a program may draw again by `weight.data`

    def patches(self) -> Iterator[Patch]:
        for name in _DRAWS:
            for owner in (Tensor, nn.init):
                if draw := getattr(owner, name, None):
                    yield Patch(owner, name, self._unless_large(draw), "large weights on the CPU stay without values")

    def _unless_large(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def drawn(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return tensor if self._is_left_out(tensor) else draw(tensor, *args, **kwargs)

        return drawn

    def _is_left_out(self, tensor: Tensor) -> bool:
        if not self._named.is_open or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            return False
        if tensor.nbytes < LEAST_BYTES or tensor.layout is not torch.strided:
            return False
        address = tensor.untyped_storage().data_ptr()
        if isinstance(tensor, nn.Parameter):
            self._left_out.add(address)
            self._note(f"weights of {LEAST_BYTES >> 20} MiB and more that are made on the CPU get no random values")
        return address in self._left_out
