"""Loops in Python over work that could run at once: samples or frames that a model takes one by one, heads, experts and
members of an ensemble that are modules of their own.

The mended program runs one turn of the loop (turns.py), in which each tensor that differs between two turns is so many
times as large. The loop's ops in the backward pass are those that stand there as many times as there are turns, in the
loop's modules. What adds up the gradients of turns goes, since one product sums over all.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.batch import is_proportional, priced_if_it_fits
from flopmeter.report.advice.remedies import Proposal, has_backward, of_ops, remedy
from flopmeter.report.advice.rewrite import PRODUCTS, in_place_of, is_view, rebuilt, widened, with_ops
from flopmeter.report.advice.turns import LoopTurns, differing, loops_of, own_weights
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import usable_bytes_if_known
from flopmeter.torch_names.operators import aten, aten_overloads

_AS_A_BATCH = "one call on all of them as a batch, in place of the loop"
_SIDE_BY_SIDE = "one wider layer, or weights stacked for one batched or grouped product, in place of the loop"


@remedy
def turns_one_by_one(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Turns of a loop that could be one, as a batch or with weights side by side."""
    if report.cluster is not None:
        return
    multiplying = {id(op) for kernel in report.kernels if kernel.cost.macs for op in kernel.ops}
    by_remedy = defaultdict[str, list[_AtOnce]](list)
    loops = loops_of(trace)
    for loop in loops:
        has_own_weights = bool(own_weights(trace, loop.turns))
        multiplies = any(id(trace.ops[index]) in multiplying for index in loop.turns[0])
        if multiplies and (has_own_weights or not _is_of_batches(trace, loop)):
            what_to_do = _SIDE_BY_SIDE if has_own_weights else _AS_A_BATCH
            by_remedy[what_to_do].append(_AtOnce(trace, loop, _until(trace, loop, loops)))
    for what_to_do, found in by_remedy.items():
        then = _run_at_once(report, trace, found)
        if then is not None:
            changed = set().union(*(each.dropped.union(each.put_in) for each in found))
            turns = max(len(each.loop.turns) for each in found)
            why = f"{turns} turns of a loop that do not depend on each other run one after the other"
            yield Proposal(why, what_to_do, then, of_ops(trace, changed))


def _until(trace: Trace, loop: LoopTurns, loops: Sequence[LoopTurns]) -> int:
    """Where the same loop runs again, for another batch or in another step: its backward pass is over by then."""
    first = loop.turns[0][0]
    starts = (other.turns[0][0] for other in loops)
    again = (start for start in starts if start > first and trace.ops[start].module == trace.ops[first].module)
    return min(again, default=len(trace.ops))


def _is_of_batches(trace: Trace, loop: LoopTurns) -> bool:
    """Whether it is the loop over a program's batches: inference that calls its model in each turn (batch.py)."""
    within = range(loop.turns[0][0] + 1, loop.turns[-1][-1] + 1)
    return not has_backward(trace) and any(end.op in within for end in trace.forward_ends)


def _run_at_once(report: Report, trace: Trace, loops: Sequence[_AtOnce]) -> Report | None:
    """The run with one turn of each loop; None where it does not fit, or is not the same work by its FLOPs."""
    dropped = set().union(*(each.dropped for each in loops))
    put_in = {index: op for each in loops for index, op in each.put_in.items()}
    waits = [op for op in trace.stream_use.host_waits if op not in dropped]
    waiting = dataclasses.replace(trace, stream_use=dataclasses.replace(trace.stream_use, host_waits=waits))
    merged = set().union(*(each.merged_weights for each in loops))
    then = priced_if_it_fits(report, _with_fewer_weights(with_ops(waiting, dropped, put_in), merged))
    usable = usable_bytes_if_known(report.hardware)
    if then is None or not is_proportional(report, then, 1):
        return None
    return then if usable is None or then.memory.peak_bytes <= usable else None


def _with_fewer_weights(trace: Trace, merged: set[int]) -> Trace:
    """The trace without what optimizers do on the host for each of these weights before their first kernel."""
    fewer = sum(trace.storages[number].is_trained for number in merged)
    calls, phase, before, left_out = list[int](), "", 0, 0
    for op, count in zip(trace.ops, trace.module_calls, strict=True):
        if op.phase == "optimizer" != phase:
            left_out += min(fewer, count - before)
        calls.append(count - left_out)
        phase, before = op.phase, count
    return dataclasses.replace(trace, module_calls=calls)


class _AtOnce:
    """The last turn, which stays and does the work of all, and what goes with the others. In the backward pass the last
    turn is the first one."""

    def __init__(self, trace: Trace, loop: LoopTurns, until: int) -> None:
        self._trace, self.loop = trace, loop
        self._after = range(loop.turns[-1][-1] + 1, until)
        self._times = len(loop.turns)
        self._summed = set[int]()  # storages of gradients that the backward pass adds up over turns
        self.dropped = self._other_turns()
        pairs = [*zip(loop.turns[-1], loop.turns[-2], strict=True), *self._pairs_of_backward()]
        self.dropped |= self._views_before_dropped()
        self.put_in = {one: self._for_all(trace.ops[one], trace.ops[other]) for one, other in pairs}
        read, read_elsewhere = (
            {number for turn in turns for index in turn for number in trace.ops[index].reads}
            for turns in (loop.turns[-1:], loop.turns[:-1])
        )
        self.merged_weights = {n for n in read_elsewhere - read if trace.storages[n].role == "parameters"}

    def _other_turns(self) -> set[int]:
        """With their views, but without what only the first turn does."""
        in_turns = set().union(*self.loop.turns)
        turns = range(self._start(self.loop.turns[0]), self._start(self.loop.turns[-1]))
        return {index for index in turns if index in in_turns or is_view(self._trace.ops[index])}

    def _start(self, turn: Sequence[int]) -> int:
        """With the views before its first op."""
        start = turn[0]
        while start and is_view(self._trace.ops[start - 1]):
            start -= 1
        return start

    def _pairs_of_backward(self) -> list[tuple[int, int]]:
        """The ops of the turn that stays, each with its like of the next turn. The others are dropped."""
        ops = self._trace.ops
        modules = {ops[index].module for turn in self.loop.turns for index in turn}
        alike = defaultdict[Hashable, list[int]](list)
        adds = list[int]()
        for index in self._after:
            op = ops[index]
            if op.phase == "backward" and not is_view(op):
                if op.packet is aten.add:
                    adds.append(index)
                elif op.module in modules:
                    alike[self.loop.key(op)].append(index)
        pairs, turns_of = list[tuple[int, int]](), dict[int, set[int]]()
        for found in alike.values():
            each, rest = divmod(len(found), self._times)
            if not rest:
                pairs += zip(found[:each], found[each : 2 * each], strict=True)
                self.dropped.update(found[each:])
                turns_of |= {n: {place // each} for place, index in enumerate(found) for n in ops[index].fills}
        self._drop_sums(adds, turns_of)
        return pairs

    def _drop_sums(self, adds: Sequence[int], turns_of: dict[int, set[int]]) -> None:
        """Of what adds up gradients, only sums within the turn that stays do. `turns_of`: the turns whose gradients a
        storage holds."""
        for index in adds:
            op = self._trace.ops[index]
            if op.reads <= turns_of.keys():
                turns = set().union(*(turns_of[number] for number in op.reads))
                turns_of |= dict.fromkeys(op.makes, turns)
                self._summed |= op.reads if len(turns) > 1 else set()
                self.dropped |= {index} if turns != {0} else set()
        for index in reversed(adds):
            op = self._trace.ops[index]
            self._summed |= set() if self._summed.isdisjoint(op.makes) else op.reads

    def _views_before_dropped(self) -> set[int]:
        """Views in the backward pass that are taken for ops that go."""
        views, is_dropped = set[int](), False
        for index in reversed(self._after):
            if not is_view(self._trace.ops[index]):
                is_dropped = index in self.dropped
            elif is_dropped:
                views.add(index)
        return views

    def _for_all(self, op: Op, other: Op) -> Op:
        """The op on what all turns have. `other`: the same op of another turn."""
        grow = differing(op, other)
        if op.packet in PRODUCTS:
            return self._product(op, grow)
        grow = (grow | {spec.storage for spec in op.written}) - self._summed
        return rebuilt(op, lambda spec: widened(spec, _batch_of(spec), self._times) if spec.storage in grow else spec)

    def _product(self, op: Op, grow: set[int]) -> Op:
        """Rows of all turns under each other, weights side by side, a sum over all, or a batch of products."""
        *bias, left, right = op.inputs
        out = op.outputs[0]
        grow_both = left.storage in grow and right.storage in grow
        if grow_both and out.storage not in self._summed:
            return self._batch_of_products(op)
        depth = self._times if grow_both else 1
        rows = self._times if left.storage in grow and not grow_both else 1
        columns = self._times if right.storage in grow and not grow_both else 1
        left, right, out = (
            widened(widened(spec, 0, down), 1, across)
            for spec, down, across in ((left, rows, depth), (right, depth, columns), (out, rows, columns))
        )
        read = (*(widened(spec, len(spec.shape) - 1, columns) for spec in bias), left, right)
        return in_place_of(op, op.call.func, read, {}, read, (out,))

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
