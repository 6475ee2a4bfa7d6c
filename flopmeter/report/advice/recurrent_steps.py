"""Loops that call nn.LSTM, nn.GRU or nn.RNN for one step of a sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from flopmeter.costs.rules import in_one_piece
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.recurrent import LEAST_STEPS
from flopmeter.report.advice.remedies import Proposal, remedy, with_other_ops
from flopmeter.report.advice.rewrite import is_dense, is_view, rebuilt
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten

_MODES = ("nn.RNN", "nn.RNN", "nn.LSTM", "nn.GRU")  # by cuDNN's number
_GATHERS = (aten.cat, aten.stack)
_SPREADS = (aten.add, aten.add_, aten.slice_backward, aten.select_backward, *_GATHERS)


@remedy
def steps_in_loops(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Loops over layers: each call launches a sequence's kernels for one step, and sums gradients of weights."""
    put_in, dropped, names = dict[int, Op](), set[int](), set[str]()
    for steps in _loops(trace):
        own = _OneCall(trace, steps)
        put_in |= own.put_in
        dropped |= own.dropped
        names.add(_MODES[trace.ops[steps[0]].call.argument("mode")])
    if put_in:
        yield with_other_ops(
            report, trace, "the layer is called for each step of a sequence",
            f"{' or '.join(sorted(names))} over the whole sequence, in place of the loop that calls it step by step",
            dropped, put_in,
        )  # fmt: skip


def _loops(trace: Trace) -> list[list[int]]:
    """Calls of one layer, each of which starts from the state that the one before left, and whose inputs are there
    before the first."""
    after: dict[tuple[int, int], list[int]] = {}  # by storages of a state and of the weights: the calls that led to it
    found: list[list[int]] = []
    for index, op in enumerate(trace.ops):
        if op.packet is not aten._cudnn_rnn or op.call.argument("bidirectional"):
            continue
        state, weights = op.storages[op.call.argument("hx").storage], op.inputs[1].storage
        steps = after.get((state, weights))
        if steps is None:
            found.append(steps := [])
        steps.append(index)
        after[op.outputs[1].storage, weights] = steps
    return [
        steps
        for steps in found
        if len(steps) >= LEAST_STEPS
        and all(trace.storages[trace.ops[step].inputs[0].storage].born < steps[0] for step in steps)
    ]


class _OneCall:
    """One call in place of those of a loop, and one backward pass."""

    def __init__(self, trace: Trace, steps: list[int]) -> None:
        self._trace, self._steps = trace, steps
        self._ops = [trace.ops[step] for step in steps]
        first = self._ops[0]
        self._time = 1 if first.call.argument("batch_first") else 0
        self._tokens = sum(op.inputs[0].shape[self._time] for op in self._ops)
        self.dropped = set(steps)
        self.put_in: dict[int, Op] = {}
        made = {op.outputs[0].storage for op in self._ops}
        at = next((index for index in range(steps[-1], len(trace.ops)) if self._gathers(trace.ops[index], made)), None)
        for step in steps:
            self._drop_around(step)
        if at is not None:
            self.dropped.add(at)
        place = steps[-1] if at is None else at
        wide = {first.inputs[0].storage, first.outputs[0].storage, first.outputs[3].storage}
        self.put_in[place] = rebuilt(first, lambda spec: self._widened(spec, wide))
        self._backward(made)

    @staticmethod
    def _gathers(op: Op, made: set[int]) -> bool:
        return op.packet in _GATHERS and made >= op.reads

    def _drop_around(self, step: int) -> None:
        """What is made for one call: a view of its input, and memory for its weights."""
        before = step - 1
        while is_view(op := self._trace.ops[before]) or op.packet is aten.new_empty:
            self.dropped.add(before)
            before -= 1
        if is_view(self._trace.ops[step + 1]) and step != self._steps[-1]:
            self.dropped.add(step + 1)

    def _widened(self, spec: TensorSpec, wide: set[int]) -> TensorSpec:
        """The tensor of one call as that of all."""
        if spec.storage not in wide or not spec.numel:
            return spec
        if len(spec.shape) == 1:
            return spec._replace(shape=(spec.shape[0] * len(self._steps),))
        shape = tuple(self._tokens if dim == self._time else size for dim, size in enumerate(spec.shape))
        if len(shape) != 3 or not is_dense(spec):
            return spec._replace(shape=shape)
        return in_one_piece(spec, shape)

    def _backward(self, made: set[int]) -> None:
        kept = {op.outputs[3].storage for op in self._ops}
        passes = [
            index
            for index, op in enumerate(self._trace.ops)
            if op.packet is aten._cudnn_rnn_backward and not kept.isdisjoint(op.storages)
        ]
        if not passes:
            return
        first = self._trace.ops[passes[0]]
        wide = {number for name in ("input", "output", "grad_output", "reserve")
                if (number := _storage(first, name)) is not None}  # fmt: skip
        self.dropped |= set(passes) | self._sums(passes)
        self.dropped |= {
            index
            for index, op in enumerate(self._trace.ops)
            if op.phase == "backward" and is_view(op) and not (made | wide).isdisjoint(op.storages)
        }
        gradient = first.outputs[0].storage
        self.put_in[passes[0]] = rebuilt(first, lambda spec: self._widened(spec, wide | {gradient}))

    def _sums(self, passes: list[int]) -> set[int]:
        """What puts together the gradients of all calls."""
        found, parts = set[int](), set[int]()
        for index in range(passes[0], len(self._trace.ops)):
            op = self._trace.ops[index]
            read = op.reads
            if index in passes:
                parts |= {spec.storage for spec in op.outputs if prod(spec.shape)}
            elif op.packet in _SPREADS and read and read <= parts:
                found.add(index)
                parts |= op.makes
        return found


def _storage(op: Op, name: str) -> int | None:
    value = op.call.argument(name)
    return op.storages[value.storage] if isinstance(value, TensorSpec) else None
