"""Copies that a program makes without need: what reads one could read what was copied.

A copy that is left out hands its place on: each view of it becomes a view of what was copied, and what attention makes
in the layout of its operands lies as these do now, which may leave more copies nothing to do. Where a view is not
possible any more, or a kernel wants its operand in one piece, the copy is needed and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from flopmeter.device.hardware import Hardware
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.records.memory_format import strides_of
from flopmeter.report.advice.found_attention import Operands
from flopmeter.report.advice.fused_attention import Bias, NoKernelError, backend_of, is_fused_attention, operands_of
from flopmeter.report.advice.remedies import Proposal, remedy, with_other_ops
from flopmeter.report.advice.rewrite import is_view, rebuilt
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten

_COPIES = (aten.clone, aten.copy_)
_PRODUCTS = (aten.mm, aten.bmm, aten.addmm, aten.baddbmm)
_REPEAT = (aten.unsqueeze, aten.expand, aten.view, aten._unsafe_view, aten.squeeze)


@remedy
def repeated_heads(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Keys and values that are repeated for each head of the queries that shares them."""
    yield from _read_through(
        report, trace, True, "keys and values are repeated in memory for all heads that share them",
        "scaled_dot_product_attention(..., enable_gqa=True) on the heads that there are",
    )  # fmt: skip


@remedy
def needless_copies(report: Report, trace: Trace) -> Iterator[Proposal]:
    """`.contiguous()` and `.clone()` before kernels that take their operands as they lie."""
    yield from _read_through(
        report, trace, False, "copies of tensors that the kernels behind them could read where they are",
        "no .contiguous() or .clone() there (where torch's own module makes them, one of your own)",
    )  # fmt: skip


def _read_through(report: Report, trace: Trace, of_heads: bool, why: str, remedy: str) -> Iterator[Proposal]:
    free = {index for index, op in enumerate(trace.ops) if op.phase != "backward" and _is_free_to_go(trace, op)}
    repeated = {index for index in free if _repeats(trace.ops[index].inputs[0])}
    shared = _walked(trace, report.hardware, repeated).shared & repeated if repeated else set[int]()
    walk = _walked(trace, report.hardware, shared if of_heads else free - shared)
    if walk.dropped:
        if of_heads:
            walk.dropped |= {place for index in walk.repeats for place in _views_around(trace, index)}
        yield with_other_ops(report, trace, why, remedy, walk.dropped, walk.put_in, about=walk.dropped)


def _walked(trace: Trace, device: Hardware, wanted: set[int]) -> _ReadThrough:
    """The ops without as many of these copies as nobody needs."""
    while True:
        walk = _ReadThrough(trace, device, wanted)
        walk.run()
        if not walk.needed:
            return walk
        wanted = wanted - walk.needed


def _views_around(trace: Trace, index: int) -> Iterator[int]:
    """What is made of a tensor only for heads to be repeated, or to be summed in the backward pass."""
    before = index - 1
    while trace.ops[before].packet in _REPEAT:
        yield before
        before -= 1
    if trace.ops[index + 1].packet in _REPEAT:
        yield index + 1


def _repeats(spec: TensorSpec) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(spec.shape, spec.stride, strict=True))


def _is_free_to_go(trace: Trace, op: Op) -> bool:
    """Whether it is a copy within the device, in one type, of what is not written to."""
    if op.packet is not aten.clone or not op.inputs[0].is_strided:
        return False
    return trace.storages[op.outputs[0].storage].role is None


class Whereabouts(NamedTuple):
    """Where the elements of a storage lie now: those of sizes `shape` lay with steps `stride` from its start on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    now: TensorSpec  # of the same shape
    copy: int  # op: the copy that is left out for it

    def of(self, spec: TensorSpec) -> TensorSpec | None:
        """A view of the storage, as a view of where its elements lie now; None if no strides say that."""
        lay = sorted((step, size, now) for size, step, now in zip(self.shape, self.stride, self.now.stride, strict=True)
                     if size > 1)  # fmt: skip

        def lies_now(place: int) -> int:
            offset = self.now.offset
            for step, _, now in reversed(lay):
                offset += place // step * now
                place %= step
            return offset

        strides = [_step(size, step, lay) for size, step in zip(spec.shape, spec.stride, strict=True)]
        if None in strides:
            return None
        stride = tuple(step for step in strides if step is not None)
        offset, last = lies_now(spec.offset), lies_now(spec.offset + _to_last(spec.shape, spec.stride))
        if last != offset + _to_last(spec.shape, stride):  # it begins within a row and ends in another
            return None
        return spec._replace(stride=stride, offset=offset, storage=self.now.storage)

    def of_shared_heads(self, spec: TensorSpec) -> TensorSpec | None:
        """The same for keys or values, [batch, heads, ...]: of several heads that are one, that one."""
        times = next((size for size, now in zip(self.shape, self.now.stride, strict=True) if size > 1 and not now), 1)
        batch, heads, *sizes = spec.shape
        outer, step, *steps = spec.stride
        if heads % times:
            return None
        return self.of(spec._replace(shape=(batch, heads // times, *sizes), stride=(outer, step * times, *steps)))


def _to_last(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """From the first element to the last."""
    return sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _step(size: int, step: int, lay: list[tuple[int, int, int]]) -> int | None:
    """The step between neighbours of a dimension: it goes over one of the dimensions that there were, or over several
    that still follow each other."""
    if size == 1 or step == 0:
        return step
    at = max((place for place, (own, _, _) in enumerate(lay) if own <= step), default=None)
    if at is None or step % lay[at][0]:
        return None
    times = step // lay[at][0]
    reach, now = lay[at][1] // times, lay[at][2] * times
    last = lay[at]
    while reach < size:
        at += 1
        if at == len(lay) or lay[at][0] != last[0] * last[1] or lay[at][2] != last[2] * last[1]:
            return None
        last = lay[at]
        reach *= last[1]
    return now


class _ReadThrough:
    """One way through the ops, without the copies that are wanted gone."""

    def __init__(self, trace: Trace, device: Hardware, wanted: set[int]) -> None:
        self._trace, self._device, self._wanted = trace, device, wanted
        self._places: dict[int, Whereabouts] = {}
        self._copied: dict[int, int] = {}  # storages that were copied: by which op
        self.dropped: set[int] = set()
        self.repeats = set(wanted)  # and sums over what was repeated
        self.shared = set[int]()  # copies of keys and values for heads that share them
        self.put_in: dict[int, Op] = {}
        self.needed: set[int] = set()

    def run(self) -> None:
        for index, op in enumerate(self._trace.ops):
            if op.call.func._schema.is_mutable and op.phase != "optimizer":
                self.needed |= {self._copied[spec.storage] for spec in op.inputs[:1] if spec.storage in self._copied}
            moved = [self._places[number] for number in op.storages if number in self._places]
            if index in self._wanted:
                source = op.inputs[0]
                place = self._places.get(source.storage)
                self._leave_out(index, op.outputs[0], place.of(source) if place else source, index)
            elif moved and not self._follow(index, op, moved[0].copy):
                self.needed |= {place.copy for place in moved}

    def _leave_out(self, index: int, out: TensorSpec, now: TensorSpec | None, copy: int) -> None:
        if now is None:
            self.needed.add(copy)
            return
        self.dropped.add(index)
        self._places[out.storage] = Whereabouts(out.shape, out.stride, now, copy)
        self._copied |= {out.storage: copy, now.storage: copy}

    def _follow(self, index: int, op: Op, copy: int) -> bool:
        """Let an op read where its operands lie now. False if it cannot."""
        if is_fused_attention(op):
            return self._attend(index, op, copy)
        if is_view(op):
            return True  # what reads it is asked
        now = {spec: place.of(spec) for spec in op.inputs if (place := self._places.get(spec.storage))}
        if None in now.values():
            return False
        read = [now.get(spec) or spec for spec in op.inputs]
        if op.packet in _COPIES and op.outputs[0].dtype == read[-1].dtype and _lies_alike(read[-1], op.outputs[0]):
            if op.packet is aten.clone:
                self._leave_out(index, op.outputs[0], read[-1], copy)
            self.dropped.add(index)
            return True
        if op.packet is aten.sum and read[0].distinct_elements == op.outputs[0].numel:  # over heads that are one
            self.repeats.add(index)
            self._leave_out(index, op.outputs[0], _first_of_each(read[0], op.outputs[0]), copy)
            return True
        if not all(old.stride == new.stride or takes(op, new) for old, new in now.items() if new):
            return False
        self.put_in[index] = rebuilt(op, lambda spec: now.get(spec) or spec)
        return True

    def _attend(self, index: int, op: Op, copy: int) -> bool:
        """Attention takes operands of any layout, and fewer heads of keys than of queries. Each result lies as the
        operand that it belongs to."""
        is_backward = op.call.name.endswith("_backward")
        before = operands_of(op)
        now = {spec: self._in_heads(spec) for spec in op.inputs}
        q, k, v = (now[spec] for spec in before)
        if q is None or k is None or v is None or k.shape[1] != v.shape[1] or not self._has_kernel(op, (q, k, v)):
            return False
        for out, spec, operand in zip(op.outputs, before, (q, k, v) if is_backward else (q,), strict=False):
            self._places[out.storage] = _like(out, spec, operand, copy)
        for spec, operand in zip(before[1:], (k, v), strict=True):
            if operand.shape[1] < spec.shape[1] or (operand.shape[1] > 1 and not operand.stride[1]):
                self.shared.add(self._places[spec.storage].copy)
        now |= {spec: self._in_heads(spec) for spec in op.outputs}
        self.put_in[index] = rebuilt(op, lambda spec: now.get(spec) or spec)
        return True

    def _in_heads(self, spec: TensorSpec) -> TensorSpec | None:
        place = self._places.get(spec.storage)
        return spec if place is None else place.of(spec) or place.of_shared_heads(spec)

    def _has_kernel(self, op: Op, qkv: Operands) -> bool:
        call, mask = op.call, op.call.get("attn_bias")
        bias = Bias(mask, None) if isinstance(mask, TensorSpec) else None
        causal, dropout = call.argument("is_causal"), call.argument("dropout_p")
        try:
            backend = backend_of(qkv, self._device, is_causal=causal, dropout=dropout, bias=bias)
        except NoKernelError:
            return False
        return call.name.startswith(f"_scaled_dot_product_{backend}")


def takes(op: Op, spec: TensorSpec) -> bool:
    """Whether the op reads a tensor with these steps where it is."""
    if op.packet in _PRODUCTS:
        return 1 in spec.stride[-2:]
    return op.packet in (*_COPIES, aten.cat, aten.sum) or torch.Tag.pointwise in op.call.func.tags


def _lies_alike(one: TensorSpec, other: TensorSpec) -> bool:
    return one.numel == other.numel and all(
        size == 1 or own == step for size, own, step in zip(one.shape, one.stride, other.stride, strict=True)
    )


def _first_of_each(spec: TensorSpec, out: TensorSpec) -> TensorSpec:
    """What a sum over dimensions that only repeat leaves: the dimension of size 1, or none."""
    kept = [(1 if step == 0 else size, step) for size, step in zip(spec.shape, spec.stride, strict=True)]
    if len(out.shape) < len(kept):
        kept = [(size, step) for size, step in kept if step]
    return spec._replace(shape=out.shape, stride=tuple(step for _, step in kept))


def _like(out: TensorSpec, operand: TensorSpec, now: TensorSpec, copy: int) -> Whereabouts:
    """Where a result lies that has the layout of an operand, if it had it before too."""
    times = operand.shape[1] // now.shape[1]
    batch, heads, *sizes = out.shape
    outer, step, *steps = out.stride
    shape, stride = (batch, heads // times, times, *sizes), (outer, times * step, step, *steps)
    follows = _from_innermost(out) == _from_innermost(operand)
    own = strides_of((batch, heads // times, *sizes), _from_innermost(now if follows else out))
    steps_now = (*own[:2], 0 if times > 1 else own[1], *own[2:])
    return Whereabouts(shape, stride, out._replace(shape=shape, stride=steps_now), copy)


def _from_innermost(spec: TensorSpec) -> list[int]:
    """The dimensions, the innermost in memory first."""
    return sorted(range(len(spec.shape)), key=lambda dim: (spec.stride[dim], -dim))
