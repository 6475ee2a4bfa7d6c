"""What a cost follows from, and what it does not: laws for calls of every op, those that only a GPU runs among them.

A call is changed in one respect, whose effect is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import calls_catalogue
import torch
from costs_support import copies_what_has_gaps
from test_costs_by_hand import BY_HAND
from torch.utils._pytree import tree_map

from flopmeter.costs import costs_of, find_rule
from flopmeter.records import (
    Call,
    ConvolutionWork,
    Cost,
    GroupedMatmulWork,
    KernelWork,
    MatmulWork,
    RecurrentWork,
    TensorSpec,
)

CALLS = (*calls_catalogue.calls(), *(call for call, *_ in BY_HAND.values()))
HALF = {torch.float32: torch.float16, torch.int64: torch.int32}
TWICE = {torch.float32: torch.float64}


def specs(call: Call) -> tuple[TensorSpec, ...]:
    return (*call.inputs, *call.outputs)


def with_tensors(call: Call, change: Callable[[TensorSpec], TensorSpec]) -> Call:
    """An argument stays the same object as its entry among the inputs."""
    changed: dict[int, TensorSpec] = {}
    args, kwargs, inputs, outputs = tree_map(
        lambda leaf: changed.setdefault(id(leaf), change(leaf)) if isinstance(leaf, TensorSpec) else leaf,
        (call.args, dict(call.kwargs), call.inputs, call.outputs),
        is_leaf=lambda leaf: isinstance(leaf, TensorSpec),
    )
    return replace(call, args=args, kwargs=kwargs, inputs=inputs, outputs=outputs)


def with_outputs(call: Call, change: Callable[[TensorSpec], TensorSpec]) -> Call:
    return replace(call, outputs=tuple(map(change, call.outputs)))


def as_type(types: dict[torch.dtype, torch.dtype]) -> Callable[[TensorSpec], TensorSpec]:
    return lambda spec: spec._replace(dtype=types.get(spec.dtype, spec.dtype))


def broken(law: Callable[[Call], bool | None], least: int) -> set[str]:
    """The ops that break the law, which says something of so many calls at least."""
    verdicts = [(str(call.func), law(call)) for call in CALLS]
    assert sum(holds is not None for _, holds in verdicts) >= least
    return {name for name, holds in verdicts if holds is False}


def is_fresh(call: Call) -> bool:
    """Whether it writes into tensors of its own alone."""
    given = {spec.storage for spec in call.inputs}
    arguments = call.func._schema.arguments
    mutates = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    return bool(call.outputs) and not mutates and all(spec.storage not in given for spec in call.outputs)


def work(cost: Cost) -> tuple[object, ...]:
    return (
        cost.name, cost.flops_by_class, cost.macs, cost.transcendentals, cost.recomputed_flops, cost.masked_flops,
        _shapes(cost.work), cost.fused_multiply_add, cost.blocks_host,
    )  # fmt: skip


def _shapes(work: KernelWork) -> tuple[object, ...]:
    """Of what is multiplied. Alignment, rereads and indices follow from the width of a number and from strides."""
    match work:
        case MatmulWork(matmuls) | GroupedMatmulWork(matmuls):
            return matmuls
        case RecurrentWork(matmuls, _, _, recurrence):
            return matmuls, recurrence
        case ConvolutionWork(implicit, _, shape):
            return implicit, shape
    return ()


def moved(cost: Cost) -> tuple[int, int]:
    return cost.bytes_read, cost.bytes_written


def test_numbers_of_half_the_width_are_the_same_work_on_half_the_bytes():
    """fp32 and int64 against fp16 and int32. Safe softmax has a mask of one byte an element in between. The indices of
    bags are sorted digit by digit, their gradients added up in fp32; what is added by index is sorted by int64."""

    def law(call: Call) -> bool | None:
        if not {spec.dtype for spec in specs(call)} <= HALF.keys():
            return None
        wide, narrow = costs_of(call), costs_of(with_tensors(call, as_type(HALF)))
        return [(work(cost), *moved(cost)) for cost in wide] == [
            (work(cost), 2 * cost.bytes_read, 2 * cost.bytes_written) for cost in narrow
        ]

    assert broken(law, least=500) <= {  # with flags of a byte
        "aten._safe_softmax.default", "aten.logsumexp.default", "aten.count_nonzero.default",
        "aten.count_nonzero.dim_IntList", "aten.multinomial.default",
        "aten._embedding_bag_backward.default", "aten._embedding_bag_dense_backward.default",
        "aten.index_put.default", "aten._index_put_impl_.default",
    }  # fmt: skip


# Of these the one cost stands for several passes over the result, or for a copy that reads no more than it writes.
READ_BY_THE_RESULT = {
    "aten._safe_softmax.default", "aten.diagonal_copy.default", "aten.narrow_copy.default",
    "aten.as_strided_copy.default",
}  # fmt: skip


# These cast what they read to the type of their result first.
CAST_TO_THE_RESULT = {
    "aten.sum.default", "aten.sum.dim_IntList", "aten.nansum.default", "aten.prod.default", "aten.prod.dim_int",
    "aten.mean.default", "aten.mean.dim", "aten.cumsum.default", "aten.cumprod.default",
}  # fmt: skip


def test_a_wider_result_is_more_to_write_and_no_more_to_read():
    def law(call: Call) -> bool | None:
        if not is_fresh(call) or len(before := costs_of(call)) != 1:
            return None
        wide = with_outputs(call, as_type(TWICE))
        more = sum(new.nbytes - old.nbytes for new, old in zip(wide.outputs, call.outputs, strict=True))
        read, written = moved(before[0])
        return [moved(cost) for cost in costs_of(wide)] == [(read, written + more)]

    assert broken(law, least=400) <= READ_BY_THE_RESULT | CAST_TO_THE_RESULT


def test_tensors_with_gaps_are_as_much_work_and_as_many_bytes():
    """Every other element."""

    def law(call: Call) -> bool | None:
        def spread(spec: TensorSpec) -> TensorSpec:
            return spec._replace(stride=tuple(2 * stride for stride in spec.stride), offset=2 * spec.offset)

        if copies_what_has_gaps(call.name):
            return None
        spaced = costs_of(with_tensors(call, spread))
        return [(work(cost), *moved(cost)) for cost in costs_of(call)] == [
            (work(cost), *moved(cost)) for cost in spaced
        ]

    assert broken(law, least=600) == set()


def test_where_a_tensor_lies_in_its_storage_changes_nothing():
    def law(call: Call) -> bool:
        shifted = with_tensors(call, lambda spec: spec._replace(offset=spec.offset + 64))
        pairs = zip(costs_of(call), costs_of(shifted), strict=True)
        names = {"bytes_read", "bytes_written", *Cost.__dataclass_fields__} - {"reads", "writes"}  # places do change
        return all(getattr(a, name) == getattr(b, name) for a, b in pairs for name in names)

    assert broken(law, least=600) == set()


def test_what_returns_nothing_but_empty_tensors_launches_no_kernel():
    def law(call: Call) -> bool | None:
        def empty(spec: TensorSpec) -> TensorSpec:
            return spec._replace(shape=(0, *spec.shape[1:]), stride=spec.stride or (1,))

        return costs_of(with_outputs(call, empty)) == () if is_fresh(call) else None

    assert broken(law, least=500) == set()


def test_every_op_of_the_catalogue_is_counted():
    assert broken(lambda call: find_rule(call) is not None, least=600) == set()


def test_every_op_of_the_catalogue_launches_a_kernel():
    """It has no views and no factories of empty tensors (tests/calls_catalogue.py)."""
    recorded = calls_catalogue.calls()
    assert [str(call.func) for call in recorded if not costs_of(call)] == []


def test_no_kernel_has_more_functions_than_operations():
    def law(call: Call) -> bool:
        return all(cost.transcendentals <= cost.flops for cost in costs_of(call))

    assert broken(law, least=600) == set()


def test_an_operand_of_equal_rows_is_computed_on_in_full_and_read_no_more():
    """The first dimension expanded, with stride 0."""

    def law(call: Call) -> bool | None:
        written = {spec.storage for spec in call.outputs}

        def equal_rows(spec: TensorSpec) -> TensorSpec:
            is_written = spec.storage in written or not spec.shape
            return spec if is_written else spec._replace(stride=(0, *spec.stride[1:]))

        if copies_what_has_gaps(call.name):
            return None
        expanded = with_tensors(call, equal_rows)
        pairs = list(zip(costs_of(call), costs_of(expanded), strict=True))
        return all(work(a) == work(b) and b.bytes_read <= a.bytes_read for a, b in pairs)

    assert broken(law, least=600) == set()


def test_a_product_has_the_batch_the_rows_and_the_columns_of_its_result():
    def law(call: Call) -> bool | None:
        works = [cost.work for cost in costs_of(call)]
        products = [product for work in works if isinstance(work, MatmulWork) for product in work.matmuls]
        if len(products) != 1 or len(call.outputs[0].shape) not in (2, 3) or "grouped" in call.name:
            return None
        return products[0][:3] == (1, *call.outputs[0].shape)[-3:]

    assert broken(law, least=20) == set()
