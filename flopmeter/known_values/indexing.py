"""Indexing: what a mask or a list of places picks, and what CUDA runs before the op's own kernel.

No dispatch mode sees the latter: `nonzero` finds the places that a mask holds, and the host waits for their number;
indices of the host, and a number that is put at places, are copied to the device; a number that is put under a mask is
a masked_fill (expandTensors in IndexingUtils.h; make_info, _index_put_impl_ and canDispatchToMaskedFill in
TensorAdvancedIndexing.cpp and its Utils.h, all in aten/src/ATen/native).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.known_values.data_dependent import assume_mask, shape
from flopmeter.known_values.index_lists import index_lists
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import no_modes
from flopmeter.torch_names.operators import aten_overloads as aten

GATHERS = (aten.index.Tensor, aten._unsafe_index.Tensor)
_FILLS = {aten.index_put_.default: aten.masked_fill_.Scalar, aten.index_put.default: aten.masked_fill.Scalar}
_MASKS = (torch.bool, torch.uint8)


def masked_select(known: Knowledge, call: Invocation) -> Any:
    """If the mask is known, the features need not be: the call becomes an index."""
    features, mask = call.args
    assume_mask(known, call, mask)
    if not features.is_meta or not known.values.knows(mask) or known.values.knows(features):
        return shape(known, call)
    with no_modes():
        features, mask = torch.broadcast_tensors(features, mask)
    return index(known, call._replace(func=aten.index.Tensor, args=(features, [mask])))


def index(known: Knowledge, call: Invocation) -> Any:
    """If all masks are known, the call becomes one with the places that they hold."""
    features, indices = call.args[:2]
    if not features.is_meta:
        return call.run()
    masks = [item for item in indices if item is not None and item.dtype in _MASKS]
    if not masks:
        _read_index_lists(known, call)
    for mask in masks:
        assume_mask(known, call, mask)
    if known.knows_all(masks):
        places = [place for item in indices for place in _on_device(known, item)]
        if not call.argument(3, "accumulate", False):
            places = _alike(known, places)
        if len(places) != len(indices) or any(new is not old for new, old in zip(places, indices, strict=True)):
            call = known.rewritten(call, call.func, (features, places, *call.args[2:]))
    elif not call.writes and call.func in GATHERS:
        raise DataDependentError(str(call.func))
    return known.replay(call)


def _on_device(known: Knowledge, item: Tensor | None) -> Sequence[Tensor | None]:
    """The indices that a kernel takes for this one: of a mask one for each dimension."""
    if item is None or (item.is_meta and item.dtype not in _MASKS):
        return [item]
    if item.dtype not in _MASKS:
        return [_copied(known, item)]
    with no_modes():
        value = known.values.read(item)
        found = (value if value.dim() else value.reshape(1)).nonzero()
        if not item.is_meta:
            return [_copied(known, column) for column in found.unbind(1)]
        places = known.lift(found.t().contiguous()).t()  # one dimension after the other, as Nonzero.cu writes them
        known.before.append((aten.nonzero.default, (item,), {}, places))
        return places.unbind(1)


def _alike(known: Knowledge, places: list[Tensor | None]) -> list[Tensor | None]:
    """Several indices as a kernel wants them: of one size and with the same strides, for which those that are repeated
    are written out. (One that sorts takes them as they are.)"""
    given: Sequence[Tensor] = [place for place in places if place is not None]
    if len(given) < 2:
        return places
    with no_modes():
        given = torch.broadcast_tensors(*given)
        if len({each.stride() for each in given}) == 1:
            return places
        alike = iter([each if each.is_contiguous() else _written_out(known, each) for each in given])
    return [place if place is None else next(alike) for place in places]


def _written_out(known: Knowledge, repeated: Tensor) -> Tensor:
    copy = torch.empty(repeated.shape, dtype=repeated.dtype, device="meta")
    if known.values.knows(repeated):
        known.set(copy, known.values.read(repeated).contiguous())
    known.before.append((aten.clone.default, (repeated,), {"memory_format": torch.contiguous_format}, copy))
    return copy


def _copied(known: Knowledge, item: Tensor) -> Tensor:
    """A tensor of the host as a copy on the device, for which the host waits."""
    with no_modes():
        copy = known.lift(item.contiguous())
    known.before.append((aten._to_copy.default, (item,), {"device": copy.device}, copy))
    return copy


def index_put(known: Knowledge, call: Invocation) -> Any:
    """If several different elements are written to the same position, torch does not say which one stays, so the result
    is unknown. A mask that is written into another tensor makes that a mask too, so that both pick the same number of
    elements."""
    target, indices, values = call.args[:3]
    if target.is_meta and not values.is_meta and values.numel() == 1:
        if (mask := _only_mask(call)) is not None:
            return known.replay(known.rewritten(call, _FILLS[call.func], (target, mask, values.item())))
        values = _copied(known, values)
        call = known.rewritten(call, call.func, (target, indices, values, *call.args[3:]))
    if values.is_meta and values.dim():
        assume_mask(known, call, values)
    given = [(item, size) for item, size in zip(indices, target.shape, strict=False) if item is not None]
    are_positions = all(item.dtype not in _MASKS for item, _ in given)
    adds_up = call.argument(3, "accumulate", False) or values.numel() == 1
    if are_positions and not adds_up and known.knows_all(call.tensors):
        with no_modes():
            columns = torch.broadcast_tensors(*(known.values.read(item) % size for item, size in given))
            positions = torch.stack([column.flatten() for column in columns], 1).unique(dim=0, return_inverse=True)[1]
            rows = torch.arange(len(positions))  # assumed to differ, if the indices skip a dimension
            if len(given) == len(indices):
                rest = target.shape[len(indices) :]
                rows = known.values.read(values).expand(*columns[0].shape, *rest).reshape(len(positions), *rest)
            if _is_ambiguous(positions, rows):
                return known.run_unknown(call)
    return index(known, call)


def _only_mask(call: Invocation) -> Tensor | None:
    """The mask of an index_put that is a masked_fill, with the target's number of dimensions; None for other calls."""
    target, indices = call.args[:2]
    given = [item for item in indices if item is not None]
    if call.func not in _FILLS or call.argument(3, "accumulate", False) or len(given) != 1:
        return None
    (mask,) = given
    if not mask.is_meta or mask.dtype not in _MASKS:
        return None
    with no_modes():
        return mask.reshape(*mask.shape, *(1,) * (target.dim() - len(indices) + 1 - mask.dim()))


def scatter(known: Knowledge, call: Invocation) -> Any:
    """Handled as index_put is."""
    if known.knows_all(call.tensors):
        dim, index, source = call.argument(1, "dim"), call.argument(2, "index"), call.argument(3, "src")
        with no_modes():
            index, source = (torch.atleast_1d(known.values.read(each)) for each in (index, source))
            positions = index.movedim(dim, 0).reshape(index.shape[dim], -1)
            columns = positions.shape[1]
            positions = positions * columns + torch.arange(columns)
            written = source[tuple(map(slice, index.shape))].movedim(dim, 0)
            if _is_ambiguous(positions.flatten(), written.reshape(-1, 1)):
                return known.run_unknown(call)
    return known.replay(call)


def index_copy(known: Knowledge, call: Invocation) -> Any:
    """Handled as index_put is."""
    if known.knows_all(call.tensors):
        dim, index, source = call.argument(1, "dim"), call.argument(2, "index"), call.argument(3, "source")
        with no_modes():
            index, source = (torch.atleast_1d(known.values.read(each)) for each in (index, source))
            if _is_ambiguous(index, source.movedim(dim, 0)):
                return known.run_unknown(call)
    return known.replay(call)


def _is_ambiguous(positions: Tensor, rows: Tensor) -> bool:
    """Whether two different rows are written to the same position."""
    in_order, order = positions.sort()
    differ = rows[order].diff(dim=0) != 0
    return bool(differ[in_order.diff() == 0].any())


def _read_index_lists(known: Knowledge, call: Invocation) -> None:
    """Sets the values of index tensors that torch made of lists of numbers, and records their copies to the device, as
    for torch.tensor."""
    unknown = [item for item in call.args[1] if item is not None and item.is_meta and not known.values.knows(item)]
    lists = index_lists() if unknown else []
    if unknown and [(len(numbers),) for numbers in lists] == [tuple(item.shape) for item in unknown]:
        for item, numbers in zip(unknown, lists, strict=True):
            with no_modes():
                host = torch.tensor(numbers, dtype=item.dtype, device="cpu")
                known.set(item, host)
            known.on_numbers(host)
            known.before.append((aten._to_copy.default, (host,), {"device": item.device}, item))
