"""Optimizers that update their parameters in many kernels, where torch has one for all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.remedies import Proposal, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import are_in_torch, in_place_of, with_ops
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_ADAM = ("addcdiv", "addcmul")  # in the names of its ops
_MAKE_STATES = (aten.zeros_like, aten.zeros, aten.zero_, aten.fill_)  # in the first step, whatever the optimizer


@remedy
def fused_optimizer(report: Report) -> Iterator[Proposal]:
    """Adam, AdamW and SGD op by op, as `foreach` (torch's default on GPUs) or as a loop over the parameters."""
    trace = trace_of(report)
    put_in, dropped = {}, set()
    for step in _steps(trace):
        fused = _fused(trace, step)
        if fused is not None:
            put_in[step[-1]] = fused
            dropped |= {index for index in step if trace.ops[index].packet not in _MAKE_STATES}
    if not put_in or not are_in_torch(put_in.values()):
        return
    count = sum(kernel.op.phase == "optimizer" for kernel in report.kernels)
    yield Proposal(
        "optimizer", lambda kernel: kernel.op.phase == "optimizer",
        f"{count} kernels read and write the same parameters and states again and again",
        "the optimizer's fused=True", priced(report, with_ops(trace, dropped, put_in)),
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


def _steps(trace: Trace) -> list[list[int]]:
    """The ops of each step of an optimizer that has the option."""
    steps, before = [], 0
    for end, takes_fused in trace.optimizer_steps:
        start = end
        while start > before and trace.ops[start - 1].phase == "optimizer":
            start -= 1
        if takes_fused and start < end:
            steps.append(list(range(start, end)))
        before = end
    return steps


def _fused(trace: Trace, step: list[int]) -> Op | None:
    """One op for the whole step. None if torch has no fused kernel for it, or if it is fused already."""
    ops = [trace.ops[index] for index in step]
    names = {op.call.name for op in ops}
    if any("fused" in name for name in names):
        return None
    tensors = _by_role(trace, ops)
    weights, gradients, states = (tensors.get(role, []) for role in ("parameters", "gradients", "optimizer state"))
    if not weights or len(gradients) != len(weights):
        return None
    if all(any(part in name for name in names) for part in _ADAM) and len(states) == 2 * len(weights):
        moments = states[: len(weights)], states[len(weights) :]
        lists: Lists = (weights, gradients, *moments, [], [])
        options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 1e-2, "eps": 1e-8, "amsgrad": False,
                   "maximize": False}  # fmt: skip
        return in_place_of(ops[-1], aten_overloads._fused_adamw_.default, lists, options, chain(*lists))
    if not any("sqrt" in name or "addcdiv" in name or "sign" in name for name in names):
        if len(states) not in (0, len(weights)):
            return None
        options = {"lr": 1e-3, "momentum": 0.9 if states else 0.0, "weight_decay": 0.0, "dampening": 0.0,
                   "nesterov": False, "maximize": False, "is_first_step": False}  # fmt: skip
        lists = weights, gradients, states
        return in_place_of(ops[-1], aten_overloads._fused_sgd_.default, lists, options, chain(*lists))
    return None


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
