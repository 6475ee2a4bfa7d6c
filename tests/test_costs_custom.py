"""register_cost, and formulas of torch.utils.flop_counter."""

from __future__ import annotations

import pytest
import torch
from costs_support import call_by_hand, costs_in, meta
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flopmeter import FlopMeter
from flopmeter.costs import RULES, UncountedError, costs_of, make_contraction, make_cost, register_cost
from flopmeter.records import ATTENTION, CONTRACTION, ELEMENTWISE, UNCOUNTED, Matmul
from flopmeter.trace.recorder import Recorder


@torch.library.custom_op("flopmeter_tests::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    raise NotImplementedError("the kernel of an extension that is not here")


@swiglu.register_fake
def _(gate, up):
    return torch.empty_like(gate)


PACKET = torch.ops.flopmeter_tests.swiglu


def run():
    return torch.ops.flopmeter_tests.swiglu(meta(4, 6), meta(4, 6))


@pytest.fixture(autouse=True)
def _leave_the_tables_as_they_were():
    rules, formulas = dict(RULES), dict(flop_registry)
    yield
    for table, before in ((RULES, rules), (flop_registry, formulas)):
        table.clear()
        table.update(before)


def test_an_op_without_rule_is_uncounted_but_its_bytes_are_known():
    (cost,) = costs_in(run)
    assert (cost.op_class, cost.flops, cost.bytes_read, cost.bytes_written) == (UNCOUNTED, 0, 192, 96)


def test_strict_names_the_op_and_what_to_do():
    recorder = Recorder()
    with recorder:
        run()
    with pytest.raises(UncountedError, match=r"register_cost\(torch\.ops\.flopmeter_tests\.swiglu\.default\)"):
        costs_of(recorder.trace.ops[-1].call, strict=True)


@pytest.mark.parametrize("op", [PACKET, PACKET.default, swiglu], ids=["packet", "overload", "custom_op"])
def test_a_rule_that_returns_a_number_gives_flops(op):
    @register_cost(op)
    def swiglu_cost(call):
        return 5 * call.outputs[0].numel

    (cost,) = costs_in(run)
    assert (cost.op_class, cost.flops, cost.bytes_read, cost.bytes_written) == (ELEMENTWISE, 5 * 24, 192, 96)


def test_a_rule_says_its_class():
    register_cost(PACKET, op_class=ATTENTION)(lambda call: 7)
    (cost,) = costs_in(run)
    assert (cost.op_class, cost.flops) == (ATTENTION, 7)


def test_a_rule_may_return_kernels():
    @register_cost(PACKET)
    def two_kernels(call):
        rows, width = call.argument("gate").shape
        return (
            make_contraction(call, [Matmul(1, rows, width, width)]),
            make_cost(call, ELEMENTWISE, 24, read=8, written=4),
        )

    product, rest = costs_in(run)
    assert (product.op_class, product.flops, product.macs) == (CONTRACTION, 2 * 4 * 6 * 6, 4 * 6 * 6)
    assert (rest.flops, rest.bytes_read, rest.bytes_written) == (24, 8, 4)


def test_a_rule_may_say_that_nothing_is_launched():
    register_cost(PACKET)(lambda call: ())
    assert costs_in(run) == []


@pytest.mark.parametrize("wrong", [-1, 2.5, True, None, [1]])
def test_a_rule_that_returns_something_else_is_told_so(wrong):
    register_cost(PACKET)(lambda call: wrong)
    with pytest.raises(TypeError, match=r"flopmeter_tests\.swiglu.*must return FLOPs"):
        costs_in(run)


def test_a_second_rule_for_an_op_is_an_error():
    register_cost(PACKET)(lambda call: 1)
    with pytest.raises(ValueError, match="has a rule already"):
        register_cost(PACKET)(lambda call: 2)


def test_torchs_own_ops_keep_their_rules():
    with pytest.raises(ValueError, match="has a rule already"):
        register_cost(torch.ops.aten.mm)(lambda call: 2)


def test_what_is_no_op_is_an_error():
    with pytest.raises(TypeError, match="takes an op"):
        register_cost("aten::mm")


def test_a_formula_of_torchs_counter_is_honoured():
    @register_flop_formula(PACKET)
    def formula(gate_shape, up_shape, *, out_shape, **_):
        assert tuple(gate_shape) == tuple(up_shape) == tuple(out_shape) == (4, 6)
        return 1234

    (cost,) = costs_in(run)
    assert (cost.op_class, cost.flops, cost.macs) == (CONTRACTION, 1234, 617)
    assert (cost.bytes_read, cost.bytes_written) == (192, 96)


def test_a_formula_that_looks_at_tensors_sees_tensors_and_is_not_metered():
    @register_flop_formula(PACKET, get_raw=True)
    def formula(gate, up, *, out_val, **_):
        return (gate * up).numel() + out_val.numel()

    recorder = Recorder()
    with recorder:
        run()
        recorded = len(recorder.trace.ops)
        (cost,) = costs_of(recorder.trace.ops[-1].call)
    assert cost.flops == 48
    assert len(recorder.trace.ops) == recorded


def test_a_rule_of_ones_own_goes_before_a_formula():
    register_flop_formula(PACKET)(lambda *shapes, **_: 1234)
    register_cost(PACKET)(lambda call: 7)
    (cost,) = costs_in(run)
    assert cost.flops == 7


def test_our_own_table_goes_before_formulas_for_torchs_ops():
    flop_registry[torch.ops.aten.mm] = lambda *_, **__: 1
    (cost,) = costs_in(lambda: torch.mm(meta(5, 7), meta(7, 3)))
    assert cost.flops == 2 * 5 * 7 * 3


def test_nothing_is_launched_for_tensors_of_size_zero():
    assert costs_in(lambda: meta(0, 6) + 1) == []
    assert costs_in(lambda: torch.mm(meta(0, 6), meta(6, 3))) == []
    (fill,) = costs_in(lambda: torch.mm(meta(4, 0), meta(0, 3)))
    assert (fill.flops, fill.bytes_written) == (0, 48)


def test_the_dtype_of_a_cost_is_that_of_the_input():
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    scaled = call_by_hand(
        torch.ops.aten._scaled_mm.default,
        (meta(16, 32, dtype=fp8), meta(32, 16, dtype=fp8), meta(), meta(), None, None, bf16),
        (meta(16, 16, dtype=bf16),),
    )
    int8 = call_by_hand(
        torch.ops.aten._int_mm.default,
        (meta(32, 8, dtype=torch.int8), meta(8, 16, dtype=torch.int8)),
        (meta(32, 16, dtype=torch.int32),),
    )
    fp4 = call_by_hand(
        torch.ops.aten._scaled_mm.default,
        (meta(16, 16, dtype=torch.float4_e2m1fn_x2), meta(16, 16, dtype=torch.float4_e2m1fn_x2), meta(16), meta(16)),
        (meta(16, 16, dtype=bf16),),
    )
    assert [costs_of(call)[0].dtype for call in (scaled, int8, fp4)] == ["fp8", "int8", "fp4"]
    (weights_only,) = costs_in(
        lambda: torch.ops.aten._weight_int8pack_mm(
            meta(4, 32, dtype=bf16), meta(16, 32, dtype=torch.int8), meta(16, dtype=bf16)
        )
    )
    assert weights_only.dtype == "bf16"


# --- reports of programs with ops that are not torch's own --------------------------------------------------------


def test_a_program_with_a_formula_of_torchs_counter_is_reported():
    """2·4096³ FLOP by the formula take 0.44 ms at the 312 TFLOP/s of an A100, and its 96 KB no time beside that."""
    register_flop_formula(PACKET)(lambda *shapes, **_: 2 * 4096**3)
    with FlopMeter("a100-sxm4-80gb") as meter:
        torch.ops.flopmeter_tests.swiglu(*(meta(128, 128, dtype=torch.bfloat16) for _ in range(2)))
    report = meter.report()
    assert report.flops == report.macs * 2 == 2 * 4096**3
    assert 2 * 4096**3 / 312e12 < report.kernel_seconds < 1.5 * 2 * 4096**3 / 312e12
    assert "uncounted: none" in str(report)


def test_a_formula_for_integers_counts_products_of_bytes_and_no_other_integer_work():
    register_flop_formula(PACKET)(lambda *shapes, **_: 2000)

    def run_in(dtype):
        with FlopMeter("a100-sxm4-80gb") as meter:
            torch.ops.flopmeter_tests.swiglu(meta(4, 6, dtype=dtype), meta(4, 6, dtype=dtype))
        return meter.report()

    int8, int64 = run_in(torch.int8), run_in(torch.int64)
    assert (int8.flops, int8.macs, int8.main_dtype) == (2000, 1000, "int8")
    assert (int64.flops, int64.macs) == (0, 0)
    assert int64.kernel_seconds > 0


def test_what_a_formula_counts_is_floating_by_what_goes_in_not_by_what_comes_out():
    register_flop_formula(PACKET)(lambda *shapes, **_: 2000)

    def flops(read, written):
        operands, result = (meta(4, 6, dtype=read), meta(4, 6, dtype=read)), meta(4, 6, dtype=written)
        return [cost.flops for cost in costs_of(call_by_hand(PACKET.default, operands, (result,)))]

    assert flops(torch.int64, torch.float32) == [0]
    assert flops(torch.float32, torch.int64) == [2000]
