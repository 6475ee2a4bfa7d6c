"""The touched-bytes law: each element that an op touches is read once and each output is written once.

What is read and what is written follows from the op's schema: an argument marked as mutated is read and
written (an `out=` argument only written), every other tensor argument is read, and a returned tensor that
does not alias an argument is written. `x * x` reads x once, and so does `x @ x.mT`; an expanded tensor is read at
its base size.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Set
from itertools import accumulate, pairwise
from typing import Any

from torch._ops import OpOverload

from flopmeter.records import Call, Region, TensorSpec
from flopmeter.records.collectives import COLLECTIVE_OPS
from flopmeter.records.extents import Extent, count_union, dims_of

# (is read, is written), where the schema does not say it: c10d's ops write into tensors that they do not mark. (A batch
# of sends and receives is not here: its rule says which is which.)
_READ_AND_WRITTEN, _WRITTEN = (True, True), (False, True)
_UNMARKED: dict[str, dict[str, tuple[bool, bool]]] = {
    **{
        name: {op.received: _READ_AND_WRITTEN if op.received == op.sent else _WRITTEN}
        for name, (_, _, op) in COLLECTIVE_OPS.items()
        if op.received is not None and op.ways is None
    },
    "fsdp::all_gather_copy_in": {"all_gather_output": _WRITTEN},
    "aten::_flash_attention_forward_no_dropout_inplace": {"out": _WRITTEN},
    "aten::_cudnn_attention_forward_no_dropout_inplace": {"out": _WRITTEN},
    "flopmeter::triton_kernel": {"written": _WRITTEN},
}


_LOOK_FIRST = frozenset(("aten::nonzero", *COLLECTIVE_OPS))


def as_regions(touched: Iterable[TensorSpec | Region]) -> tuple[Region, ...]:
    """The regions of tensors and of parts of tensors. A tensor is charged for the bytes that the tensors before it do
    not cover; a part (a Region) is charged as it is."""
    in_order = list(touched)
    by_storage: dict[int, dict[TensorSpec, None]] = {}
    charges: dict[TensorSpec, int] = {}
    for each in in_order:
        if isinstance(each, Region):
            continue
        if not each.is_strided:  # it shares its memory with none
            charges[each] = each.nbytes
        elif 0 not in each.shape:
            by_storage.setdefault(each.storage, {})[each] = None
    for group in by_storage.values():
        charges |= _charges(list(group))
    found = (each if isinstance(each, Region) else Region(each, charges.pop(each, 0)) for each in in_order)
    return tuple(region for region in found if region.nbytes)


def _charges(group: list[TensorSpec]) -> dict[TensorSpec, int]:
    """The bytes that each tensor of one storage adds to those before it."""
    apart = {spec: spec.nbytes for spec in group}
    if len(group) == 1:
        return apart
    whole = _nbytes(group)
    if whole == sum(apart.values()):
        return apart
    covered = [0, *(min(_nbytes(group[:count]), whole) for count in range(1, len(group))), whole]
    reached = list(accumulate(covered, max))
    return {spec: after - before for spec, (before, after) in zip(group, pairwise(reached), strict=True)}


def distinct_bytes(specs: Iterable[TensorSpec]) -> int:
    """Bytes of the tensors; what several of them cover counts once."""
    return sum(region.nbytes for region in as_regions(specs))


def _nbytes(group: list[TensorSpec]) -> int:
    """The bytes that these regions of one storage cover together."""
    sizes = {spec.dtype.itemsize for spec in group}
    unit = min(sizes)
    return unit * count_union(_extent(spec, spec.dtype.itemsize // unit) for spec in group)


def _extent(spec: TensorSpec, units: int) -> Extent:
    """The region of a tensor, in units of which an element has several."""
    strides = tuple(units * stride for stride in spec.stride)
    return Extent(units * spec.offset, dims_of((*spec.shape, units), (*strides, 1)))


def regions(call: Call) -> tuple[Set[TensorSpec], Set[TensorSpec]]:
    """What the call reads and what it writes under the law: distinct tensors, in the order of its arguments."""
    read: dict[TensorSpec, None] = {}
    written: dict[TensorSpec, None] = {}
    roles = argument_roles(call.func)
    for name, value in _arguments(call):
        is_read, is_written = roles[name]
        specs = dict.fromkeys(_specs(value))
        if is_read:
            read |= specs
        if is_written:
            written |= specs
    inputs = {spec.storage for spec in call.inputs}
    written |= dict.fromkeys(spec for spec in call.outputs if spec.storage not in inputs)
    return read.keys(), written.keys()


def writes_nothing(call: Call) -> bool:
    """Whether all that the call would write is empty: then torch's kernels return before they launch. A send returns an
    empty tensor too, but it writes elsewhere; and that nothing is found is known when all was looked at."""
    read, written = regions(call)
    touched = (*read, *written) if call.func._schema.name in _LOOK_FIRST else written
    return bool(written) and not any(spec.numel for spec in touched)


@functools.cache
def argument_roles(func: OpOverload) -> dict[str, tuple[bool, bool]]:
    """For each argument: (is read, is written)."""
    roles = {}
    for argument in func._schema.arguments:
        mutated = argument.alias_info is not None and argument.alias_info.is_write
        roles[argument.name] = (not argument.is_out, mutated)
    return roles | _UNMARKED.get(func._schema.name, {})


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Whether the schema says that what is returned aliases an argument that is not written to."""
    return {alias.is_write for each in func._schema.returns if (alias := each.alias_info) is not None} == {False}


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    names = [argument.name for argument in call.func._schema.arguments]
    yield from zip(names, call.args, strict=False)
    yield from call.kwargs.items()


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _specs(item)
