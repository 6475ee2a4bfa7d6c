"""Optimizers that update their parameters in many kernels, where torch has one for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.remedies import Proposal, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import are_in_torch, in_place_of, with_ops
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_ADAM = ("addcdiv", "addcmul")  # in the names of its ops
_MAKE_STATES = (aten.zeros_like, aten.zeros, aten.zero_, aten.fill_)  # in the first step, whatever the optimizer


@remedy
def fused_optimizer(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Adam, AdamW and SGD op by op, as `foreach` (torch's default on GPUs) or as a loop over the parameters."""
    put_in, put_before, dropped = dict[int, Op](), dict[int, list[Op]](), set[int]()
    for step, groups in _steps(trace):
        for group in _by_group(trace, step, groups):
            fused = _fused(trace, group)
            if fused:
                *put_before[group[-1]], put_in[group[-1]] = fused
                dropped |= {index for index in group if trace.ops[index].packet not in _MAKE_STATES}
    if not put_in or not are_in_torch(chain(put_in.values(), *put_before.values())):
        return
    count = sum(kernel.op.phase == "optimizer" for kernel in report.kernels)
    yield Proposal(
        f"{count} kernels read and write the same parameters and states again and again",
        "the optimizer's fused=True", priced(report, with_ops(trace, dropped, put_in, put_before)),
        lambda kernel: kernel.op.phase == "optimizer", "optimizer",
    )  # fmt: skip


@draws(VIEWS, "later step")
def later_step_seconds(report: Report) -> float | None:
    """What the run takes without the ops that make states."""
    if report.in_mode is None:
        return None
    trace = trace_of(report)
    made = {
        index
        for index, op in enumerate(trace.ops)
        if op.phase == "optimizer"
        and op.packet in (*_MAKE_STATES, aten.lift_fresh)
        and {trace.storages[out.storage].role for out in op.outputs} == {"optimizer state"}
    }
    return priced(report, with_ops(trace, made)).seconds if made else None


def _steps(trace: Trace) -> Iterator[tuple[list[int], Sequence[int]]]:
    """The ops of each step of an optimizer that has the option, and how many parameters each of its groups has."""
    before = 0
    for end, takes_fused, groups in trace.optimizer_steps:
        start = end
        while start > before and trace.ops[start - 1].phase == "optimizer":
            start -= 1
        if takes_fused and start < end:
            yield list(range(start, end)), groups
        before = end


def _by_group(trace: Trace, step: list[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """The ops of a step, group by group: an optimizer updates one after the other, each with kernels of its own."""
    last_touch: dict[int, int] = {}  # of a parameter, by its storage; in the order of the first
    for index in step:
        for number in trace.ops[index].storages:
            if trace.storages[number].role == "parameters":
                last_touch[number] = index
    ends = list(last_touch.values())
    if len(ends) != sum(sizes):  # parameters share memory
        yield step
        return
    start = step[0]
    for size in sizes:
        end = max(ends[:size]) + 1
        del ends[:size]
        if start < end:
            yield list(range(start, end))
        start = max(start, end)


def _fused(trace: Trace, step: list[int]) -> list[Op]:
    """What runs in place of a group's ops. Nothing if torch has no fused kernel for it, or if it is fused already."""
    ops = [trace.ops[index] for index in step]
    names = {op.call.name for op in ops}
    if any("fused" in name for name in names):
        return []
    tensors = _by_role(trace, ops)
    weights, gradients, states = (tensors.get(role, []) for role in ("parameters", "gradients", "optimizer state"))
    if not weights or len(gradients) != len(weights):
        return []
    if all(any(part in name for name in names) for part in _ADAM) and len(states) == 2 * len(weights):
        moments = states[: len(weights)], states[len(weights) :]
        lists: Lists = (weights, gradients, *moments, [], [])
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8, "amsgrad": False,
                   "maximize": False}  # fmt: skip
        update = in_place_of(ops[-1], aten_overloads._fused_adamw_.default, lists, options, chain(*lists))
        # Counters of steps are on the GPU then. Nothing of theirs is in the trace, so others' memory stands for them.
        counters = [state._replace(shape=(), stride=(), dtype=torch.float32) for state in moments[0]]
        return [in_place_of(ops[-1], aten_overloads._foreach_add_.Scalar, (counters, 1), {}, counters), update]
    if not any("sqrt" in name or "addcdiv" in name or "sign" in name for name in names):
        if len(states) not in (0, len(weights)):
            return []
        options = {"lr": 1e-3, "momentum": 0.9 if states else 0.0, "weight_decay": 0.0, "dampening": 0.0,
                   "nesterov": False, "maximize": False, "is_first_step": False}  # fmt: skip
        lists = weights, gradients, states
        return [in_place_of(ops[-1], aten_overloads._fused_sgd_.default, lists, options, chain(*lists))]
    return []


Lists = tuple[list[TensorSpec], ...]


def _by_role(trace: Trace, ops: list[Op]) -> dict[str | None, list[TensorSpec]]:
    """The tensors that the optimizer touches, each once, without its counters of steps."""
    found: dict[int, TensorSpec] = {}
    for op in ops:
        for spec in op.inputs:
            if spec.shape and spec.storage not in found:
                found[spec.storage] = spec
    sizes = {spec.numel for number, spec in found.items() if trace.storages[number].role == "parameters"}
    roles: dict[str | None, list[TensorSpec]] = {}
    for number, spec in found.items():
        if spec.numel in sizes:
            roles.setdefault(trace.storages[number].role, []).append(spec)
    return roles
