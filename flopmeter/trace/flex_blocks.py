"""How many blocks of the scores a BlockMask leaves: from its values, or from its mask_mod on the CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.known_values import DataDependentError, KnownValues
from flopmeter.known_values.values import address, no_modes, spans_storage
from flopmeter.records import BlockCount
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.private import no_dispatch_modes

MOST_PAIRS = 1 << 21
"""Pairs for which mask_mod runs at a time: larger tensors leave the CPU's caches."""
UNKNOWN_MASK = "every block of a mask_mod that reads values which are not known"

Maps = tuple[Tensor, Tensor | None]
"""For each block whether it is computed with mask_mod, and whether without; None: there is no such list."""


class BlockMaskArguments(NamedTuple):
    """A BlockMask as the higher-order op takes it (`BlockMask.as_tuple`): the lengths; the blocks by rows of queries,
    first the partial and then the full ones; the same by columns of keys; in newer torch more; the sizes of a block;
    mask_mod."""

    of_keys: list[Tensor]  # numbers and indices of the blocks of each row of queries
    of_queries: list[Tensor]
    block: tuple[int, int]
    mask_mod: Callable[..., Tensor]
    has_full: bool

    @classmethod
    def of(cls, block_mask: Sequence[Any]) -> BlockMaskArguments:
        of_keys, of_queries = (
            [each for each in block_mask[start : start + 4] if isinstance(each, Tensor)] for start in (2, 6)
        )
        rows, columns, mask_mod = block_mask[-3:]
        return cls(of_keys, of_queries, (int(rows), int(columns)), mask_mod, block_mask[4] is not None)

    @property
    def heads(self) -> int:
        return self.of_keys[0].shape[1]


def count_blocks(
    mask: BlockMaskArguments, buffers: Sequence[Any], queries: int, keys: int, values: KnownValues
) -> BlockCount:
    """The blocks that the mask leaves of squares of queries x keys.

    If mask_mod reads values that are not known, all blocks are assumed to be computed; the report prints this.
    """
    rows, columns = -(-queries // mask.block[0]), -(-keys // mask.block[1])
    sequences, heads = mask.of_keys[0].shape[:2]
    shape = (sequences, heads, rows, columns)
    if rows == columns == 1:
        partial, full = torch.ones(shape, dtype=torch.bool, device="cpu"), None
    else:
        partial, full = _maps(mask, buffers, shape, queries, keys, values)
    with no_modes():
        return _count(partial, full, mask.block, queries, keys)


def _maps(
    mask: BlockMaskArguments,
    buffers: Sequence[Any],
    shape: tuple[int, int, int, int],
    queries: int,
    keys: int,
    values: KnownValues,
) -> Maps:
    """Two maps of blocks: those that are computed with mask_mod, and those that are computed without it."""
    if all(map(values.values.knows, mask.of_keys)):
        with no_modes():
            return _dense(mask.of_keys, shape, values)
    if (seen := _seen(mask, values)) is not None:
        return seen
    try:
        partial, full = _evaluate(mask, buffers, shape, queries, keys, values)
    except DataDependentError:
        values.assume.note(UNKNOWN_MASK, "flex_attention")
        return torch.ones(shape, dtype=torch.bool, device="cpu"), None
    maps = (partial, full) if mask.has_full else (partial | full, None)
    with no_modes():
        _remember(mask, maps, values)
    return maps


def _dense(tensors: Sequence[Tensor], shape: tuple[int, int, int, int], values: KnownValues) -> Maps:
    """The lists of blocks as maps: the first half for partial blocks, the second for full ones."""
    maps = []
    for number, indices in zip(tensors[::2], tensors[1::2], strict=True):
        counts, listed = values.values.read(number), values.values.read(indices)
        is_listed = torch.arange(listed.shape[-1], device="cpu") < counts.unsqueeze(-1)
        dense = torch.zeros((*shape[:3], max(shape[3], listed.shape[-1]) + 1), dtype=torch.bool, device="cpu")
        columns = torch.where(is_listed, listed, dense.shape[-1] - 1).long()
        maps.append(dense.scatter_(-1, columns, True)[..., : shape[3]])
    return maps[0], maps[1] if len(maps) > 1 else None


def _remember(mask: BlockMaskArguments, maps: Maps, values: KnownValues) -> None:
    """The values of the BlockMask are known from now on. One of several that were cut from a mask, as for the
    microbatches of a pipeline, lies in a storage of which the rest is unknown: its maps are kept aside."""
    if not all(map(spans_storage, mask.of_keys)):
        storage, version = mask.of_keys[0].untyped_storage(), _version(mask.of_keys[0])
        values.masks_in_parts[_place(mask.of_keys[0])] = (weakref.ref(storage), version, maps)
        return
    for number, indices, each in zip(mask.of_keys[::2], mask.of_keys[1::2], maps, strict=False):
        assert each is not None
        values.set(number, each.sum(-1).to(number.dtype))
        ordered = torch.argsort(each.int(), dim=-1, descending=True, stable=True).to(indices.dtype)
        if indices.shape == ordered.shape:
            values.set(indices, ordered)


def _seen(mask: BlockMaskArguments, values: KnownValues) -> Maps | None:
    """The maps of a part that was evaluated before, unless it was written to since."""
    number = mask.of_keys[0]
    if (kept := values.masks_in_parts.get(_place(number))) is None:
        return None
    maps: Maps
    storage, version, maps = kept
    if storage() is None or version != _version(number):
        del values.masks_in_parts[_place(number)]
        return None
    return maps


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    return address(tensor), int(tensor.storage_offset()), tensor.shape


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _OnValues(TorchDispatchMode):
    """Runs ops on the CPU, with the known values of the meta tensors among their arguments."""

    def __init__(self, values: KnownValues):
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, known = (args, kwargs or {}), self._known.values
        if any(tensor.is_meta and (not known.knows(tensor) or known.is_blank(tensor)) for tensor in tensors_in(given)):
            raise DataDependentError("flex_attention")
        args, kwargs = self._known.real(given)
        return func(*args, **kwargs)


def _evaluate(
    mask: BlockMaskArguments,
    buffers: Sequence[Any],
    shape: tuple[int, int, int, int],
    queries: int,
    keys: int,
    values: KnownValues,
) -> tuple[Tensor, Tensor]:
    """The maps of partial and of full blocks, by mask_mod on each pair.

    Raises DataDependentError where it reads values that are not known.
    """
    from torch.nn.attention.flex_attention import create_mask

    sequences, heads, rows, columns = shape
    some, every = (torch.zeros(shape, dtype=torch.bool, device="cpu") for _ in range(2))
    high, wide = mask.block
    at_once = max(MOST_PAIRS // (high * wide), 1)  # blocks
    in_a_row = min(at_once, columns)
    with no_dispatch_modes(), _OnValues(values), torch.no_grad():
        for sequence, head, row, column in product(
            range(sequences), range(heads), range(0, rows, at_once // in_a_row), range(0, columns, in_a_row)
        ):
            here = slice(row, row + at_once // in_a_row), slice(column, column + in_a_row)
            first = sequence, head, row * high, column * wide
            height, width = min(here[0].stop * high, queries) - first[2], min(here[1].stop * wide, keys) - first[3]
            seen = create_mask(_moved(mask.mask_mod, buffers, first), 1, 1, height, width, "cpu")[0, 0]
            some[(sequence, head, *here)], every[(sequence, head, *here)] = _by_block(seen, mask.block)
    return some & ~every, every


def _moved(
    mask_mod: Callable[..., Tensor], buffers: Sequence[Any], first: tuple[int, ...]
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The function with indices that count from `first` and have 32 bits, as in the kernel."""

    def moved(*indices: Tensor) -> Tensor:
        return mask_mod(*((index + start).int() for index, start in zip(indices, first, strict=True)), *buffers)

    return lambda b, h, query, key: moved(b, h, query, key)  # torch counts the arguments


def _by_block(seen: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Which blocks of a mask hold a visible pair, and which hold only visible pairs. torch pads with hidden pairs."""
    queries, keys = seen.shape
    padded = torch.nn.functional.pad(seen, (0, -keys % block[1], 0, -queries % block[0])).contiguous()
    by_rows = padded.view(torch.uint8).unflatten(0, (-1, block[0]))  # the CPU compares many bytes at a time
    some, every = by_rows.amax(1), by_rows.amin(1)
    return some.unflatten(1, (-1, block[1])).amax(2).bool(), every.unflatten(1, (-1, block[1])).amin(2).bool()


def _count(partial: Tensor, full: Tensor | None, block: tuple[int, int], queries: int, keys: int) -> BlockCount:
    computed = partial if full is None else partial | full
    sequences, heads, rows, columns = computed.shape
    heights = _sizes(rows, block[0], queries)
    widths = _sizes(columns, block[1], keys)
    pairs, masked = (int((each * heights[:, None] * widths).sum()) for each in (computed, partial))
    ends = (torch.arange(rows, device="cpu") * block[0] + heights)[:, None]
    is_later = torch.arange(columns, device="cpu") * block[1] >= ends
    return BlockCount(
        squares=sequences * heads,
        block=block,
        computed=int(computed.sum()),
        pairs=pairs,
        masked_pairs=masked,
        seen_keys=int((computed.any(2) * widths).sum()),
        passes_diagonal=bool((computed & is_later).any()),
    )


def _sizes(number: int, block: int, total: int) -> Tensor:
    """The sizes of the blocks that `total` is cut into; the last may be smaller."""
    starts = torch.arange(number, dtype=torch.int64, device="cpu") * block
    return (total - starts).clamp(max=block)
