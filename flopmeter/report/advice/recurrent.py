"""Loops over LSTMCell and GRUCell, for which torch has one op for all steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flopmeter.as_cuda.kernels.rnn import KEPT
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.fused_attention import dense_in
from flopmeter.report.advice.remedies import Proposal, remedy, with_other_ops
from flopmeter.report.advice.rewrite import are_in_torch, in_place_of, is_view
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_CELLS = {aten._thnn_fused_lstm_cell: (2, "nn.LSTM"), aten._thnn_fused_gru_cell: (3, "nn.GRU")}  # cuDNN's number
_HAS_CELL = (aten._thnn_fused_lstm_cell,)
_BACKWARD = (aten._thnn_fused_lstm_cell_backward_impl, aten._thnn_fused_gru_cell_backward)
_OF_BACKWARD = (*_BACKWARD, aten.mm, aten.t, aten.add, aten.detach, aten.sum)
_GATHER = (aten.stack, aten.cat)
LEAST_STEPS = 4


class _Loop:
    """The steps of one cell, each of which starts from the state that the one before left."""

    def __init__(self, weights: tuple[TensorSpec, ...], states: tuple[TensorSpec, ...]) -> None:
        self.weights = weights
        self.states = states  # before the first step: the hidden one, and an LSTM's cell
        self.steps: list[int] = []  # ops: the cells
        self.inputs: list[TensorSpec] = []
        self.dropped: set[int] = set()


@remedy
def cells_in_loops(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Loops over cells: each step launches its products and its cell, and waits for the host."""
    put_in, dropped, names = dict[int, Op](), set[int](), set[str]()
    for loop in _loops(trace):
        first = trace.ops[loop.steps[0]]
        mode, name = _CELLS[first.packet]
        put_in |= _at_once(trace, loop, mode)
        dropped |= loop.dropped
        names.add(name)
    if put_in and are_in_torch(put_in.values()):
        yield with_other_ops(
            report, trace, "a few small kernels for each step of a sequence",
            f"{' or '.join(sorted(names))} over the whole sequence, in place of the loop over cells",
            dropped, put_in,
        )  # fmt: skip


def _loops(trace: Trace) -> list[_Loop]:
    """Loops whose inputs are there before them, or come from another such loop."""
    after: dict[int, _Loop] = {}  # storages of states: the loop that made them last
    found: list[_Loop] = []
    for index, op in enumerate(trace.ops):
        if op.packet not in _CELLS or op.phase != "forward":
            continue
        products = [trace.storages[spec.storage].born for spec in op.inputs[:2]]
        if min(products) < 0 or any(trace.ops[place].packet is not aten.mm for place in products):
            continue
        (x, w_x), (state, w_state) = (trace.ops[place].inputs for place in products)
        loop = after.get(state.storage)
        if loop is None or loop.weights[1].storage != w_state.storage:
            turned = (spec._replace(shape=spec.shape[::-1], stride=spec.stride[::-1]) for spec in (w_x, w_state))
            biases = (spec for spec in op.inputs[3:] if len(spec.shape) == 1)
            loop = _Loop((*turned, *biases), (state, *op.inputs[2:3]) if op.packet in _HAS_CELL else (state,))
            found.append(loop)
        loop.steps.append(index)
        loop.inputs.append(x)
        start = min(products)
        while is_view(trace.ops[start - 1]):
            start -= 1
        loop.dropped |= set(range(start, index + 1))
        after |= {spec.storage: loop for spec in op.outputs}
    return [loop for loop in found if len(loop.steps) >= LEAST_STEPS and _is_given(trace, loop, after)]


def _is_given(trace: Trace, loop: _Loop, after: dict[int, _Loop]) -> bool:
    """Whether no input depends on the step before."""
    born = (trace.storages[spec.storage].born for spec in loop.inputs)
    from_loops = {spec.storage for spec in loop.inputs if after.get(spec.storage, loop) is not loop}
    return all(
        place < loop.steps[0] or spec.storage in from_loops for place, spec in zip(born, loop.inputs, strict=True)
    )


def _at_once(trace: Trace, loop: _Loop, mode: int) -> dict[int, Op]:
    """cuDNN's op in the place of the last step, or of the op that gathers the states of all; and its backward."""
    last = trace.ops[loop.steps[-1]]
    states = {trace.ops[index].outputs[0].storage for index in loop.steps}
    gathers = (index for index in range(loop.steps[-1], len(trace.ops)) if _gathers(trace.ops[index], states))
    at = next(gathers, loop.steps[-1])
    state, x = last.outputs[0], loop.inputs[0]
    tokens = len(loop.steps), state.shape[0]
    out = dense_in(trace.ops[at].outputs[0], (*tokens, state.shape[1]))
    sequence = dense_in(x, (*tokens, x.shape[1]))
    before = tuple(dense_in(spec, (1, *state.shape)) for spec in loop.states)
    after = tuple(dense_in(spec, (1, *state.shape)) for spec in trace.ops[loop.steps[0]].outputs[: len(before)])
    kept = KEPT[mode] * tokens[0] * state.nbytes
    reserve = dense_in(last.outputs[-1], (kept,))._replace(dtype=torch.uint8)
    options = {
        "mode": mode, "hidden_size": state.shape[1], "proj_size": 0, "num_layers": 1, "batch_first": False,
        "dropout": 0.0, "train": True, "bidirectional": False, "batch_sizes": (), "dropout_state": None,
        "input": sequence, "weight": loop.weights, "weight_stride0": len(loop.weights), "weight_buf": None,
        "hx": before[0], "cx": before[1] if len(before) > 1 else None,
    }  # fmt: skip
    given = (sequence, *loop.weights, *before)
    made = (out, *after, reserve)
    loop.dropped.add(at)
    put_in = {at: in_place_of(trace.ops[at], aten_overloads._cudnn_rnn.default, (), options, given, made)}
    return put_in | _backward(trace, loop, options, (sequence, before), (out, reserve))


def _backward(
    trace: Trace,
    loop: _Loop,
    options: dict[str, Any],
    given: tuple[TensorSpec, tuple[TensorSpec, ...]],
    kept: tuple[TensorSpec, TensorSpec],
) -> dict[int, Op]:
    """cuDNN's op in the place of the backward pass of all steps. What it makes lies in storages of ops that go; the
    gradients of weights where the program has them. It computes the gradient of its input whoever wants it."""
    works = {trace.ops[index].outputs[-1].storage for index in loop.steps}
    cells = [index for index, op in enumerate(trace.ops) if op.packet in _BACKWARD and works & op.reads]
    if not cells:
        return {}
    module, (out, reserve) = trace.ops[cells[0]].module, kept
    gates = set[int]().union(*(trace.ops[index].makes for index in cells))

    def is_inside(op: Op) -> bool:
        adds = op.packet is aten.addmm and not gates.isdisjoint(op.reads)  # as compiled: a product and what it adds to
        return op.phase == "backward" and ((op.module == module and op.packet in _OF_BACKWARD) or adds)

    end = cells[-1]
    while end + 1 < len(trace.ops) and is_inside(trace.ops[end + 1]):
        end += 1
    inside = {index for index in range(cells[0], end + 1) if is_inside(trace.ops[index])}
    start = cells[0]
    while is_view(trace.ops[start - 1]) and trace.ops[start - 1].phase == "backward":
        start -= 1
    loop.dropped |= inside | set(range(start, cells[0]))
    gradient = dense_in(trace.ops[cells[0]].inputs[0], out.shape)
    options = options | {"output": out, "grad_output": gradient, "grad_hy": None, "grad_cy": None, "reserve": reserve,
                         "output_mask": (True, True, True, True)}  # fmt: skip
    (sequence, before), made = given, _gradients(trace, loop, cells)
    read = (sequence, *loop.weights, *before, out, gradient, reserve)
    free = (spec.storage for index in cells for spec in trace.ops[index].outputs)
    made += tuple(spec._replace(storage=next(free)) for spec in before)
    of_steps = set[int]().union(*(trace.ops[index].makes for index in inside))
    gathers = (index for index in range(end, len(trace.ops)) if _gathers(trace.ops[index], of_steps))
    at = next(gathers, None)
    loop.dropped |= set() if at is None else {at}
    made += (sequence._replace(storage=next(free) if at is None else trace.ops[at].outputs[0].storage),)
    func = aten_overloads._cudnn_rnn_backward.default
    return {cells[-1]: in_place_of(trace.ops[cells[-1]], func, (), options, read, made)}


def _gathers(op: Op, parts: set[int]) -> bool:
    return op.packet in _GATHER and parts.issuperset(op.reads)


def _gradients(trace: Trace, loop: _Loop, cells: list[int]) -> tuple[TensorSpec, ...]:
    """Of the weights, as the program is given them."""
    adds = (each for each in trace.accumulations if each.op > cells[0])
    given = {each.leaf: trace.ops[each.op].inputs[-1].storage for each in adds}
    return tuple(spec._replace(storage=given.get(spec.storage, spec.storage)) for spec in loop.weights)
