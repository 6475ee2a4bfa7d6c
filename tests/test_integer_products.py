"""Products of integers: bytes run on the int8 unit, wider ones have none and are listed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import meta
from torch._higher_order_ops.out_dtype import out_dtype

from flopmeter import FlopMeter, UncountedError
from flopmeter.report.report import Report

aten = torch.ops.aten
I8, I32 = torch.int8, torch.int32
ROWS, DEPTH, COLUMNS = 32, 64, 48


def metered(program, **options) -> Report:
    with FlopMeter("a100-sxm4-80gb", **options) as meter:
        program()
    return meter.report()


def test_an_int8_product_with_int32_results_is_the_one_that_int_mm_runs():
    """torchao's dynamic int8 quantization calls `out_dtype`; 2·32·48·64 operations, priced on the int8 unit."""
    a, b = meta(ROWS, DEPTH, dtype=I8), meta(DEPTH, COLUMNS, dtype=I8)
    report = metered(lambda: out_dtype(aten.mm.default, I32, a, b), strict=True)
    plain = metered(lambda: torch._int_mm(a, b))
    assert report.flops == plain.flops == 2 * ROWS * COLUMNS * DEPTH
    assert [(row.cost.bytes, row.cost.dtype) for row in report.kernels] == [
        (ROWS * DEPTH + DEPTH * COLUMNS + 4 * ROWS * COLUMNS, "int8")
    ]
    assert report.seconds == plain.seconds


def test_a_compiled_int8_product_is_the_one_that_int_mm_runs():
    """torch's `is_int_mm` asks whether the tensors are on CUDA; where not, the graph multiplies matrices of int32."""

    def product(a, b):
        return out_dtype(aten.mm.default, I32, a, b)

    a, b = meta(ROWS, DEPTH, dtype=I8), meta(DEPTH, COLUMNS, dtype=I8)
    report = metered(lambda: torch.compile(product)(a, b), strict=True)
    assert report.flops == 2 * ROWS * COLUMNS * DEPTH
    assert [row.cost.dtype for row in report.kernels] == ["int8"]


def test_out_dtype_of_int8_returns_int32_of_the_products_shape():
    a, b = meta(ROWS, DEPTH, dtype=I8), meta(DEPTH, COLUMNS, dtype=I8)
    with FlopMeter():
        result = out_dtype(aten.mm.default, I32, a, b)
    assert (result.shape, result.dtype) == ((ROWS, COLUMNS), I32)


def test_out_dtype_of_cpu_tensors_computes_what_torch_computes():
    a, b = (torch.randint(-9, 9, shape, dtype=I8) for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS)))
    with FlopMeter():
        result = out_dtype(aten.mm.default, I32, a, b)
    assert torch.equal(result, a.int() @ b.int())


WIDE = {
    "mm": lambda: torch.mm(meta(4, 8, dtype=I32), meta(8, 6, dtype=I32)),
    "bmm": lambda: torch.bmm(meta(2, 4, 8, dtype=torch.int64), meta(2, 8, 6, dtype=torch.int64)),
    "addmm": lambda: torch.addmm(meta(6, dtype=I32), meta(4, 8, dtype=I32), meta(8, 6, dtype=I32)),
    "mv": lambda: torch.mv(meta(4, 8, dtype=torch.int16), meta(8, dtype=torch.int16)),
    "convolution": lambda: F.conv1d(meta(1, 3, 8, dtype=I32), meta(2, 3, 3, dtype=I32)),
}


@pytest.mark.parametrize("name", WIDE)
def test_a_product_of_wider_integers_is_listed_as_uncounted(name):
    report = metered(WIDE[name])
    assert [row.name for row in report.uncounted] == [name]
    assert f"uncounted: {name} (1)" in str(report)


@pytest.mark.parametrize("name", WIDE)
def test_strict_refuses_a_product_of_wider_integers_and_says_why(name):
    with pytest.raises(UncountedError, match="wider integers"):
        metered(WIDE[name], strict=True)


def test_other_work_on_integers_stays_zero_and_counted():
    x = meta(4, 8, dtype=I32)
    report = metered(lambda: (x * x + 1).sum(), strict=True)
    assert (report.flops, report.uncounted) == (0, [])
