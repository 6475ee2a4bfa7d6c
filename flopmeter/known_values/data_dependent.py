"""Ops that answer with data: a Python value, a shape that depends on the data, or what a mask or an index picks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values import stand_ins
from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.known_values.index_lists import index_lists
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import no_modes, spans_storage
from flopmeter.torch_names.operators import aten_overloads as aten

MOST_OF_A_MASK = 1 << 22  # elements of a mask that is assumed: a detector's has some hundred thousand anchors
UNIQUE = (aten._unique2.default, aten.unique_consecutive.default)
GATHERS = (aten.index.Tensor, aten._unsafe_index.Tensor)


def ask(known: Knowledge, call: Invocation) -> Any:
    """.item(), bool(t), equal, allclose: the result is a Python value."""
    if all(not tensor.is_meta for tensor in call.tensors):
        if not call.tensors:  # numbers that TorchScript compares: they come without the tensors that hold them
            call = call._replace(args=tuple(torch.tensor(number, device="cpu") for number in call.args))
        return call.run()
    if known.knows_all(call.tensors):
        return known.answer(call)
    if known.assume.stands_in and call.func is aten._local_scalar_dense.default:
        (number,) = call.tensors
        return stand_ins.of_number(known, number, call.func)
    raise DataDependentError(str(call.func))


def shape(known: Knowledge, call: Invocation) -> Any:
    """nonzero, unique, bincount: the shape of the result depends on the data."""
    if all(not tensor.is_meta for tensor in call.tensors):
        return call.run()
    _assume_mask(known, call, call.tensors[0])
    if known.knows_all(call.tensors):
        return known.lift(known.answer(call))
    if call.func in UNIQUE and (known.assume.mask_fraction is not None or known.assume.stands_in):
        return _assume_different(known, call, known.assume.mask_fraction)
    if call.func is aten.nonzero.default and known.assume.mask_fraction is not None:
        return _assume_not_zero(known, call, known.assume.mask_fraction)
    if call.func is aten.bincount.default and known.assume.stands_in and call.argument(2, "minlength", 0):
        return _count_below(known, call)
    if call.func is aten.repeat_interleave.Tensor and call.kwargs.get("output_size") is None:
        raise DataDependentError(str(call.func))
    try:
        return call.run()
    except NotImplementedError:
        raise DataDependentError(str(call.func)) from None


def masked_select(known: Knowledge, call: Invocation) -> Any:
    """If the mask is known, the features need not be: the call becomes an index."""
    features, mask = call.args
    _assume_mask(known, call, mask)
    if not features.is_meta or not known.values.knows(mask) or known.values.knows(features):
        return shape(known, call)
    with no_modes():
        features, mask = torch.broadcast_tensors(features, mask)
    return index(known, call._replace(func=aten.index.Tensor, args=(features, [mask])))


def index(known: Knowledge, call: Invocation) -> Any:
    """If a bool mask is known, the call becomes one with the positions of its true elements."""
    features, indices = call.args[:2]
    if not features.is_meta:
        return call.run()
    masks = [item for item in indices if item is not None and item.dtype in (torch.bool, torch.uint8)]
    if not masks:
        _read_index_lists(known, call)
        return known.replay(call)
    for mask in masks:
        _assume_mask(known, call, mask)
    if known.knows_all(masks):
        positions: list[Tensor | None] = []
        for item in indices:
            positions += _positions(known, item) if any(item is mask for mask in masks) else [item]
        call = known.rewritten(call, call.func, (features, positions, *call.args[2:]))
        result = known.replay(call)
        known.groups = (torch.broadcast_shapes(*(item.shape for item in positions if item is not None)).numel(),)
        return result
    if not call.writes and call.func in GATHERS:
        raise DataDependentError(str(call.func))
    return known.replay(call)


def index_put(known: Knowledge, call: Invocation) -> Any:
    """If several different elements are written to the same position, torch does not say which one stays, so the result
    is unknown. A mask that is written into another tensor makes that a mask too, so that both pick the same number of
    elements."""
    target, indices, values = call.args[:3]
    if values.is_meta and values.dim():
        _assume_mask(known, call, values)
    given = [(item, size) for item, size in zip(indices, target.shape, strict=False) if item is not None]
    are_places = all(item.dtype not in (torch.bool, torch.uint8) for item, _ in given)
    adds_up = call.argument(3, "accumulate", False) or values.numel() == 1
    if are_places and not adds_up and known.knows_all(call.tensors):
        with no_modes():
            columns = torch.broadcast_tensors(*(known.values.read(item) % size for item, size in given))
            places = torch.stack([column.flatten() for column in columns], 1).unique(dim=0, return_inverse=True)[1]
            rows = torch.arange(len(places))  # taken to differ, where the values lie in another order
            if len(given) == len(indices):
                rest = target.shape[len(indices) :]
                rows = known.values.read(values).expand(*columns[0].shape, *rest).reshape(len(places), *rest)
            if _is_open(places, rows):
                return known.run_unknown(call)
    return index(known, call)


def scatter(known: Knowledge, call: Invocation) -> Any:
    """scatter: as index_put."""
    if known.knows_all(call.tensors):
        dim, index, source = call.argument(1, "dim"), call.argument(2, "index"), call.argument(3, "src")
        with no_modes():
            index, source = (torch.atleast_1d(known.values.read(each)) for each in (index, source))
            places = index.movedim(dim, 0).reshape(index.shape[dim], -1)
            columns = places.shape[1]
            places = places * columns + torch.arange(columns)
            written = source[tuple(map(slice, index.shape))].movedim(dim, 0)
            if _is_open(places.flatten(), written.reshape(-1, 1)):
                return known.run_unknown(call)
    return known.replay(call)


def index_copy(known: Knowledge, call: Invocation) -> Any:
    """Handled as index_put is."""
    if known.knows_all(call.tensors):
        dim, index, source = call.argument(1, "dim"), call.argument(2, "index"), call.argument(3, "source")
        with no_modes():
            index, source = (torch.atleast_1d(known.values.read(each)) for each in (index, source))
            if _is_open(index, source.movedim(dim, 0)):
                return known.run_unknown(call)
    return known.replay(call)


def _is_open(places: Tensor, rows: Tensor) -> bool:
    """Whether different rows are written to one of these places."""
    in_order, order = places.sort()
    differ = rows[order].diff(dim=0) != 0
    return bool(differ[in_order.diff() == 0].any())


def _read_index_lists(known: Knowledge, call: Invocation) -> None:
    """Makes index tensors known that torch made from lists of numbers, if the indexed tensor is known."""
    if not known.values.knows(call.args[0]):
        return
    unknown = [item for item in call.args[1] if item is not None and not known.values.knows(item)]
    if not unknown:
        return
    lists = index_lists()
    if [(len(numbers),) for numbers in lists] == [tuple(item.shape) for item in unknown]:
        for item, numbers in zip(unknown, lists, strict=True):
            with no_modes():
                known.set(item, torch.tensor(numbers, dtype=item.dtype, device="cpu"))


def _positions(known: Knowledge, mask: Tensor) -> list[Tensor]:
    with no_modes():
        value = known.values.read(mask)
        columns = (value if value.dim() else value.reshape(1)).nonzero().unbind(1)
    return [known.lift(column.contiguous()) for column in columns]


def suppressed(known: Knowledge, call: Invocation) -> Any:
    """torchvision's nms, which returns the places of the boxes to keep: mask_fraction of all boxes, evenly spread."""
    boxes = call.args[0]
    if not boxes.is_meta:
        return call.run()
    fraction = known.assume.mask_fraction
    if fraction is None:
        raise DataDependentError(str(call.func))
    n, kept = len(boxes), round(fraction * len(boxes))
    with no_modes():
        result = torch.empty(kept, dtype=torch.int64, device="meta")
        if known.is_small(result):
            known.set(result, torch.arange(kept, device="cpu") * n // max(kept, 1))
    known.assume.note(f"mask_fraction={fraction:g}", call.func)
    return result


def _assume_different(known: Knowledge, call: Invocation, fraction: float | None) -> Any:
    """mask_fraction: this share of unknown numbers differ from each other, though stand-ins are all alike."""
    numbers = call.tensors[0]
    n = numbers.numel()
    rule = "unknown numbers are alike" if fraction is None else f"mask_fraction={fraction:g} (of numbers, differ)"
    with no_modes():
        turns = torch.arange(n, device="cpu") * max(round((fraction or 0) * n), 1) // max(n, 1)
        found, *places_and_counts = call.func(turns.view(numbers.shape), *call.args[1:])
        known.assume.note(rule, call.func)
        return tuple(each.to("meta") for each in (found.to(numbers.dtype), *places_and_counts))


def _assume_not_zero(known: Knowledge, call: Invocation, fraction: float) -> Any:
    """mask_fraction: this share of unknown numbers are not zero, evenly spread."""
    (numbers,) = call.tensors
    if numbers.numel() > MOST_OF_A_MASK:
        raise DataDependentError(str(call.func))
    known.assume.note(f"mask_fraction={fraction:g} (of numbers, not zero)", call.func)
    with no_modes():
        return known.lift(_spread(fraction, numbers.numel()).view(numbers.shape).nonzero())


def _count_below(known: Knowledge, call: Invocation) -> Tensor:
    """bincount of unknown numbers: the program says how many counts it expects, as for a confusion matrix."""
    length, weights = call.argument(2, "minlength", 0), call.argument(1, "weights", None)
    known.assume.note(f"no number reaches minlength={length}", call.func)
    with no_modes():
        return torch.empty(length, dtype=torch.int64 if weights is None else weights.dtype, device="meta")


def _assume_mask(known: Knowledge, call: Invocation, mask: Tensor) -> None:
    """mask_fraction: round(fraction * n) elements of an unknown mask are true, evenly spread. If the mask is a part of
    a larger one, the whole is assumed. A part that skips elements gets no assumption, since the elements that it skips
    may be the true ones."""
    fraction = known.assume.mask_fraction
    is_mask = mask.dtype in (torch.bool, torch.uint8) and mask.is_contiguous()
    if fraction is None or not is_mask or known.values.knows(mask):
        return
    if not spans_storage(mask):
        with no_modes():
            storage = mask.untyped_storage()
            whole = torch.empty(0, dtype=mask.dtype, device="meta")
            mask = whole.set_(storage, 0, (storage.nbytes(),), (1,))
    n = mask.numel()
    if n > MOST_OF_A_MASK:
        return
    with no_modes():
        known.values.write(mask, _spread(fraction, n).view(mask.shape).to(mask.dtype))
    known.assume.note(f"mask_fraction={fraction:g}", call.func)


def _spread(fraction: float, n: int) -> Tensor:
    """A mask of n elements of which round(fraction * n) are true, evenly spread."""
    steps = torch.arange(n + 1, device="cpu") * round(fraction * n) // max(n, 1)
    return steps[1:] > steps[:-1]
