"""Tensors, as ops see them: regions of storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from flopmeter.records.extents import count_one, dims_of


class TensorSpec(NamedTuple):
    """A region of a storage: what an op sees of a tensor. Shape, stride and offset are in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int  # in a Call: numbered by first appearance; in an Op: unique in the trace
    offset: int
    device: str  # device type
    held_bytes: int | None = None  # by a sparse or nested tensor: values and indices; the strides are dense ones
    held_values: int | None = None  # elements among them, of a sparse tensor; a block counts each of its own
    is_pinned: bool | None = None  # of the host's memory in a copy: whether it is page-locked; None: not known

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_strided(self) -> bool:
        """Whether the strides are the tensor's own: a sparse, nested or opaque one has none."""
        return self.held_bytes is None

    @property
    def distinct_elements(self) -> int:
        """How many elements of the storage the region covers: an expanded (stride 0) dimension counts once, and so does
        an element that several windows share."""
        return _distinct_elements(self.shape, self.stride)

    @property
    def nbytes(self) -> int:
        """Bytes touched when every element of the region is read or written once."""
        if self.held_bytes is not None:
            return self.held_bytes
        return self.distinct_elements * self.dtype.itemsize

    @property
    def is_floating(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


def growth(pairs: Iterable[tuple[TensorSpec, TensorSpec]]) -> Fraction:
    """How many times as many elements the tensor has that grew most, of these before and now."""
    return max((Fraction(now.numel, before.numel) for before, now in pairs if before.numel), default=Fraction(1))


@lru_cache(maxsize=4096)
def _distinct_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    return 0 if 0 in shape else count_one(dims_of(shape, stride))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, such as the arguments or the result of an op."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
