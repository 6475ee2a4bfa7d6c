"""Ops that answer with data: a Python value, or a shape that depends on the data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values import stand_ins
from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import MAX_COPIED_ELEMENTS, no_modes, spans_storage
from flopmeter.torch_names.operators import aten_overloads as aten

UNIQUE = (aten._unique2.default, aten.unique_consecutive.default)


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
    assume_mask(known, call, call.tensors[0])
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
    known.assume.note(f"mask_fraction={fraction:g} (of the boxes is kept)", call.func)
    return result


def _assume_different(known: Knowledge, call: Invocation, fraction: float | None) -> Any:
    """mask_fraction: this share of unknown numbers differ from each other, though stand-ins are all alike."""
    numbers = call.tensors[0]
    n = numbers.numel()
    rule = "unknown numbers are alike" if fraction is None else f"mask_fraction={fraction:g} (of the numbers differ)"
    with no_modes():
        turns = torch.arange(n, device="cpu") * max(round((fraction or 0) * n), 1) // max(n, 1)
        found, *places_and_counts = call.func(turns.view(numbers.shape), *call.args[1:])
        known.assume.note(rule, call.func)
        return tuple(each.to("meta") for each in (found.to(numbers.dtype), *places_and_counts))


def _assume_not_zero(known: Knowledge, call: Invocation, fraction: float) -> Any:
    """mask_fraction: this share of unknown numbers are not zero, evenly spread."""
    (numbers,) = call.tensors
    if numbers.numel() > MAX_COPIED_ELEMENTS:
        raise DataDependentError(str(call.func))
    known.assume.note(f"mask_fraction={fraction:g} (of the numbers is not zero)", call.func)
    with no_modes():
        return known.lift(_spread(fraction, numbers.numel()).view(numbers.shape).nonzero())


def _count_below(known: Knowledge, call: Invocation) -> Tensor:
    """bincount of unknown numbers: the program says how many counts it expects, as for a confusion matrix."""
    length, weights = call.argument(2, "minlength", 0), call.argument(1, "weights", None)
    known.assume.note(f"no number reaches minlength={length}", call.func)
    with no_modes():
        return torch.empty(length, dtype=torch.int64 if weights is None else weights.dtype, device="meta")


def assume_mask(known: Knowledge, call: Invocation, mask: Tensor) -> None:
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
    if n > MAX_COPIED_ELEMENTS:
        return
    with no_modes():
        known.values.write(mask, _spread(fraction, n).view(mask.shape).to(mask.dtype))
    known.assume.note(f"mask_fraction={fraction:g} (of a mask holds)", call.func)


def _spread(fraction: float, n: int) -> Tensor:
    """A mask of n elements of which round(fraction * n) are true, evenly spread."""
    steps = torch.arange(n + 1, device="cpu") * round(fraction * n) // max(n, 1)
    return steps[1:] > steps[:-1]
