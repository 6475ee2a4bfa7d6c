"""Products of groups, as of the tokens of each expert: known or assumed lengths, one kernel or a loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, meta
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flopmeter import FlopMeter, on_meta
from flopmeter.costs import costs_of
from flopmeter.records import Matmul
from flopmeter.report.report import Report

aten = torch.ops.aten
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EXPERTS, DEPTH, WIDTH = 8, 64, 32
WEIGHTS = EXPERTS * DEPTH * WIDTH


def ends_of(lengths: Sequence[int]) -> Tensor:
    return on_meta(torch.tensor(lengths).cumsum(0).int())


def metered(program, hardware="h100-sxm5-80gb", **options) -> Report:
    with FlopMeter(hardware, **options) as meter:
        program()
    return meter.report()


def product(lengths: Sequence[int], *, tokens: int | None = None, dtype=BF16, **options) -> Report:
    a, b = meta(tokens or sum(lengths), DEPTH, dtype=dtype), meta(EXPERTS, DEPTH, WIDTH, dtype=dtype)
    return metered(lambda: F.grouped_mm(a, b, offs=ends_of(lengths)), **options)


def test_a_decode_step_reads_the_experts_that_it_chose_and_no_others():
    """Two tokens' worth of rows for experts 1 and 5: two of eight weight matrices."""
    (kernel,) = product([0, 3, 0, 0, 0, 1, 0, 0]).kernels
    assert kernel.cost.flops == 2 * 4 * DEPTH * WIDTH
    assert kernel.cost.bytes_read == 2 * (4 * DEPTH + 2 * DEPTH * WIDTH) + 4 * EXPERTS
    assert kernel.cost.bytes_written == 2 * 4 * WIDTH


def test_rows_beyond_the_last_group_are_neither_multiplied_nor_touched():
    (kernel,) = product([1] * EXPERTS, tokens=20).kernels
    assert kernel.cost.flops == 2 * EXPERTS * DEPTH * WIDTH
    assert kernel.cost.bytes_read == 2 * (EXPERTS * DEPTH + WEIGHTS) + 4 * EXPERTS
    assert kernel.cost.bytes_written == 2 * EXPERTS * WIDTH


def test_groups_that_are_all_empty_take_a_launch_and_no_work():
    report = product([0] * EXPERTS, tokens=4)
    (timing,) = report.timings
    assert report.flops == timing.compute_seconds == 0 < timing.seconds
    assert report.bytes_read + report.bytes_written == 4 * EXPERTS


def test_the_gradient_of_the_weights_multiplies_each_group_over_its_own_depth():
    """[DEPTH, tokens] @ [tokens, WIDTH] by groups of tokens; an expert without tokens has zeros."""
    lengths = [5, 0, 1, 0, 0, 0, 2, 0]
    a, b = meta(8, DEPTH, dtype=BF16).t(), meta(8, WIDTH, dtype=BF16)
    (kernel,) = metered(lambda: F.grouped_mm(a, b, offs=ends_of(lengths))).kernels
    assert kernel.cost.flops == 2 * 8 * DEPTH * WIDTH
    assert kernel.cost.bytes_written == 2 * WEIGHTS
    assert kernel.cost.bytes_read == 2 * 8 * (DEPTH + WIDTH) + 4 * EXPERTS


def test_groups_of_columns_read_the_matrices_of_filled_groups_only():
    lengths = [16, 0, 0, 0, 0, 0, 8, 0]
    a, b = meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), meta(WIDTH, 24, dtype=BF16)
    (kernel,) = metered(lambda: F.grouped_mm(a, b, offs=ends_of(lengths))).kernels
    assert kernel.cost.flops == 2 * DEPTH * WIDTH * 24
    assert kernel.cost.bytes_read == 2 * (2 * DEPTH * WIDTH + WIDTH * 24) + 4 * EXPERTS
    assert kernel.cost.bytes_written == 2 * DEPTH * 24


def test_two_calls_of_one_geometry_cost_what_their_own_groups_are():
    a, b = meta(8, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16)
    even, one = ends_of([1] * 8), ends_of([8] + [0] * 7)

    def program():
        F.grouped_mm(a, b, offs=even)
        F.grouped_mm(a, b, offs=one)

    first, second = (kernel.cost.bytes_read for kernel in metered(program).kernels)
    assert first - second == 2 * 7 * DEPTH * WIDTH


def test_unknown_groups_are_taken_as_equal_and_the_report_says_so():
    a, b, ends = meta(3, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), meta(EXPERTS, dtype=torch.int32)
    report = metered(lambda: F.grouped_mm(a, b, offs=ends))
    assert report.kernels[0].cost.bytes_read == 2 * (3 * DEPTH + 3 * DEPTH * WIDTH) + 4 * EXPERTS
    assert "groups of equal length for aten._grouped_mm.default" in str(report)
    assert report.assumptions != ()


def test_known_groups_are_no_assumption():
    assert product([1] * EXPERTS).assumptions == ()


def test_balanced_routing_tells_how_long_the_groups_are():
    """Two tokens that choose 2 of 8 experts in turn: experts 0 to 3, one token each."""
    a, b, scores = meta(2, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), meta(2, EXPERTS)

    def program():
        experts, order = scores.topk(2).indices.flatten().sort()
        counts = torch.histc(experts.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        F.grouped_mm(a[order // 2], b, offs=counts.cumsum(0, dtype=torch.int32))

    report = metered(program, routing="balanced")
    (cost,) = (kernel.cost for kernel in report.kernels if kernel.cost.macs)
    assert cost.work.matmuls == (Matmul(4, 1, WIDTH, DEPTH),)
    assert not any("groups" in line for line in report.assumptions)


# --- which calls there are, and where results lie: as torch's own kernel of the CPU says ---------------------------

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
CALLS = {
    "groups of rows": ((6, 16), (3, 16, 48), {"offs": ENDS}),
    "groups of rows, 49 columns": ((6, 16), (3, 49, 16), {"offs": ENDS}),
    "groups of columns": ((3, 4, 16), (16, 48), {"offs": ENDS}),
    "groups of columns, 49 in all": ((3, 4, 16), (49, 16), {"offs": ENDS}),
    "groups of both": ((3, 4, 16), (3, 16, 48), {}),
    "groups of both, 49 columns": ((3, 4, 16), (3, 49, 16), {}),
    "groups of the depth": ((8, 16), (49, 16), {"offs": ENDS}),
    "groups of the depth, of which one has more": ((8, 16), (24, 48), {"offs": ENDS}),
    "another depth": ((6, 16), (3, 24, 48), {"offs": ENDS}),
    "another depth of groups of columns": ((3, 4, 16), (24, 48), {"offs": ENDS}),
    "rows of 49": ((6, 16), (3, 16, 49), {"offs": ENDS}),
    "depth of 49": ((6, 49), (3, 49, 48), {"offs": ENDS}),
    "no offsets": ((6, 16), (3, 16, 48), {}),
    "offsets of groups of both": ((3, 4, 16), (3, 16, 48), {"offs": ENDS}),
    "a bias": ((6, 16), (3, 16, 48), {"offs": ENDS, "bias": torch.zeros(48)}),
    "to fp32": ((6, 16), (3, 16, 48), {"offs": ENDS, "out_dtype": torch.float32}),
    "to bf16": ((6, 16), (3, 16, 48), {"offs": ENDS, "out_dtype": torch.bfloat16}),
}


def grouped_result(device: str, dtype: torch.dtype, case: str) -> object:
    """Shape, strides and type; None where torch refuses. The second operand is turned where it is then deep enough."""
    first, second, options = CALLS[case]
    a, b = (torch.zeros(shape, dtype=dtype, device=device) for shape in (first, second))
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    try:
        out = torch._grouped_mm(a, b if b.size(-1) > 16 else b.mT, **options)
    except RuntimeError:
        return None
    return out.shape, out.stride(), out.dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CALLS)
def test_grouped_products_run_where_torchs_own_do_and_lie_as_theirs(case, dtype):
    with FlopMeter("h100-sxm5-80gb"):
        ours = grouped_result("meta", dtype, case)
    assert ours == grouped_result("cpu", dtype, case)


@pytest.mark.parametrize("turned", [False, True])
def test_operands_of_which_no_dimension_lies_in_one_piece_are_refused_as_torch_does(turned):
    for device in ("cpu", "meta"):
        every_second = torch.zeros(6, 32, dtype=torch.float16, device=device)[:, ::2]
        b = torch.zeros(3, 16, 48, dtype=torch.float16, device=device)
        a, b = (b.mT, every_second.t()) if turned else (every_second, b)
        with FlopMeter("h100-sxm5-80gb"), pytest.raises(RuntimeError):
            torch._grouped_mm(a, b, offs=ENDS.to(device))


# --- one kernel, or a loop ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hardware", ["a100-sxm4-80gb", "l40s", "rtx-4090"])
def test_a_device_without_the_grouped_kernel_waits_and_runs_a_product_an_expert(hardware):
    report = product([2, 0, 3, 0, 1, 0, 0, 0], hardware=hardware)
    offsets, *products = [kernel.cost for kernel in report.kernels]
    assert (offsets.blocks_host, offsets.link_bytes) == (True, 4 * EXPERTS)
    assert sorted(cost.work.matmuls for cost in products) == [((1, rows, WIDTH, DEPTH),) for rows in (1, 2, 3)]
    assert sum(cost.bytes_written for cost in products) == 2 * 6 * WIDTH
    assert sum(cost.bytes_read for cost in products) == 2 * (6 * DEPTH + 3 * DEPTH * WIDTH)


@pytest.mark.parametrize("hardware", ["h100-sxm5-80gb", "b200-sxm-180gb"])
def test_a_device_with_the_grouped_kernel_launches_one(hardware):
    report = product([2, 0, 3, 0, 1, 0, 0, 0], hardware=hardware)
    assert [kernel.cost.blocks_host for kernel in report.kernels] == [False]


def test_the_same_trace_is_priced_as_each_device_runs_it():
    a, b, ends = meta(8, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), ends_of([1] * EXPERTS)
    with FlopMeter("h100-sxm5-80gb") as meter:
        F.grouped_mm(a, b, offs=ends)
    there = meter.report(hardware="a100-sxm4-80gb")
    assert (len(meter.report().kernels), len(there.kernels)) == (1, 1 + EXPERTS)
    assert there.flops == meter.report().flops
    assert {mode: len(there.in_mode(mode).kernels) for mode in ("compiled",)} == {"compiled": 1 + EXPERTS}


def test_the_loop_fills_the_gradients_of_experts_without_tokens_with_zeros():
    a, b = meta(8, DEPTH, dtype=BF16).t(), meta(8, WIDTH, dtype=BF16)
    report = metered(lambda: F.grouped_mm(a, b, offs=ends_of([8] + [0] * 7)), "a100-sxm4-80gb")
    _, *products = [kernel.cost for kernel in report.kernels]
    assert sorted(cost.flops for cost in products) == [0] * 7 + [2 * 8 * DEPTH * WIDTH]
    assert sum(cost.bytes_written for cost in products) == 2 * WEIGHTS


def test_a_cpu_multiplies_group_by_group_and_copies_nothing():
    a, b = torch.ones(4, DEPTH, dtype=BF16), torch.ones(2, DEPTH, WIDTH, dtype=BF16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    report = metered(lambda: F.grouped_mm(a, b, offs=ends), "cpu-xeon-8480plus", as_cuda=False)
    assert [kernel.cost.work.matmuls for kernel in report.kernels] == [((1, 1, WIDTH, DEPTH),), ((1, 3, WIDTH, DEPTH),)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_than_bf16_run_as_on_the_cpu_and_as_a_loop(dtype):
    """The result's shape and strides are those of a real CPU call; 20 columns make a padded row in fp16."""
    lengths, columns = [2, 0, 1], 20
    b = torch.ones(3, columns + 4, DEPTH, dtype=dtype)[:, :columns].mT  # rows of 16 bytes either way
    a, ends = torch.ones(3, DEPTH, dtype=dtype), torch.tensor(lengths).cumsum(0).int()
    real = F.grouped_mm(a, b, offs=ends)
    twins = on_meta((a, b, ends))
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        result = F.grouped_mm(*twins[:2], offs=twins[2])
    assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)
    assert [kernel.cost.work.matmuls for kernel in meter.report().kernels if kernel.cost.macs] == [
        ((1, rows, columns, DEPTH),) for rows in (1, 2)
    ]


def test_training_in_fp16_runs_and_counts_three_products_of_the_same_work():
    a = meta(8, DEPTH, dtype=torch.float16).requires_grad_()
    b = meta(EXPERTS, DEPTH, WIDTH, dtype=torch.float16).requires_grad_()
    ends = ends_of([1] * EXPERTS)
    report = metered(lambda: F.grouped_mm(a, b, offs=ends).relu().sum().backward(), strict=True)
    assert sum(2 * kernel.cost.macs for kernel in report.kernels) == 3 * 2 * 8 * DEPTH * WIDTH


def test_scaled_grouped_products_of_both_versions_read_the_filled_groups():
    a, b, ends = meta(4, DEPTH, dtype=FP8), meta(EXPERTS, DEPTH, WIDTH, dtype=FP8), meta(EXPERTS, dtype=torch.int32)
    rows, columns, out = meta(4), meta(EXPERTS, WIDTH), meta(4, WIDTH, dtype=BF16)
    old = call_by_hand(aten._scaled_grouped_mm.default, (a, b, rows, columns, ends, None, None, BF16), (out,))
    new = call_by_hand(
        aten._scaled_grouped_mm_v2.default, (a, b, [rows], [0], [0], [columns], [0], [0], ends, None, BF16), (out,)
    )
    for (cost,) in (costs_of(old), costs_of(new)):
        assert cost.flops == 2 * 4 * DEPTH * WIDTH + 2 * 4 * WIDTH
        assert cost.bytes_read == 4 * DEPTH + 4 * DEPTH * WIDTH + 4 * (4 + EXPERTS * WIDTH) + 4 * EXPERTS


def test_groups_of_packed_fp4_have_two_numbers_in_each_byte_of_their_depth():
    """Along the depth: 4 groups of 16 bytes, so 32 numbers, for 8 x 24 results each."""
    fp4 = torch.float4_e2m1fn_x2
    a, b = torch.empty(8, 64, dtype=fp4, device="meta"), torch.empty(24, 64, dtype=fp4, device="meta").t()
    scales, ends, out = meta(8, 8, dtype=FP8), meta(4, dtype=torch.int32), meta(4, 8, 24, dtype=BF16)
    call = call_by_hand(aten._scaled_grouped_mm.default, (a, b, scales, scales, ends, None, None, BF16), (out,))
    (cost,) = costs_of(call)
    assert cost.macs == 4 * 8 * 24 * 32


def test_many_short_groups_take_longer_than_one_product_of_all_their_rows():
    """A tile is computed whole: 128 groups of 2 rows fill 128 tiles of at least 64 rows, 256 rows only four."""
    a, b = meta(256, 4096, dtype=BF16), meta(128, 4096, 1024, dtype=BF16)
    groups = metered(lambda: F.grouped_mm(a, b, offs=ends_of([2] * 128))).timings[0]
    one = metered(lambda: torch.mm(a, b[0])).timings[0]
    assert groups.compute_seconds > 10 * one.compute_seconds


def test_groups_of_unequal_length_fill_the_device_together():
    """128 groups of 64 to 191 rows: each alone would leave most SMs idle; together they take what equal ones
    do, but for tiles of which only a part is used (half of the groups need two rows of tiles)."""
    b = meta(128, 4096, 1024, dtype=BF16)

    def seconds(lengths):
        a = meta(sum(lengths), 4096, dtype=BF16)
        return metered(lambda: F.grouped_mm(a, b, offs=ends_of(lengths))).timings[0].compute_seconds

    assert seconds([128] * 128) <= seconds(range(64, 192)) < 1.6 * seconds([128] * 128)


def test_groups_as_equal_as_can_be_differ_by_one():
    a, b, ends = meta(11, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), meta(EXPERTS, dtype=torch.int32)
    (kernel,) = metered(lambda: F.grouped_mm(a, b, offs=ends)).kernels
    assert kernel.cost.work.matmuls == (Matmul(5, 1, WIDTH, DEPTH), Matmul(3, 2, WIDTH, DEPTH))


def test_fake_tensors_of_the_cpu_hold_no_lengths():
    with FakeTensorMode():
        a, b, ends = (torch.empty(11, DEPTH).bfloat16(), torch.empty(EXPERTS, DEPTH, WIDTH).bfloat16(),
                      torch.empty(EXPERTS, dtype=torch.int32))  # fmt: skip
        (told,) = metered(lambda: F.grouped_mm(a, b, offs=ends)).assumptions
    assert told.startswith("groups of equal length for ")


def test_a_compiled_graph_assumes_groups_only_where_offsets_make_them():
    """Rows in groups; beside them a matrix for each expert, and a plain product."""
    a, b, ends = meta(3, DEPTH, dtype=BF16), meta(EXPERTS, DEPTH, WIDTH, dtype=BF16), meta(EXPERTS, dtype=torch.int32)
    matrices = meta(EXPERTS, 16, DEPTH, dtype=BF16)

    def told(program):
        report = metered(lambda: torch.compile(program)(a, b, matrices, ends))
        return [line for line in report.assumptions if line.endswith("in compiled graphs")]

    assert told(lambda a, b, matrices, ends: (F.grouped_mm(matrices, b), a @ b[0])) == []
    (line,) = told(lambda a, b, matrices, ends: F.grouped_mm(a, b, offs=ends))
    assert line.startswith("groups of equal length for ")
