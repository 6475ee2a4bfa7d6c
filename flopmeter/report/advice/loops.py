"""Loops in Python over work that could run at once: samples or frames that a model takes one by one; heads, experts and
members of an ensemble that are modules of their own.

The proposed program runs one turn (iteration) of the loop (turns.py). Tensors that differ between two turns become as
many times larger as there are turns. Ops of the backward pass belong to the loop if they occur there once for each
turn, in the loop's modules. The sums of gradients over turns are dropped, since one matmul sums over all.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

import torch

from flopmeter.costs import costs_of
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.batch import PROPORTIONAL, SHAPES_DO_NOT_FIT, is_proportional, priced_if_it_fits
from flopmeter.report.advice.remedies import Proposal, has_backward, of_ops, remedy
from flopmeter.report.advice.rewrite import PRODUCTS, in_place_of, is_view, rebuilt, widened, with_ops
from flopmeter.report.advice.turns import LoopTurns, differing, loops_of, own_weights
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import usable_bytes_if_known
from flopmeter.torch_names.operators import aten, aten_overloads

_CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
_AS_A_BATCH = "one call on all of them as a batch, in place of the loop"
_SIDE_BY_SIDE = (
    "one wider layer, or weights stacked for one batched or grouped product or convolution, in place of the loop"
)


@remedy
def turns_one_by_one(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Loops whose turns could run as one: on a batch, or with weights side by side."""
    if report.cluster is not None:
        return
    by_remedy = defaultdict[str, list[_AtOnce]](list)
    begins_again = [
        place for place, (before, op) in enumerate(pairwise(trace.ops), 1) if before.phase != op.phase == "forward"
    ]
    for loop in loops_of(trace):
        has_own_weights = bool(own_weights(trace, loop.turns))
        if has_own_weights or not _is_of_batches(trace, loop):
            until = next((place for place in begins_again if place > loop.turns[-1][-1]), len(trace.ops))
            at_once = _AtOnce(trace, loop, until)
            if at_once.is_same_work(has_own_weights):
                by_remedy[_SIDE_BY_SIDE if has_own_weights else _AS_A_BATCH].append(at_once)
    for what_to_do, found in by_remedy.items():
        then = _run_at_once(report, trace, found)
        if then is not None:
            changed = set().union(*(each.dropped.union(each.put_in) for each in found))
            why = f"{_turns_of(found)} run one after the other, though none depends on another"
            if what_to_do == _AS_A_BATCH and any(_is_batch_norm(trace.ops[place]) for place in changed):
                why += "; batch norm would take its statistics over all of them"
            yield Proposal(why, what_to_do, then, of_ops(trace, changed))


def _turns_of(found: Sequence[_AtOnce]) -> str:
    numbers = sorted({len(each.loop.turns) for each in found})
    turns = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    return f"{turns} turns of " + (f"each of {len(found)} loops" if len(found) > 1 else "a loop")


def _is_batch_norm(op: Op) -> bool:
    """Whether it normalises by the batch that it is given, and averages its statistics over batches."""
    return op.phase == "forward" and bool(op.averages)


def _is_of_batches(trace: Trace, loop: LoopTurns) -> bool:
    """Whether it is the loop over a program's batches: inference that calls the model in each turn (batch.py advises on
    these). A loop that draws random samples for the same input is not."""
    within = range(loop.turns[0][0] + 1, loop.turns[-1][-1] + 1)
    if has_backward(trace) or not any(end.op in within for end in trace.forward_ends):
        return False
    *_, before, last = ([trace.ops[index] for index in turn] for turn in loop.turns)
    is_drawn = any(torch.Tag.nondeterministic_seeded in op.call.func.tags for op in last)
    made = set().union(*(op.fills for op in last))
    differ = set().union(*(differing(one, other) for one, other in zip(last, before, strict=True)))
    return not is_drawn or not differ <= made


def _run_at_once(report: Report, trace: Trace, loops: Sequence[_AtOnce]) -> Report | None:
    """The report with one turn of each loop; None if it does not fit into memory, or its FLOPs show other work."""
    merged = set().union(*(each.merged_weights for each in loops))
    fewer = sum(trace.storages[number].is_trained for number in merged)
    dropped = _counts_read(trace, fewer).union(*(each.dropped for each in loops))
    put_in = {index: op for each in loops for index, op in each.put_in.items()}
    waits = [op for op in trace.stream_use.host_waits if op not in dropped]
    waiting = dataclasses.replace(trace, stream_use=dataclasses.replace(trace.stream_use, host_waits=waits))
    then = priced_if_it_fits(report, _with_fewer_weights(with_ops(waiting, dropped, put_in), fewer))
    usable = usable_bytes_if_known(report.hardware)
    if then is None or not is_proportional(report, then, 1):
        return None
    return then if usable is None or then.memory.fits_in(usable) else None


def _macs(op: Op) -> int:
    return sum(cost.macs + cost.loop_macs for cost in costs_of(op.call))


def _counts_read(trace: Trace, fewer: int) -> set[int]:
    """The ops with which an optimizer reads the step counters, on the host, of as many weights as become `fewer`."""
    reading = {
        index: op.storages[0]
        for index, op in enumerate(trace.ops)
        if op.phase == "optimizer" and op.packet is aten._local_scalar_dense and op.call.inputs[0].device == "cpu"
    }
    counts = list(dict.fromkeys(reading.values()))
    gone = set(counts[len(counts) - fewer :]) if fewer < len(counts) else set[int]()
    return {index for index, count in reading.items() if count in gone}


def _with_fewer_weights(trace: Trace, fewer: int) -> Trace:
    """The trace without the optimizers' host time, before their first kernel, for that many weights."""
    calls, phase, before, left_out = list[int](), "", 0, 0
    for op, count in zip(trace.ops, trace.module_calls, strict=True):
        if op.phase == "optimizer" != phase:
            left_out += min(fewer, count - before)
        calls.append(count - left_out)
        phase, before = op.phase, count
    return dataclasses.replace(trace, module_calls=calls)


class _AtOnce:
    """A loop whose last turn does the work of all turns: `put_in` has its larger ops, `dropped` the ops of the others.
    The backward pass runs the last turn first."""

    def __init__(self, trace: Trace, loop: LoopTurns, until: int) -> None:
        self._trace, self.loop = trace, loop
        self._after = range(loop.turns[-1][-1] + 1, until)
        self._times = len(loop.turns)
        self._summed = set[int]()  # storages of gradients that the backward pass adds up over turns
        self.dropped = self._other_turns()
        pairs = [*zip(loop.turns[-1], loop.turns[-2], strict=True), *self._pairs_of_backward()]
        self.dropped |= self._views_before_dropped()
        self.put_in = {one: self._for_all(trace.ops[one], trace.ops[other]) for one, other in pairs}
        read = [set().union(*(trace.ops[index].reads for index in turn)) for turn in loop.turns]
        read_by_others = set().union(*read[:-1]) - read[-1]
        self.merged_weights = {number for number in read_by_others if trace.storages[number].role == "parameters"}

    def is_same_work(self, multiplies: bool) -> bool:
        """Whether the products of the turn that stays have the FLOPs of all. `multiplies`: products are required."""
        before = sum(_macs(self._trace.ops[index]) for index in self.dropped | self.put_in.keys())
        try:
            then = sum(map(_macs, self.put_in.values()))
        except SHAPES_DO_NOT_FIT:
            return False
        return abs(then - before) <= PROPORTIONAL * before and (before > 0 or not multiplies)

    def _other_turns(self) -> set[int]:
        """The ops of all turns but the last, with their views, and without ops that run in the first turn only."""
        in_turns = set().union(*self.loop.turns)
        turns = range(self._start(self.loop.turns[0]), self._start(self.loop.turns[-1]))
        return {index for index in turns if index in in_turns or is_view(self._trace.ops[index])}

    def _start(self, turn: Sequence[int]) -> int:
        """The first of the views directly before the turn, or its first op."""
        start = turn[0]
        while start and is_view(self._trace.ops[start - 1]):
            start -= 1
        return start

    def _pairs_of_backward(self) -> list[tuple[int, int]]:
        """The backward ops of the turn that stays, each with the same op of another turn. Those of other turns go into
        `dropped`."""
        ops = self._trace.ops
        modules = {ops[index].module for turn in self.loop.turns for index in turn}
        alike = defaultdict[Hashable, list[int]](list)
        adds = list[int]()
        for index in self._after:
            op = ops[index]
            if op.phase in ("backward", "recompute") and not is_view(op):
                if op.packet is aten.add and op.phase == "backward":
                    adds.append(index)
                elif op.module in modules:
                    alike[op.phase, self.loop.key(op)].append(index)
        pairs, turns_of = list[tuple[int, int]](), dict[int, set[int]]()
        for found in alike.values():
            each, rest = divmod(len(found), self._times)
            if not rest:
                pairs += zip(found[:each], found[each : 2 * each], strict=True)
                self.dropped.update(found[each:])
                turns_of |= {n: {place // each} for place, index in enumerate(found) for n in ops[index].fills}
        return pairs + self._pairs_of_adds(adds, turns_of)

    def _pairs_of_adds(self, adds: Sequence[int], turns_of: dict[int, set[int]]) -> list[tuple[int, int]]:
        """Pairs of ops that add gradients within one turn. Ops that add gradients of several turns are dropped, except
        in the first turn, whose gradient may also be added to something else. `turns_of`: by storage, the turns whose
        gradients it holds."""
        ops = self._trace.ops
        within = defaultdict[int, list[int]](list)
        for index in adds:
            turns = set().union(*(turns_of.get(number, ()) for number in ops[index].reads))
            turns_of |= dict.fromkeys(ops[index].makes, turns) if turns else {}
            self._summed |= ops[index].reads if len(turns) > 1 else set()
            self.dropped |= {index} if turns - {0} else set()
            if len(turns) == 1:
                within[min(turns)].append(index)
        for index in reversed(adds):
            self._summed |= set() if self._summed.isdisjoint(ops[index].makes) else ops[index].reads
        first, second = (
            [index for index in within[turn] if self._summed.isdisjoint(ops[index].makes)] for turn in (0, 1)
        )
        return [*zip(first, second, strict=False)]

    def _views_before_dropped(self) -> set[int]:
        """Views of the backward pass that only feed dropped ops."""
        views, is_dropped = set[int](), False
        for index in reversed(self._after):
            if not is_view(self._trace.ops[index]):
                is_dropped = index in self.dropped
            elif is_dropped:
                views.add(index)
        return views

    def _for_all(self, op: Op, other: Op) -> Op:
        """The op on the operands of all turns. `other`: the same op of another turn, which shows what differs."""
        grow = differing(op, other)
        if grow.isdisjoint(op.reads):  # all turns read the same: the batch repeats it
            grow |= {number for number in op.reads if self._trace.storages[number].role != "parameters"}
        if op.packet in PRODUCTS:
            return self._product(op, grow)
        if op.packet in _CONVOLUTIONS and op.storages[op.call.argument("weight").storage] in grow:
            return self._convolution(op, grow)
        grow = (grow | {spec.storage for spec in op.written}) - self._summed
        return rebuilt(op, lambda spec: widened(spec, _batch_of(spec), self._times) if spec.storage in grow else spec)

    def _product(self, op: Op, grow: set[int]) -> Op:
        """The matmul of all turns: more rows, more columns (weights side by side), more depth (a sum over turns), or a
        batched matmul, by which operands grow."""
        *bias, left, right = op.inputs
        out = op.outputs[0]
        is_sum = out.storage in self._summed
        if not is_sum and left.storage in grow and right.storage in grow:
            return self._batch_of_products(op)
        depth = self._times if is_sum else 1
        rows = self._times if left.storage in grow and not is_sum else 1
        columns = self._times if right.storage in grow and not is_sum else 1
        left, right, out = (
            widened(widened(spec, 0, down), 1, across)
            for spec, down, across in ((left, rows, depth), (right, depth, columns), (out, rows, columns))
        )
        read = (*(widened(spec, len(spec.shape) - 1, columns) for spec in bias), left, right)
        return in_place_of(op, op.call.func, read, {}, read, (out,))

    def _convolution(self, op: Op, grow: set[int]) -> Op:
        """The convolution of all turns: more output channels for a shared input, or groups if each turn has its own."""
        call = op.call
        x, weight = (call.argument(name) for name in ("input", "weight"))
        has_own_input = op.storages[x.storage] in grow
        out = op.storages[call.get("grad_output", call.outputs[0]).storage]
        of_weight = 1 if call.argument("transposed") and not has_own_input else 0

        def for_all(spec: TensorSpec) -> TensorSpec:
            if len(spec.shape) == 1 or (spec.storage != out and spec.shape == weight.shape):
                return widened(spec, 0 if len(spec.shape) == 1 else of_weight, self._times)
            return widened(spec, 1, self._times) if has_own_input or spec.storage == out else spec

        wide = rebuilt(op, for_all)
        names = [argument.name for argument in call.func._schema.arguments]
        groups = call.argument("groups") * (self._times if has_own_input else 1)
        pairs = zip(names, wide.call.args, strict=False)
        args = tuple(groups if name == "groups" else value for name, value in pairs)
        return wide._replace(call=dataclasses.replace(wide.call, args=args))

    def _batch_of_products(self, op: Op) -> Op:
        *bias, left, right = op.inputs
        rows = (spec._replace(shape=(1, *spec.shape), stride=(0, *spec.stride)) for spec in bias)
        read = tuple(map(self._stacked, (*rows, left, right)))
        func = aten_overloads.baddbmm.default if bias else aten_overloads.bmm.default
        return in_place_of(op, func, read, {}, read, map(self._stacked, op.outputs))

    def _stacked(self, spec: TensorSpec) -> TensorSpec:
        return spec._replace(shape=(self._times, *spec.shape), stride=(spec.numel, *spec.stride))


def _batch_of(spec: TensorSpec) -> int:
    """The dimension that grows: the first one, which holds samples or heads where there are several."""
    return next((dim for dim, step in enumerate(spec.stride) if step), 0)
