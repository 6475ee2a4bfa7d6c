"""The two layouts that convolutions know: dense (NCHW) and channels-last (NHWC, and NDHWC in three dimensions)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions
torch_strides = torch.Tensor.stride
"""The strides of a tensor, also where a program keeps a number of that name on a parameter (Megatron-LM of 2020, and
gpt-neox, do)."""

_DIMS_FROM_INNERMOST = {4: (1, 3, 2, 0), 5: (1, 4, 3, 2, 0)}


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether these strides count as channels-last for torch, gaps allowed: `suggest_memory_format` in
    c10/core/MemoryFormat.h. False if both layouts are the same memory (one channel, or one position)."""
    dims = _DIMS_FROM_INNERMOST.get(len(shape))
    if dims is None or stride[1] == 0 or 0 in shape:
        return False
    least = 0
    for dim in dims:
        if stride[dim] < least or (dim == 0 and least == stride[1]):
            return False
        least = stride[dim] * shape[dim]
    return True


def is_dense(shape: Sequence[int], stride: Sequence[int], *, channels_last: bool) -> bool:
    """Whether the tensor is contiguous in that layout, like `is_contiguous(memory_format=...)`."""
    expected = dense_strides(shape, channels_last=channels_last)
    return 0 in shape or all(
        size == 1 or own == dense for size, own, dense in zip(shape, stride, expected, strict=True)
    )


def dense_strides(shape: Sequence[int], *, channels_last: bool) -> tuple[int, ...]:
    """The strides, in elements, of a tensor that is contiguous in that layout."""
    dims: Sequence[int] = range(len(shape) - 1, -1, -1)
    if channels_last:
        dims = _DIMS_FROM_INNERMOST.get(len(shape), dims)
    return strides_of(shape, dims)


def strides_of(shape: Sequence[int], dims_from_innermost: Iterable[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor without gaps whose dimensions lie in that order."""
    strides, step = [0] * len(shape), 1
    for dim in dims_from_innermost:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)
