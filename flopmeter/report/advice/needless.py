"""Work that a program asks for without need: products wider than its others, masks, gradients and loops that torch has
a cheaper way for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch._ops import OpOverload

from flopmeter.records import OF_WEIGHTS, Op, TensorSpec, Trace
from flopmeter.records.dtypes import name_of
from flopmeter.report.advice.autocast import policy_of
from flopmeter.report.advice.chosen_kernels import with_chosen_kernels
from flopmeter.report.advice.found_attention import ops_in
from flopmeter.report.advice.fused_attention import by_chosen_kernel, operands_of
from flopmeter.report.advice.gradients import fills_gradients
from flopmeter.report.advice.graph import Graph
from flopmeter.report.advice.math_attention import math_paths
from flopmeter.report.advice.number_types import type_of_others
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, with_other_ops
from flopmeter.report.advice.rewrite import (
    are_in_torch,
    changed_call,
    in_place_of,
    in_templates,
    is_view,
    statistics_of,
    with_ops,
    with_tensors,
)
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_CASTS = (aten._to_copy, aten.copy_, aten.clone)


@remedy
def wide_work(report: Report, trace: Trace) -> Iterator[Proposal]:
    """fp32 in a program whose products are in 16 bits, as a stray `.float()` leaves it: products and attention, and
    what stands alone between a cast and the cast back (a norm computes in fp32 whatever its input is)."""
    narrow = type_of_others(report)
    wide = {
        id(op) for kernel in report.kernels if kernel.cost.macs and kernel.cost.dtype == "fp32" for op in kernel.ops
    }
    places = [index for index, op in enumerate(trace.ops) if id(op) in wide]
    if narrow is not None and not _keeps_wide_weights(trace):
        places += _between_casts(trace, narrow)
    of_torch = in_templates(trace).union(*(each.ops for each, _ in math_paths(Graph(trace), report.unfused)))
    places = sorted(set(places) - of_torch)
    if narrow is None or not places:
        return
    touched = {number for index in places for number in trace.ops[index].storages}
    touched = {number for number in touched if trace.storages[number].role not in OF_WEIGHTS}
    touched = touched.difference(*(statistics_of(trace.ops[index]) for index in places))

    def narrowed(spec: TensorSpec, is_touched: object) -> TensorSpec:
        return spec._replace(dtype=narrow) if is_touched and spec.dtype is torch.float32 else spec

    then = with_tensors(trace, narrowed, touched.__contains__)
    put_in = {index: _all_narrowed(then.ops[index], narrowed) for index in places if id(trace.ops[index]) in wide}
    idle = {index for index, op in enumerate(then.ops) if _is_idle_cast(op) and not _is_idle_cast(trace.ops[index])}
    then = with_chosen_kernels(with_ops(then, idle, put_in), report.hardware)
    yield Proposal(
        f"fp32, where the program's other products are in {name_of(narrow)}",
        f"{str(narrow).removeprefix('torch.')} there too: {_narrowing([trace.ops[index] for index in places])}",
        priced(report, then), of_ops(trace, idle | set(places)),
    )  # fmt: skip


def _narrowing(ops: list[Op]) -> str:
    """The remedy that keeps them from fp32, by what torch.autocast does with each: it narrows products, widens norms
    and sums whatever their weights' type, and leaves all else as it is given."""
    policies = {policy_of(op) for op in ops if not _is_cast(op)}
    if policies == {"narrow"}:
        return "without .float(), or inside of torch.autocast"
    if "narrow" in policies:
        return "without .float() (torch.autocast narrows the products alone)"
    if policies & {"wide", "sums"}:
        return "without .float() or torch.autocast around it, whichever of them widens it"
    return "without .float()"


def _all_narrowed(op: Op, narrowed: Callable[[TensorSpec, object], TensorSpec]) -> Op:
    kept = statistics_of(op)
    return op._replace(call=changed_call(op.call, tuple(number not in kept for number in op.storages), narrowed, {}))


def _is_idle_cast(op: Op) -> bool:
    if op.packet not in _CASTS or not op.inputs or not op.outputs:  # torch.vmap casts numbers, too
        return False
    return all(spec.dtype == op.outputs[0].dtype for spec in op.inputs)


def _keeps_wide_weights(trace: Trace) -> bool:
    """Whether most weights are fp32, as under autocast, which has norms and losses in fp32: then casts are its own."""
    sizes = {
        spec.storage: (spec.dtype, spec.numel)
        for op in trace.ops
        for spec in op.inputs
        if trace.storages[spec.storage].role == "parameters"
    }
    wide = sum(numel for dtype, numel in sizes.values() if dtype is torch.float32)
    return 2 * wide > sum(numel for _, numel in sizes.values())


def _between_casts(trace: Trace, narrow: torch.dtype) -> list[int]:
    """Ops in fp32 between casts: all of their activations are casts of narrow tensors that nothing else reads (as in a
    norm that is written out), and their results (of that size, if any are) are only cast back. Casts like that count
    too."""
    from_narrow, cast_back, read = set[int](), set[int](), set[int]()
    readers = defaultdict[int, set[int]](set)
    for index, op in enumerate(trace.ops):
        types = (op.inputs[-1].dtype, op.outputs[0].dtype) if _is_cast(op) else None
        if types == (narrow, torch.float32):
            from_narrow.add(op.outputs[0].storage)
        if not is_view(op):
            for number in op.reads:
                readers[number].add(index)
            (cast_back if types == (torch.float32, narrow) else read).update(op.reads)
    cast_back -= read
    places = set[int]()
    for index, op in enumerate(trace.ops):
        if is_view(op) or op.phase == "optimizer":
            continue
        wide = {spec.storage: spec.numel for spec in op.inputs if spec.dtype is torch.float32}
        made = {spec.storage: spec.numel for spec in op.outputs if spec.dtype is torch.float32}
        most = max((*wide.values(), *made.values()), default=0)
        large = {number for number, size in wide.items() if size == most}
        results = {number for number, size in made.items() if size == most} or set(made)
        has_weights = any(trace.storages[number].role == "parameters" for number in wide)  # which kernels want alike
        is_cast_before = _is_cast(op) or (bool(large) and large <= from_narrow and not has_weights)
        if results and results <= cast_back and is_cast_before:
            places.add(index)
    while shared := {
        index
        for index in places
        if any(not readers[number] <= places for number in from_narrow.intersection(trace.ops[index].storages))
    }:
        places -= shared
    return sorted(places)


def _is_cast(op: Op) -> bool:
    return op.packet in _CASTS and bool(op.inputs) and bool(op.outputs) and not is_view(op)


@remedy
def masks_of_places(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Fused attention with a square mask that all sequences share, which is assumed to be causal."""
    put_in = {index: kernel for index, kernel, mask in _without_square_masks(report, trace) if _is_shared(mask)}
    if put_in and are_in_torch(put_in.values()):
        yield with_other_ops(
            report, trace, "all pairs are computed, and a mask is read for them that all sequences share",
            "is_causal=True in place of the mask, if it is the causal one",
            (), put_in,
        )  # fmt: skip


@remedy
def masks_of_tokens(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Fused attention with a mask for each sequence that a compiled kernel makes of token ids or positions: it compares
    positions, and documents that may be packed into a sequence. As transformers' models have it in training."""
    graph = Graph(trace)
    put_in, makers = {}, set[int]()
    for index, kernel, mask in _without_square_masks(report, trace):
        maker = graph.maker(trace.ops[index].storages[mask.storage])
        if maker is not None and not _is_shared(mask) and _compares_positions(trace.ops[maker]):
            put_in[index] = kernel
            makers.add(maker)
    if put_in and are_in_torch(put_in.values()):
        read_only_here = {
            maker for maker in makers if all(graph.is_read_only_by(number, put_in) for number in trace.ops[maker].makes)
        }
        yield with_other_ops(
            report, trace, "all pairs are computed, and a mask is read for them that was made of the tokens' positions",
            "is_causal=True in place of the mask, if no text is padded or packed (transformers makes no mask for "
            "attn_implementation='flash_attention_2')",
            read_only_here, put_in,
        )  # fmt: skip


def _without_square_masks(report: Report, trace: Trace) -> Iterator[tuple[int, Op, TensorSpec]]:
    """Fused attentions with a mask for all pairs of a sequence's tokens that is no weight: their indices, the causal
    kernels without it, and the mask."""
    for index, op in enumerate(trace.ops):
        mask = op.call.get("attn_bias")
        if not isinstance(mask, TensorSpec) or trace.storages[op.storages[mask.storage]].role == "parameters":
            continue
        q, k, _ = operands_of(op)
        queries, keys = q.shape[-2], k.shape[-2]
        if not queries == keys > 1 or mask.shape[-2:] != (queries, keys) or 0 in mask.stride[-2:]:
            continue
        if (kernel := by_chosen_kernel(op, report.hardware, is_causal=True)) is not None:
            yield index, kernel, mask


def _is_shared(mask: TensorSpec) -> bool:
    """Whether all sequences and heads have one mask."""
    return mask.distinct_elements == mask.shape[-2] * mask.shape[-1]


def _compares_positions(op: Op) -> bool:
    """Whether it is a compiled kernel that makes a mask of positions and ids, and of no other numbers."""
    made_of = ops_in(op)
    has_ids_alone = not any(spec.dtype.is_floating_point for spec in op.inputs if spec.numel > 1)
    return "arange" in made_of and not made_of.isdisjoint(("le", "lt", "ge", "gt")) and has_ids_alone


LEAST_LOOP = 16  # tensors: a loop over fewer is no loop over a model's parameters
_FOREACH: dict[tuple[object, int], OpOverload] = {  # by the op, and how many tensors it takes
    (aten.linalg_vector_norm, 1): aten_overloads._foreach_norm.Scalar,
    (aten.mul_, 1): aten_overloads._foreach_mul_.Scalar,
    (aten.mul_, 2): aten_overloads._foreach_mul_.List,
    (aten.div_, 1): aten_overloads._foreach_div_.Scalar,
    (aten.div_, 2): aten_overloads._foreach_div_.List,
    (aten.add_, 1): aten_overloads._foreach_add_.Scalar,
    (aten.add_, 2): aten_overloads._foreach_add_.List,
    (aten.sub_, 1): aten_overloads._foreach_sub_.Scalar,
    (aten.sub_, 2): aten_overloads._foreach_sub_.List,
    (aten.lerp_, 2): aten_overloads._foreach_lerp_.Scalar,
    (aten.lerp_, 3): aten_overloads._foreach_lerp_.List,
    (aten.copy_, 2): aten_overloads._foreach_copy_.default,
    (aten.zero_, 1): aten_overloads._foreach_zero_.default,
}


@remedy
def loops_over_tensors(report: Report, trace: Trace) -> Iterator[Proposal]:
    """An op that the program calls for one parameter, gradient or average after the other, outside of modules.
    Optimizers that have a kernel for all of it are told so (optimizers.py), and what fills gradients with zeros on one
    GPU is told to leave them out (gradients.py)."""
    phases = {"forward"} if any(step.takes_fused for step in trace.optimizer_steps) else {"forward", "optimizer"}
    loops: dict[OpOverload, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        func = _FOREACH.get((op.packet, _tensors_among(op.call.args)))
        if func is None or (report.cluster is None and fills_gradients(trace, op)):
            continue
        if not op.module and op.phase in phases and op.region is None:
            loops[func].append(index)
    put_in, dropped = {}, set()
    for func, loop in loops.items():
        if len({trace.ops[index].storages[0] for index in loop}) == len(loop) >= LEAST_LOOP:
            put_in[loop[-1]] = _at_once(func, [trace.ops[index] for index in loop])
            dropped |= set(loop)
    if put_in and are_in_torch(put_in.values()):
        yield with_other_ops(
            report, trace, f"{len(dropped)} kernels for one tensor each",
            "torch._foreach_ functions (in clip_grad_norm_, foreach=True)",
            dropped, put_in,
        )  # fmt: skip


def _at_once(func: OpOverload, ops: list[Op]) -> Op:
    """One op for the tensors of all of these; numbers are taken from the first."""
    of_inputs = [tuple(op.inputs[number] for op in ops) for number in range(_tensors_among(ops[0].call.args))]
    lists = iter(of_inputs)
    args = tuple(next(lists) if isinstance(value, TensorSpec) else value for value in ops[0].call.args)
    outputs = () if func._schema.name.endswith("_") else (op.outputs[0] for op in ops)
    kwargs = {name: value for name, value in ops[0].call.kwargs.items() if not isinstance(value, TensorSpec)}
    return in_place_of(ops[-1], func, args, kwargs, chain(*of_inputs), outputs)


def _tensors_among(args: tuple[object, ...]) -> int:
    return sum(isinstance(value, TensorSpec) for value in args)
