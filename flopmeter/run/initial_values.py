"""Large weights on the CPU, before a script moves them to the device named cuda: they get no random values.

Works around: a model of many billion weights that is built on the CPU fills the memory of a machine without a GPU, and
drawing its weights takes minutes; nothing that is counted depends on them.
Until: never. A tensor's memory is taken by the page when it is first written, so weights that nobody writes take none
(and are zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from flopmeter.known_values.values import PAGED_BYTES
from flopmeter.records.memory_format import torch_strides
from flopmeter.run.device import NamedCuda, allowed_on_lazy_parameters
from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around

MOST_DRAWN_BYTES = 1 << 30  # of a program's large weights: the first ones are drawn, as a small model is
_CASTS = ("to", "half", "bfloat16", "float", "double")
_DRAWS = ("uniform_", "normal_", "trunc_normal_")


class InitialValues:
    """Leaves out the drawing of large parameters on the CPU."""

    def __init__(self, named: NamedCuda, note: Callable[[str], None]) -> None:
        self._named, self._note = named, note
        self._drawn_bytes = 0
        self._left_out: dict[int, StorageWeakRef] = {}  # by address, which another storage may have later

    def patches(self) -> Iterator[Patch]:
        reason = "casts of weights without values have none either"
        casts = [Patch(Tensor, name, self._unless_left_out(getattr(Tensor, name)), reason) for name in _CASTS]
        yield allowed_on_lazy_parameters(casts)
        yield from casts
        for name in _DRAWS:
            for owner in (Tensor, nn.init):
                if draw := getattr(owner, name, None):
                    yield Patch(owner, name, self._unless_large(draw), "large weights on the CPU stay without values")

    @around
    def _unless_large(self, draw: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self._is_large(tensor):
            return draw(tensor, *args, **kwargs)
        if isinstance(tensor, nn.Parameter) and not self._is_left_out(tensor):
            self._drawn_bytes += tensor.nbytes
            if self._drawn_bytes > MOST_DRAWN_BYTES:
                self._note("weights that are made on the CPU, beyond the first GiB, get no random values")
                self._leave_out(tensor)
        return tensor if self._is_left_out(tensor) else draw(tensor, *args, **kwargs)

    @around
    def _unless_left_out(self, cast: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the cast unless the weights are left out: only a cast on the CPU writes memory."""
        if not self._left_out or not self._is_large(tensor) or not self._is_left_out(tensor):
            return cast(tensor, *args, **kwargs)
        like = cast(tensor.detach().flatten()[:1], *args, **kwargs)
        if like.is_meta or like.dtype == tensor.dtype:
            return cast(tensor, *args, **kwargs)
        new = torch.empty_strided(tensor.shape, torch_strides(tensor), dtype=like.dtype, device="cpu")
        self._leave_out(new)
        return new

    def _is_large(self, tensor: Tensor) -> bool:
        """Whether it is a large plain tensor on the CPU."""
        if not self._named.is_open or type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            return False
        return tensor.layout is torch.strided and tensor.nbytes >= PAGED_BYTES

    def _leave_out(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._left_out[storage.data_ptr()] = StorageWeakRef(storage)

    def _is_left_out(self, tensor: Tensor) -> bool:
        """Whether the drawing of the tensor's storage was left out. A program may draw again by `weight.data`, another
        tensor of the same storage."""
        known = self._left_out.get(tensor.untyped_storage().data_ptr())
        return known is not None and not known.expired()
