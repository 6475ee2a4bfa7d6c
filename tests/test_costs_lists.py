"""The ops that share a rule, each priced by hand: a list of ops has no entry that could be left out unseen."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from costs_support import call_by_hand, calls_of, flops, meta
from torch._ops import OpOverload
from torch.nn import functional as F

from flopmeter.costs import costs_of, find_rule
from flopmeter.costs.traffic import argument_roles
from flopmeter.records import (
    MOVEMENT,
    REDUCTION,
    Call,
    ConvolutionWork,
    GroupedMatmulWork,
    Matmul,
    MatmulWork,
    TensorSpec,
)
from flopmeter.trace.handling import is_composite

aten = torch.ops.aten
T, I64 = meta, torch.int64


def i64(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=I64)


# --- gradients that are added where their values came from: one add each; the input lends its shape alone

INPUT, GRAD = {1: (2, 3, 4), 2: (2, 3, 4, 4), 3: (2, 3, 4, 4, 4)}, {1: (2, 3, 7), 2: (2, 3, 7, 7), 3: (2, 3, 7, 7, 7)}


def overlapping() -> dict[str, tuple[Call, int]]:
    """The call, and the elements of the gradient; where there are indices, these are read too."""
    cases: dict[str, tuple[Any, ...]] = {}
    for dims in (1, 2, 3):
        grad, x = T(*GRAD[dims]), T(*INPUT[dims])
        for kind in ("reflection", "replication"):
            cases[f"{kind}_pad{dims}d_backward"] = ("default", grad, x, [1, 2] * dims)
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            cases[f"{kind}{dims}d_backward"] = ("default", grad, [7] * dims, list(INPUT[dims]))
    for dims in (2, 3):
        grad, x, where = T(*GRAD[dims]), T(*INPUT[dims]), i64(*GRAD[dims])
        options = ([2] * dims, [1] * dims, [0] * dims, [1] * dims, False)
        cases[f"max_pool{dims}d_with_indices_backward"] = ("default", grad, x, *options, where)
        cases[f"adaptive_max_pool{dims}d_backward"] = ("default", grad, x, where)
        cases[f"fractional_max_pool{dims}d_backward"] = ("default", grad, x, [2] * dims, [2] * dims, where)
    made = {}
    for name, (overload, grad, *rest) in cases.items():
        dims = grad.dim() - 2
        call = call_by_hand(getattr(getattr(aten, name), overload), (grad, *rest), (T(*INPUT[dims]),))
        made[name] = (call, grad.numel())
    return made


OVERLAPPING = overlapping()


@pytest.mark.parametrize("name", OVERLAPPING)
def test_each_gradient_is_read_once_and_added_once(name):
    """To zeros, but for up-sampling by the nearest, where a thread gathers what belongs to its element."""
    call, elements = OVERLAPPING[name]
    *filled, cost = costs_of(call)
    nbytes = call.outputs[0].nbytes
    assert [(zeros.flops, zeros.bytes_read, zeros.bytes_written) for zeros in filled] == (
        [] if "nearest" in name else [(0, 0, nbytes)]
    )
    index_bytes = 8 * elements * any(spec.dtype is I64 for spec in call.inputs)
    assert cost.flops_by_class == ((REDUCTION, elements),)
    assert (cost.bytes_read, cost.bytes_written) == (4 * elements + index_bytes, call.outputs[0].nbytes)


@pytest.mark.parametrize(("step", "windows", "filled"), [(1, 8, 10), (3, 3, 9), (4, 2, 6)])
def test_gradients_of_windows_are_added_to_zeros_where_the_windows_lie(step, windows, filled):
    """Ten numbers in windows of three. (The bytes of windows that overlap are at most those of the whole.)"""
    zeros, added = costs_of(calls_of(lambda: aten.unfold_backward(T(windows, 3), [10], 0, 3, step))[-1])
    assert (zeros.flops, zeros.bytes_read, zeros.bytes_written) == (0, 0, 40)
    assert added.flops_by_class == ((REDUCTION, 3 * windows),)
    assert (added.bytes_read, added.bytes_written) == (4 * 3 * windows + 4 * filled, 4 * filled)


# --- copies of views


def test_each_form_of_a_view_that_copies_is_a_copy():
    """`torch.ops.aten.X_copy` copies what the view X shows (native_functions.yaml, tag view_copy)."""
    schemas = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    names = {name for namespace, _, name in schemas if namespace == "aten" and name.endswith("_copy")}
    tensor = TensorSpec((4,), (1,), torch.float32, 0, 0, "meta")
    other = TensorSpec((4,), (1,), torch.float32, 1, 0, "meta")
    priced = set()
    for name in names:
        for form in (getattr(getattr(aten, name), overload) for overload in getattr(aten, name).overloads()):
            if torch.Tag.view_copy not in form.tags or is_composite(form) or _needs_other_layouts(form):
                continue
            call = Call(form, (tensor,), {}, (tensor,), (other,))
            assert find_rule(call) is not None, str(form)
            assert [cost.op_class for cost in costs_of(call)] == [MOVEMENT], str(form)
            priced.add(name)
    assert len(priced) >= 20


def _needs_other_layouts(form: OpOverload) -> bool:
    """Of sparse and of nested tensors, of forward gradients, and those that write into what they are given."""
    name = form.name()
    others = (
        ".out",
        "_out",
        "sparse",
        "indices",
        "values",
        "nested",
        "_fw_",
        "_make_dual",
        "_conj",
        "_neg_view",
        "_test_",
    )
    return any(word in name for word in others)


# --- the record of a convolution: [C_in/groups, kernel], and the positions that meet the whole kernel


@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_and_its_gradients_record_the_filters_and_the_positions(transposed):
    x, weight = T(2, 6, 9, 11), T(6, 4, 3, 5) if transposed else T(4, 6, 3, 5)
    operation = F.conv_transpose2d if transposed else F.conv2d
    x.requires_grad_()
    weight.requires_grad_()
    calls = calls_of(lambda: operation(x, weight).sum().backward())
    costs = [cost for call in calls for cost in costs_of(call) if isinstance(cost.work, ConvolutionWork)]
    positions = (9, 11) if transposed else (7, 7)
    assert [cost.work.shape[:3] for cost in costs] == [
        (4 if transposed else 6, (3, 5), positions), (4 if transposed else 6, (3, 5), positions),
        (4 if transposed else 6, (3, 5), ()),
    ]  # fmt: skip


# --- functions in one step of a recurrent network


def test_the_gates_of_a_cell_call_as_many_functions_as_their_formulas_have():
    """LSTM: three sigmoids and two tanh a unit, and tanh(c') again in the gradients. GRU: two sigmoids and a tanh."""
    units = 5 * 3
    lstm = call_by_hand(aten._thnn_fused_lstm_cell.default, (T(5, 12), T(5, 12), T(5, 3)), (T(5, 3), T(5, 3), T(5, 12)))
    backward = call_by_hand(
        aten._thnn_fused_lstm_cell_backward_impl.default,
        (T(5, 3), T(5, 3), T(5, 3), T(5, 3), T(5, 12), True), (T(5, 12), T(5, 3), T(12)),
    )  # fmt: skip
    gru = call_by_hand(aten._thnn_fused_gru_cell.default, (T(5, 9), T(5, 9), T(5, 3)), (T(5, 3), T(5, 15)))
    counts = [sum(cost.transcendentals for cost in costs_of(call)) for call in (lstm, backward, gru)]
    assert counts == [5 * units, units, 3 * units]


# --- collectives: what torch.distributed documents as the operands that a call reads and fills

IN_PLACE = {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"}
FILLS_ONLY = {"recv_", "recv_any_source_"}


def test_collectives_fill_their_outputs_read_their_inputs_and_do_both_in_place():
    ops = [getattr(torch.ops.c10d, name) for name in _collectives()]
    for op in ops:
        roles, name = argument_roles(op.default), op.__name__
        tensors = [
            each.name
            for each in op.default._schema.arguments
            if "Tensor" in str(each.type) and each.name != "sparse_indices"
        ]
        for argument in tensors:
            is_output = argument.startswith("output")
            expected = (
                (True, True) if name in IN_PLACE
                else (False, True) if name in FILLS_ONLY or is_output
                else (True, False)
            )  # fmt: skip
            assert roles[argument] == expected, (name, argument)
    assert len(ops) >= 18


def _collectives() -> list[str]:
    """Those that move tensors: barriers have a dummy."""
    schemas = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    names = {name for namespace, _, name in schemas if namespace == "c10d" and "barrier" not in name}
    return sorted(names)


# --- grouped products: four groups along the tokens, along the columns, along the depth, and as a batch

ENDS = meta(4, dtype=torch.int32)
GROUPED: dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor, Matmul]] = {
    "tokens": ((T(20, 6), T(4, 6, 5), ENDS), T(20, 5), Matmul(4, 5, 5, 6)),
    "columns": ((T(4, 6, 7), T(7, 20), ENDS), T(6, 20), Matmul(4, 6, 5, 7)),
    "depth": ((T(6, 24), T(24, 5), ENDS), T(4, 6, 5), Matmul(4, 6, 5, 6)),
    "batch": ((T(4, 6, 7), T(4, 7, 5)), T(4, 6, 5), Matmul(4, 6, 5, 7)),
}


@pytest.mark.parametrize("along", GROUPED)
def test_grouped_products_of_equal_groups_read_and_write_all_that_there_is(along):
    operands, out, matmul = GROUPED[along]
    call = call_by_hand(aten._grouped_mm.default, operands, (out,))
    (cost,) = costs_of(call)
    assert cost.macs == matmul.batch * matmul.m * matmul.n * matmul.k
    assert isinstance(cost.work, MatmulWork | GroupedMatmulWork)
    assert cost.work.matmuls == (matmul,)
    assert cost.bytes_read == sum(operand.nbytes for operand in operands)
    assert [(region.spec, region.nbytes) for region in cost.writes] == [(call.outputs[0], out.nbytes)]


def _functions_of_lists() -> list[str]:
    """torch._foreach_X for each X of one tensor."""
    names = [name for name in dir(torch) if name.startswith("_foreach_") and not name.endswith("_")]
    forms = {name: getattr(getattr(torch.ops.aten, name), "default", None) for name in names}
    return [
        name
        for name, form in forms.items()
        if form is not None and len(form._schema.arguments) == 1 and hasattr(torch, name.removeprefix("_foreach_"))
    ]


@pytest.mark.parametrize("name", _functions_of_lists())
def test_a_function_of_a_list_is_the_function_of_each_tensor_of_it(name):
    a, b = meta(24), meta(1000)
    of_each = getattr(torch, name.removeprefix("_foreach_"))
    of_list = functools.partial(getattr(torch, name), [a, b])
    assert all(find_rule(call) is not None for call in calls_of(of_list))
    assert flops(of_list) == flops(lambda: (of_each(a), of_each(b)))
