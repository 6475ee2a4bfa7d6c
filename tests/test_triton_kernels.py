"""Triton kernels of a program: what they do is counted by hand; what they write, torch finds.

Reading TTIR needs no Triton, so those tests run everywhere; launches need the extra `triton` and no device.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from math import ceil

import pytest
import torch
from costs_support import call_by_hand
from torch import Tensor
from torch._higher_order_ops import triton_kernel_wrap
from written_modules import imported

import flopmeter
from flopmeter import FlopMeter
from flopmeter.costs import UncountedError, costs_of, kernels_of
from flopmeter.costs.triton_kernels import why_uncounted
from flopmeter.records import Cost, TritonOp
from flopmeter.torch_names.own_operators import own
from flopmeter.trace.triton_kernels import analysed, without_device
from flopmeter.trace.ttir import body_of, parse
from flopmeter.trace.ttir_accesses import accesses_of

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

MATMUL = """
module {
  tt.func public @product(%arg0: !tt.ptr<f16> {tt.divisibility = 16 : i32} loc("k.py":1:0), %arg1: i32) attributes {} {
    %cst = arith.constant dense<0.000000e+00> : tensor<64x128xf32> loc(#loc1)
    %0 = tt.call @cdiv(%arg1) : (i32) -> i32 loc(#loc2)
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %1 = scf.for %arg2 = %c0 to %0 step %c1 iter_args(%arg3 = %cst) -> (tensor<64x128xf32>)  : i32 {
      %4 = tt.load %a : tensor<64x32x!tt.ptr<f16>>
      %5 = tt.load %b : tensor<32x128x!tt.ptr<f16>>
      %6 = tt.dot %4, %5, %arg3, inputPrecision = tf32 : tensor<64x32xf16> * tensor<32x128xf16> -> tensor<64x128xf32>
      scf.yield %6 : tensor<64x128xf32>
    } {tt.num_stages = 3 : i32}
    %2 = math.exp %1 : tensor<64x128xf32>
    tt.store %p, %2 : tensor<64x128x!tt.ptr<f32>>
    tt.return
  }
  tt.func private @cdiv(%arg0: i32) -> i32 attributes {noinline = false} {
    %c31_i32 = arith.constant 31 : i32
    %c32_i32 = arith.constant 32 : i32
    %0 = arith.addi %arg0, %c31_i32 : i32
    %1 = arith.divsi %0, %c32_i32 : i32
    tt.return %1 : i32
  ^bb1:  // no predecessors
    %2 = ub.poison : i32
    tt.return %2 : i32
  }
}
"""

TRIANGLE = """
module {
  tt.func public @triangle(%arg0: !tt.ptr<f32>, %arg1: !tt.ptr<i32>) attributes {noinline = false} {
    %0 = tt.get_program_id x : i32
    %1 = tt.get_program_id y : i32
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %n = arith.addi %0, %c1 : i32
    scf.for %i = %c0 to %n step %c1  : i32 {
      %2 = arith.addf %x, %x : tensor<8xf32>
      %3 = arith.cmpi sgt, %i, %c0 : i32
      %4 = scf.if %3 -> (tensor<8xf32>) {
        %5 = arith.mulf %x, %x : tensor<8xf32>
        scf.yield %5 : tensor<8xf32>
      } else {
        scf.yield %x : tensor<8xf32>
      }
    }
    tt.return
  }
}
"""

SUM = """
module {
  tt.func public @total(%arg0: !tt.ptr<f32>) attributes {noinline = false} {
    %0 = tt.load %p : tensor<4x1024x!tt.ptr<f32>>
    %1 = "tt.reduce"(%0) <{axis = 1 : i32}> ({
    ^bb0(%arg1: f32, %arg2: f32):
      %2 = arith.addf %arg1, %arg2 : f32
      tt.reduce.return %2 : f32
    }) : (tensor<4x1024xf32>) -> tensor<4xf32>
    %3 = math.sqrt %1 : tensor<4xf32>
    tt.return
  }
}
"""


def counts(text: str, grid: tuple[int, ...], *arguments: object) -> dict[str, int]:
    body = body_of("kernel", parse(text), grid, arguments)
    assert not body.unknown
    return {op.name: op.number for op in body.ops}


@pytest.mark.parametrize("depth", [32, 1000, 1024])
def test_a_loop_over_an_argument_runs_as_often_as_the_argument_says(depth):
    steps, programs = ceil(depth / 32), 12
    assert counts(MATMUL, (4, 3), None, depth) == {
        "tt.load": programs * steps * (64 * 32 + 32 * 128),
        "tt.dot": programs * steps * 64 * 128 * 32,
        "math.exp": programs * 64 * 128,
        "tt.store": programs * 64 * 128,
    }


def test_a_loop_over_an_unknown_bound_is_named():
    body = body_of("kernel", parse(MATMUL), (4,), (None, None))
    assert body.unknown == ("a loop whose bounds are read from memory",)


def test_loops_that_differ_by_program_are_added_up_program_by_program():
    """Program x of seven runs x + 1 steps, of which all but the first multiply; twice, for y."""
    assert counts(TRIANGLE, (7, 2)) == {"arith.addf": 2 * 8 * 28, "arith.mulf": 2 * 8 * 21}


PERSISTENT = """
module {{
  tt.func public @persistent(%arg0: !tt.ptr<f32>, %arg1: i32) attributes {{noinline = false}} {{
    %0 = tt.get_program_id {axis} : i32
    %1 = tt.get_num_programs {axis} : i32
    scf.for %i = %0 to %arg1 step %1  : i32 {{
      %2 = arith.addf %x, %x : tensor<8xf32>
    }}
    tt.return
  }}
}}
"""


@pytest.mark.parametrize("tiles", [1, 10, 12])
@pytest.mark.parametrize(("axis", "others"), [("x", 12), ("y", 15), ("z", 20)])
def test_programs_that_take_turns_at_tiles_do_each_tile_once(axis, others, tiles):
    """Each begins with the tile of its number and goes on by as many as there are; those of other axes do the same."""
    text = PERSISTENT.format(axis=axis)
    assert counts(text, (5, 4, 3), None, tiles) == {"arith.addf": 8 * tiles * others}


def test_a_reduction_combines_all_but_one_of_each_row():
    assert counts(SUM, (5,)) == {"tt.load": 5 * 4096, "arith.addf": 5 * 4 * 1023, "math.sqrt": 5 * 4}


EARLY = """
module {
  tt.func public @early(%arg0: !tt.ptr<f32>, %arg1: i32) attributes {noinline = false} {
    %0 = tt.get_program_id x : i32
    %1 = arith.cmpi sge, %0, %arg1 : i32
    cf.cond_br %1, ^bb1, ^bb2
  ^bb1:  // pred: ^bb0
    tt.return
  ^bb2:  // pred: ^bb0
    cf.br ^bb4
  ^bb3:  // no predecessors
    cf.br ^bb4
  ^bb4:  // 2 preds: ^bb2, ^bb3
    %2 = tt.load %arg0 : !tt.ptr<f32>
    %3 = arith.cmpf oeq, %2, %cst : f32
    cf.cond_br %3, ^bb5, ^bb6
  ^bb5:  // pred: ^bb4
    tt.store %arg0, %cst : !tt.ptr<f32>
    tt.return
  ^bb6:  // pred: ^bb4
    cf.br ^bb7
  ^bb7:  // pred: ^bb6
    %4 = scf.if %3 -> (tensor<8xf32>) {
      %5 = arith.mulf %x, %x : tensor<8xf32>
      %6 = math.exp %5 : tensor<8xf32>
      scf.yield %6 : tensor<8xf32>
    } else {
      %7 = arith.addf %x, %x : tensor<8xf32>
      scf.yield %7 : tensor<8xf32>
    }
    tt.store %p, %4 : tensor<8x!tt.ptr<f32>>
    tt.return
  }
}
"""


def test_programs_beyond_the_end_return_early_and_the_others_go_the_longer_way_at_values_in_memory():
    """Of ten programs six are below the argument. They load a value, do not return at it, and multiply by it."""
    body = body_of("early", parse(EARLY), (10,), (None, 6))
    done = {op.name: op.number for op in body.ops}
    assert done == {"tt.load": 6, "arith.cmpf": 6, "arith.mulf": 48, "math.exp": 48, "tt.store": 48}
    assert (body.unknown, body.is_longest) == ((), True)
    assert not body_of("early", parse(EARLY), (10,), (None, 0)).ops


def test_a_jump_back_is_named():
    text = EARLY.replace("cf.br ^bb7", "cf.br ^bb4")
    assert body_of("early", parse(text), (10,), (None, 6)).unknown == ("a jump back in early",)


def test_a_line_that_cannot_be_read_is_named():
    text = SUM.replace("    %3 = math", "    ?? = of a later Triton\n    %3 = math")
    assert body_of("total", parse(text), (5,), ()).unknown == ("a line of code that cannot be read",)


def test_products_of_fp32_run_in_the_precision_that_they_ask_for():
    text = MATMUL.replace("64x32xf16>", "64x32xf32>").replace("32x128xf16>", "32x128xf32>")
    (dot,) = (op for op in body_of("k", parse(text), (1,), (None, 32)).ops if op.dot)
    assert dot == TritonOp("tt.dot", "tf32", 64 * 128 * 32, (64, 128, 32))
    (dot,) = (op for op in body_of("k", parse(text.replace("= tf32", "= ieee")), (1,), (None, 32)).ops if op.dot)
    assert dot.dtype == "f32"


@needs_triton
def test_element_wise_work_beside_products_in_tf32_has_the_rate_of_fp32(kernels):
    a, b, c = (meta(256, 256, dtype=torch.float32) for _ in range(3))
    with FlopMeter("h100-sxm5-80gb") as meter:
        kernels.product[(4, 2)](a, b, c, 256, 256, 256, BM=64, BN=128, BK=32)
    report = meter.report()
    assert (report.macs, report.kernels[0].cost.dtype) == (256**3, "tf32")
    assert 0 < report.kernel_seconds < 1e-3


def test_programs_that_take_different_numbers_of_steps_multiply_as_many_tiles_as_their_steps_together():
    """Program x of four takes x + 1 steps: ten tiles of 64 x 128 x 32, which are no whole number for each."""
    bound = "%pid = tt.get_program_id x : i32\n    %one = arith.constant 1 : i32\n    %0 = arith.addi %pid, %one : i32"
    text = MATMUL.replace("%0 = tt.call @cdiv(%arg1) : (i32) -> i32 loc(#loc2)", bound)
    out = meta(64, 128)
    call = replace(
        call_by_hand(own.triton_kernel.default, (out,), (out,)), body=body_of("k", parse(text), (4,), (None, None))
    )
    (cost,) = costs_of(call)
    assert cost.work.matmuls == ((10, 64, 128, 32),)
    assert cost.macs == 10 * 64 * 128 * 32


def test_a_kernel_that_cannot_be_counted_still_moves_what_it_loads_and_stores():
    """2 x 4 programs of one tile each of rows that lie in tensors a thousand times as large."""
    text = MATMUL.replace("%2 = math.exp %1", "%2 = tt.unheard_of %1")
    body = body_of("k", parse(text), (8,), (None, 32))
    table, out = meta(1000, 8 * 64 * 32), meta(1000, 8 * 64 * 128, dtype=torch.float32)
    (cost,) = costs_of(replace(call_by_hand(own.triton_kernel.default, (table, out), ()), body=body))
    assert cost.op_class == "uncounted"
    assert cost.bytes_read == 8 * (64 * 32 + 32 * 128) * 2


# --- what is read and written

SWAPPED = """
module {
  tt.func public @swapped(%arg0: !tt.ptr<f32>, %arg1: !tt.ptr<f32>, %arg2: !tt.ptr<i32>) attributes {noinline = false} {
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %c9 = arith.constant 9 : i32
    %0:2 = scf.for %arg3 = %c0 to %c9 step %c1 iter_args(%arg4 = %arg0, %arg5 = %arg1) -> (!tt.ptr<f32>, !tt.ptr<f32>) : i32 {
      %4 = tt.load %arg4 : !tt.ptr<f32>
      tt.store %arg5, %4 : !tt.ptr<f32>
      %5 = tt.addptr %arg4, %c1 : !tt.ptr<f32>, i32
      %6 = tt.addptr %arg5, %c1 : !tt.ptr<f32>, i32
      scf.yield %5, %6 : !tt.ptr<f32>, !tt.ptr<f32>
    }
    %1 = tt.load %arg2 : !tt.ptr<i32>
    %2 = tt.addptr %0#1, %1 : !tt.ptr<f32>, i32
    %3 = arith.constant 1.000000e+00 : f32
    tt.store %2, %3 : !tt.ptr<f32>
    tt.return
  }
}
"""  # noqa: E501


def test_a_loop_carries_each_pointer_by_itself_and_an_index_from_memory_is_no_address():
    assert accesses_of(parse(SWAPPED)) == ({0, 2}, {1})


def test_an_address_that_is_reached_in_many_ways_is_followed_once():
    """Each of 500 sums adds the one before to itself: as many paths as no time suffices for."""
    sums = "\n".join(f"    %s{n + 1} = arith.addi %s{n}, %s{n} : i32" for n in range(500))
    text = f"""
module {{
  tt.func public @sums(%arg0: !tt.ptr<f32>, %s0: i32) attributes {{noinline = false}} {{
{sums}
    %p = tt.addptr %arg0, %s500 : !tt.ptr<f32>, i32
    %v = tt.load %p : !tt.ptr<f32>
    tt.return
  }}
}}
"""
    read, written = accesses_of(parse(text))
    assert (0 in read, written) == (True, frozenset())


def test_an_address_may_come_to_a_block_from_either_of_two_others():
    """As the block's own argument, by a jump that a condition decides."""
    text = """
module {
  tt.func public @one_of_two(%arg0: !tt.ptr<f32>, %arg1: !tt.ptr<f32>, %arg2: !tt.ptr<f32>, %arg3: i1) attributes {} {
    cf.cond_br %arg3, ^bb1(%arg0 : !tt.ptr<f32>), ^bb1(%arg1 : !tt.ptr<f32>)
  ^bb1(%p: !tt.ptr<f32>):
    %v = tt.load %p : !tt.ptr<f32>
    tt.store %arg2, %v : !tt.ptr<f32>
    tt.return
  }
}
"""
    read, written = accesses_of(parse(text))
    assert (read & {0, 1, 2}, written) == ({0, 1}, {2})


# --- launches

PROGRAM_FILE = """
import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.language.extra import libdevice


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside) * 2.0
    tl.store(out_ptr + at, total, mask=inside)


@triton.jit
def copied(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n).to(out.dtype.element_ty), mask=i < n)


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) * 3.0, mask=at < n)


@triton.jit
def product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    sums = tl.zeros((BM, BN), dtype=tl.float32)
    for step in range(0, tl.cdiv(K, BK)):
        depth = step * BK + tl.arange(0, BK)
        left = tl.load(a + rows[:, None] * K + depth[None, :])
        sums += tl.dot(left, tl.load(b + depth[:, None] * N + columns[None, :]))
    tl.store(c + rows[:, None] * N + columns[None, :], sums.to(tl.float16))


tuned = triton.autotune(
    configs=[triton.Config({"BM": 64, "BN": 128, "BK": 32}), triton.Config({"BM": 32, "BN": 32, "BK": 32})],
    key=["M", "N", "K"],
)(product)


wide = triton.autotune(
    configs=[
        triton.Config({"BM": 256, "BN": 256, "BK": 64}),  # four times as wide as what the test multiplies
        triton.Config({"BM": 64, "BN": 48, "BK": 64}),  # Triton refuses it: 48 is no power of two
        triton.Config({"BM": 128, "BN": 64, "BK": 64}),
        triton.Config({"BM": 64, "BN": 64, "BK": 64}),
    ],
    key=["M", "N", "K"],
)(product)

pruned = triton.autotune(
    configs=[triton.Config({"BM": 64, "BN": 128, "BK": 32}), triton.Config({"BM": 32, "BN": 64, "BK": 32})],
    key=["M", "N", "K"],
    prune_configs_by={"early_config_prune": lambda configs, given, **options: configs[1:]},
)(product)


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})
@triton.jit
def softmax(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + at, mask=at < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * n + at, e / tl.sum(e, 0), mask=at < n)


@triton.jit
def ragged(x_ptr, lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.load(lengths_ptr + row)):
        total += tl.load(x_ptr + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + row * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def clipped(x_ptr, limit_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    if tl.load(limit_ptr) > 0:
        x = tl.exp(x) * 2.0
    tl.store(out_ptr + at, x)


@triton.jit
def numbered(lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    for start in range(0, tl.load(lengths_ptr + tl.program_id(0)), BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + at, at + tl.load(lengths_ptr))


@triton.jit
def gather(table_ptr, ids_ptr, out_ptr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.load(ids_ptr + tl.program_id(0))
    tl.store(out_ptr + tl.program_id(0) * WIDTH + at, tl.load(table_ptr + row * WIDTH + at))


@triton.jit
def histogram(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.atomic_add(out_ptr + x.to(tl.int32), x, mask=at < n)


@triton.jit
def doubled(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    out = tl.make_tensor_descriptor(out_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    out.store(at, x.load(at) + x.load(at))


@triton.jit
def doubled_by_host(x, out, BM: tl.constexpr, BN: tl.constexpr):
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    out.store(at, x.load(at) + x.load(at))


@triton.jit
def tanh(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, libdevice.tanh(tl.load(x_ptr + at, mask=at < n)), mask=at < n)


@triton.jit
def softplus(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    y = tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.f32 p, $1, 15.; @p mov.f32 $0, $1; @!p ex2.approx.ftz.f32 $0, $1;"
        "@!p fma.rn.f32 $0, $0, 1.0, 1.0; @!p lg2.approx.ftz.f32 $0, $0; }",
        "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
    )
    tl.store(out_ptr + at, y, mask=at < n)


@triton.jit
def rounded(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    sides = tl.floor(tl.abs(x)) + tl.ceil(x)
    tl.store(out_ptr + at, tl.div_rn(tl.fma(sides, x, x), x), mask=at < n)


@triton_op("flopmeter_tests::twice_added", mutates_args=())
def twice_added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    wrap_triton(add)[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, out, x.numel(), BLOCK=1024)
    return out


twice_added.register_autograd(lambda context, gradient: (gradient, 2 * gradient))
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return imported(tmp_path_factory.mktemp("triton"), "program_with_kernels", PROGRAM_FILE)


def meta(*shape: int, dtype: torch.dtype = torch.float16, **options) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def costs(program, **options) -> list[Cost]:
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        program()
    return [kernel.cost for kernel in kernels_of(meter.trace)]


@needs_triton
def test_a_launch_reads_and_writes_what_torch_finds(kernels):
    x, y, out = meta(10_000), meta(10_000), meta(10_000)
    (cost,) = costs(lambda: kernels.add[(10,)](x, y, out, 10_000, BLOCK=1024))
    assert (cost.name, cost.op_class) == ("add", "element-wise")
    assert (cost.bytes_read, cost.bytes_written) == (40_000, 20_000)
    assert cost.flops == 2 * 10 * 1024  # the lanes that the mask hides work, too


@needs_triton
def test_what_is_read_and_written_is_what_torchs_own_analysis_finds(kernels):
    torchs = getattr(triton_kernel_wrap, "identify_accessed_tensors", None)
    if torchs is None:
        pytest.skip("torch's analysis has another name")
    x, a = meta(4096), meta(512, 512)
    sizes = {"BM": 64, "BN": 128, "BK": 32}
    for name, arguments in {
        "add": (x, x, x, 4096, 1024), "scale": (x, 4096, 1024), "copied": (x, x, 4096, 1024),
        "product": (a, a, a, 512, 512, 512, *sizes.values()),
    }.items():  # fmt: skip
        kernel = getattr(kernels, name)
        given = dict(zip(kernel.arg_names, arguments, strict=True))
        found = analysed(kernel, given, (4,), {})
        with without_device():
            real = {key: torch.empty(2) if isinstance(value, Tensor) else value for key, value in given.items()}
            uses = torchs(kernel, real, {}).read_writes
        read, written = ({each.name for each in some} for some in (uses.reads, uses.writes))
        tensors = {key: key for key, value in given.items() if isinstance(value, Tensor)}
        assert found.by_use(tensors) == tuple(
            tuple(key for key in tensors if key in names) for names in (read - written, written - read, read & written)
        )


def added(kernels, x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty_like(x)
    kernels.add[(ceil(x.numel() / 1024),)](x, y, out, x.numel(), BLOCK=1024)
    return out


def reported(program) -> flopmeter.Report:
    with FlopMeter("h100-sxm5-80gb") as meter:
        program()
    return meter.report()


@needs_triton
def test_without_the_copies_before_it_a_launch_costs_what_it_costs_in_the_program_that_makes_none(kernels):
    x, y = meta(4096, 4096), meta(4096, 4096)
    plain, mended = (reported(each) for each in (lambda: added(kernels, x, y.clone()), lambda: added(kernels, x, y)))
    (told,) = (each for each in plain.advice if "no .contiguous() or .clone()" in each.remedy)
    assert told.gain_seconds == pytest.approx(plain.seconds - mended.seconds, abs=1e-9)


@needs_triton
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_larger_batch_of_a_program_with_kernels_of_its_own_takes_what_it_takes_when_it_runs(kernels, compiles):
    class Residual(torch.nn.Linear):
        def forward(self, x):
            return added(kernels, x, super().forward(x))

    def step(batch: int) -> flopmeter.Report:
        torch._dynamo.reset()
        model, x = Residual(512, 512, device="meta", dtype=torch.float16), meta(batch, 512)
        run = torch.compile(model) if compiles else model
        return reported(lambda: run(x))

    small = step(64)
    (told,) = (each for each in small.advice if "times the batch" in each.remedy)
    times = int(told.remedy.split()[0])
    assert times == 64
    assert small.seconds - told.gain_seconds == pytest.approx(step(64 * times).seconds / times, rel=0.01)


@needs_triton
def test_what_is_updated_in_place_is_read_and_written(kernels):
    (cost,) = costs(lambda: kernels.scale[lambda arguments: (4,)](meta(4096), 4096, BLOCK=1024))
    assert (cost.bytes_read, cost.bytes_written, cost.flops) == (8192, 8192, 4096)


@needs_triton
def test_a_launch_takes_the_eight_bit_floats_that_ada_and_newer_have(kernels):
    """e4m3 numbers, one byte each."""
    x, out = meta(4096), meta(4096, dtype=torch.float8_e4m3fn)
    (cost,) = costs(lambda: kernels.copied[(4,)](x, out, 4096, BLOCK=1024))
    assert (cost.bytes_read, cost.bytes_written) == (8192, 4096)


@needs_triton
def test_a_product_has_the_flops_of_a_matmul(kernels):
    a, b, c = meta(512, 1024), meta(1024, 256), meta(512, 256)
    launch = lambda: kernels.product[(8, 2)](a, b, c, 512, 256, 1024, BM=64, BN=128, BK=32)  # noqa: E731
    (cost,) = costs(launch)
    products = dict(cost.flops_by_class)["tensor contraction"]
    assert products == 2 * 512 * 256 * 1024
    assert cost.flops - products == 512 * 256 * 1024 // 32  # the sums of the steps
    assert cost.work.matmuls == ((16, 64, 128, 1024),)
    assert cost.dtype == "fp16"


@needs_triton
def test_a_product_that_fills_a_part_of_a_large_tensor_writes_that_part(kernels):
    a, b, c = meta(512, 1024), meta(1024, 256), meta(4096, 256)
    (cost,) = costs(lambda: kernels.product[(8, 2)](a, b, c, 512, 256, 1024, BM=64, BN=128, BK=32))
    assert cost.bytes_written == 2 * 512 * 256
    assert cost.bytes_read == a.nbytes + b.nbytes


@needs_triton
def test_an_autotuned_kernel_takes_its_first_configuration_that_fits_and_says_so(kernels):
    a, b, c = meta(512, 1024), meta(1024, 256), meta(512, 256)
    grid = lambda meta: (512 // meta["BM"], 256 // meta["BN"])  # noqa: E731
    with FlopMeter("h100-sxm5-80gb") as meter:
        kernels.tuned[grid](a, b, c, 512, 256, 1024)
    (kernel,) = kernels_of(meter.trace)
    assert kernel.op.call.body.programs == 16
    (assumed,) = meter.report().assumptions
    assert assumed.startswith("the first fitting configuration of an autotuned kernel for product at ")
    assert "test_triton_kernels.py" in assumed


@needs_triton
@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_autotuned_kernel_takes_no_configuration_whose_tiles_are_much_wider_than_its_matrices(kernels, is_compiled):
    """Tiles of 256 over matrices of 64 columns multiply four times as much as those of 64."""

    def program(a, b):
        c = a.new_empty(512, 64)
        grid = lambda meta: (-(-512 // meta["BM"]), -(-64 // meta["BN"]))  # noqa: E731
        kernels.wide[grid](a, b, c, 512, 64, 1024)
        return c

    run = torch.compile(program, fullgraph=True) if is_compiled else program
    with FlopMeter("h100-sxm5-80gb") as meter:
        run(meta(512, 1024), meta(1024, 64))
    report = meter.report()
    assert report.macs == 512 * 64 * 1024
    assert [kernel.op.call.body.programs for kernel in report.kernels] == [4]  # the first of those: 128 rows each
    (assumed,) = report.assumptions
    assert assumed.startswith("the first fitting configuration of an autotuned kernel for product at ")


@needs_triton
def test_a_program_reads_the_configuration_of_its_launch_among_those_that_the_kernel_leaves(kernels):
    a, b, c = meta(512, 1024), meta(1024, 256), meta(512, 256)
    grid = lambda meta: (512 // meta["BM"], 256 // meta["BN"])  # noqa: E731
    with FlopMeter("h100-sxm5-80gb") as meter:
        kernels.pruned[grid](a, b, c, 512, 256, 1024)
        assert kernels.pruned.best_config.kwargs == {"BM": 32, "BN": 64, "BK": 32}
    (kernel,) = kernels_of(meter.trace)
    assert kernel.op.call.body.programs == 16 * 4


@needs_triton
def test_heuristics_give_their_values(kernels):
    x, out = (meta(7, 1000, dtype=torch.float32) for _ in range(2))
    (cost,) = costs(lambda: kernels.softmax[(7,)](x, out, 1000))
    assert cost.flops == 7 * (1024 + 1024 + 1023 + 1024)  # difference, exp, sum, quotient; a maximum is none
    assert cost.transcendentals == 7 * 1024


@needs_triton
@pytest.mark.parametrize("rows", [50_000, 16])
def test_a_kernel_that_loads_less_than_its_tensors_hold_reads_less(kernels, rows):
    table, ids, out = meta(rows, 256), meta(10, dtype=torch.int64), meta(10, 256)
    (cost,) = costs(lambda: kernels.gather[(10,)](table, ids, out, WIDTH=256))
    assert (cost.bytes_read, cost.bytes_written, cost.op_class) == (10 * 8 + 10 * 512, 5120, "data movement")


@needs_triton
def test_an_atomic_addition_is_a_flop_and_reads_and_writes_what_it_adds_to(kernels):
    x, out = meta(4096, dtype=torch.float32), meta(1 << 20, dtype=torch.float32)
    (cost,) = costs(lambda: kernels.histogram[(4,)](x, out, 4096, BLOCK=1024))
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == (4096, 2 * 4 * 4096, 4 * 4096)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_tiles_that_descriptors_load_and_store_are_counted_as_those_of_pointers(kernels, dtype):
    """2 x 8 programs of 64 x 128 numbers, each loaded twice, of tensors of 1,024 x 1,024. How much of integers goes
    through a descriptor is not seen: then it is taken to be all."""
    x, out = meta(1024, 1024, dtype=dtype), meta(1024, 1024, dtype=dtype)
    (cost,) = costs(lambda: kernels.doubled[(2, 8)](x, out, 1024, 1024, BM=64, BN=128))
    tiles, is_float = 16 * 64 * 128, dtype.is_floating_point
    assert cost.op_class != "uncounted"
    assert cost.flops == is_float * tiles
    assert (cost.bytes_read, cost.bytes_written) == ((2 * 4 * tiles, 4 * tiles) if is_float else (4 << 20, 4 << 20))


@needs_triton
def test_descriptors_that_the_host_makes_are_counted_as_those_that_a_kernel_makes(kernels):
    """As above: what is stored is written alone, what is loaded read."""
    made = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor
    x, out = (made(meta(1024, 1024, dtype=torch.float32), [64, 128]) for _ in range(2))
    for _ in range(2):  # the second is known
        (cost,) = costs(lambda: kernels.doubled_by_host[(2, 8)](x, out, BM=64, BN=128))
        assert cost.flops == 16 * 64 * 128
        assert (cost.bytes_read, cost.bytes_written) == (2 * 4 * cost.flops, 4 * cost.flops)


@needs_triton
def test_a_function_of_a_library_is_a_flop_and_takes_the_special_units(kernels):
    x, out = meta(4096, dtype=torch.float32), meta(4096, dtype=torch.float32)
    (cost,) = costs(lambda: kernels.tanh[(4,)](x, out, 4096, BLOCK=1024))
    assert (cost.flops, cost.transcendentals) == (4096, 4096)


@needs_triton
def test_inline_ptx_has_the_flops_of_its_instructions(kernels):
    """A multiply-add, and two functions."""
    x, out = meta(4096, dtype=torch.float32), meta(4096, dtype=torch.float32)
    (cost,) = costs(lambda: kernels.softplus[(4,)](x, out, 4096, BLOCK=1024))
    assert (cost.flops, cost.transcendentals) == (4 * 4096, 2 * 4096)


INLINE = """
module {
  tt.func public @inline(%arg0: !tt.ptr<f32>) attributes {noinline = false} {
    %0 = tt.elementwise_inline_asm "ASM" {constraints = "=r,r", packed_element = PACKED : i32, pure = true} %x
      : tensor<64xf32> -> tensor<64xf32>
    tt.return
  }
}
""".replace("%x\n      :", "%x :")


@pytest.mark.parametrize(
    ("asm", "packed", "found"),
    [
        ("mov.f32 $0, $1;", 1, {"ptx.mov": 64}),
        (r"{add.f32 $0, $2, 1.0;}\0A{add.f32 $1, $3, 1.0;}\0A", 2, {"ptx.add": 64}),
        ("mul.rn.f16x2 $0, $1, $2; add.s32 $0, $0, 1;", 2, {"ptx.mul": 64}),
        ("add.f32 $0, $2, 1.0;", 2, {"tt.elementwise_inline_asm": 64}),  # of one element in two
        ("ld.global.u32 $0, [$1];", 1, {"ptx.ld": 64}),
    ],
)
def test_instructions_of_inline_ptx_are_read_an_element_each(asm, packed, found):
    assert counts(INLINE.replace("ASM", asm).replace("PACKED", str(packed)), (1,)) == found


def test_inline_ptx_that_touches_memory_or_is_not_known_is_named():
    for asm in ("ld.global.f32 $0, [$1];", "atom.add.u32 $0, [$1], 1;", "frobnicate.f32 $0, $1;"):
        body = body_of("kernel", parse(INLINE.replace("ASM", asm).replace("PACKED", "1")), (1,), ())
        assert why_uncounted(body) == f"ptx.{asm.partition('.')[0]}"


@needs_triton
def test_rounding_absolute_values_and_exact_divisions_are_a_flop_each_and_no_function(kernels):
    """As in eager mode: abs, floor, ceil, the addition and the division, and the two of a multiply-add."""
    x, out = meta(4096, dtype=torch.float32), meta(4096, dtype=torch.float32)
    (cost,) = costs(lambda: kernels.rounded[(4,)](x, out, 4096, BLOCK=1024))
    assert (cost.flops, cost.transcendentals) == (7 * 4096, 0)


@needs_triton
def test_a_loop_over_loaded_lengths_that_only_loads_and_stores_moves_what_its_tensors_hold(kernels):
    """As torchtitan's kernel that writes which row of an expert is which token: integers alone, so no FLOP."""
    lengths, out = meta(4, dtype=torch.int32), meta(999, dtype=torch.int32)
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        kernels.numbered[(4,)](lengths, out, BLOCK=64)
    (row,) = meter.report().rows("kernel")
    assert row.name.startswith("numbered (data movement)")
    assert (row.flops, row.bytes_read, row.bytes_written) == (0, 4 * 4, 999 * 4)


@needs_triton
def test_loops_over_loaded_lengths_are_uncounted_by_name(kernels):
    x, lengths, out = meta(99, 64, dtype=torch.float32), meta(4, dtype=torch.int32), meta(4, 64, dtype=torch.float32)
    launch = lambda: kernels.ragged[(4,)](x, lengths, out, BLOCK=64)  # noqa: E731
    with FlopMeter("h100-sxm5-80gb") as meter:
        launch()
    report = meter.report()
    assert [row.name for row in report.uncounted] == ["ragged"]
    assert "uncounted: the Triton kernel ragged, for a loop whose bounds are read from memory" in report.notes
    with pytest.raises(UncountedError, match=r"Triton kernel ragged .* a loop whose bounds are read from memory"):
        costs(launch, strict=True)


@needs_triton
def test_what_is_uncounted_for_one_reason_is_said_once(kernels):
    """Triton compiles a kernel for each size of block that it is called with."""
    x, lengths, out = meta(99, 64, dtype=torch.float32), meta(4, dtype=torch.int32), meta(4, 64, dtype=torch.float32)
    with FlopMeter("h100-sxm5-80gb") as meter:
        for block in (32, 64):
            kernels.ragged[(4,)](x, lengths, out, BLOCK=block)
    assert sum("the Triton kernel ragged" in note for note in meter.report().notes) == 1


@needs_triton
def test_a_kernel_that_branches_on_a_value_in_memory_goes_the_longer_way_and_its_report_says_so(kernels):
    x, limit, out = meta(256, dtype=torch.float32), meta(1, dtype=torch.float32), meta(256, dtype=torch.float32)
    with FlopMeter("h100-sxm5-80gb") as meter:
        kernels.clipped[(2,)](x, limit, out, BLOCK=128)
        kernels.scale[(2,)](out, 256, BLOCK=128)
    report = meter.report()
    assert [row.flops for row in report.rows("kernel")] == [2 * 256, 256]
    assert "programs of clipped go the longer way where values in memory decide which" in report.assumptions


@needs_triton
def test_triton_op_records_the_kernels_that_it_launches_and_its_gradient(kernels):
    def program():
        x, y = meta(4096, requires_grad=True), meta(4096, requires_grad=True)
        torch.autograd.grad(kernels.twice_added(x, y), (x, y), meta(4096))

    names = [cost.name for cost in costs(program)]
    assert names == ["add", "mul"]


@needs_triton
def test_wrapped_kernels_are_recorded_outside_of_an_operator_too(kernels):
    from torch.library import wrap_triton

    x, y, out = meta(4096), meta(4096), meta(4096)
    (cost,) = costs(lambda: wrap_triton(kernels.add)[(4,)](x, y, out, 4096, BLOCK=1024))
    assert cost.name == "add"


@needs_triton
def test_values_of_what_a_kernel_writes_are_not_known_afterwards(kernels):
    def program():
        counts = torch.zeros(4, device="meta")
        kernels.scale[(1,)](counts, 4, BLOCK=16)
        return counts[0].item()

    with pytest.raises(RuntimeError, match="data-dependent"):
        costs(program)


@needs_triton
def test_a_compiled_report_keeps_the_kernel_apart(kernels):
    def program():
        x, out = meta(4096), meta(4096)
        kernels.add[(4,)](x.sin(), x.cos(), out, 4096, BLOCK=1024)
        out.exp()

    with FlopMeter("h100-sxm5-80gb") as meter:
        program()
    names = [kernel.cost.name for kernel in meter.report(mode="compiled").launches.kernels]
    assert names == ["fused(sin, cos)", "add", "exp"]


@needs_triton
@pytest.mark.parametrize("is_operator", [False, True])
def test_a_compiled_function_launches_the_kernel_in_its_own_graph(kernels, is_operator):
    """What comes before and after it does not fuse into it: sin and cos are one kernel, a product and exp another."""

    def launched(x, y):
        out = torch.empty_like(x)
        kernels.add[lambda meta: (4,)](x, y, out, 4096, BLOCK=1024)
        return out

    add = kernels.twice_added if is_operator else launched
    with FlopMeter("h100-sxm5-80gb") as meter:
        compiled = torch.compile(lambda x: (add(x.sin(), x.cos()) * x).exp(), fullgraph=True)
        for _ in range(2):
            compiled(meta(4096))
    report = meter.report()
    graphs = [(graph.part, graph.calls, graph.breaks) for graph in report.graphs]
    assert graphs == [("inference", 2, ())], report.explain_compile()
    assert "predicted" in str(report)
    costs = [kernel.cost for kernel in report.kernels if kernel.op.graph is not None]
    assert [cost.name for cost in costs] == ["fused(sin, cos)", "add", "fused(mul, exp)"] * 2
    assert [(cost.bytes_read, cost.bytes_written, cost.flops) for cost in costs[:3]] == [
        (8192, 2 * 8192, 2 * 4096),
        (2 * 8192, 8192, 2 * 4096),
        (2 * 8192, 8192, 2 * 4096),
    ]
    assert not report.uncounted


@needs_triton
def test_a_compiled_function_passes_descriptors_of_the_host_to_the_kernel(kernels):
    """16 programs of 64 x 128 numbers, each loaded twice and stored once, between two kernels of inductor's."""
    made = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor.from_tensor

    def program(x):
        x = x.sin()
        out = torch.empty_like(x)
        kernels.doubled_by_host[lambda meta: (16, 8)](made(x, [64, 128]), made(out, [64, 128]), BM=64, BN=128)
        return out.exp()

    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(program, fullgraph=True)(meta(1024, 1024, dtype=torch.float32))
    report = meter.report()
    costs = [kernel.cost for kernel in report.kernels if kernel.op.graph is not None]
    assert [cost.name for cost in costs] == ["sin", "doubled_by_host", "exp"], report.explain_compile()
    assert [(cost.flops, cost.bytes_written) for cost in costs] == [(1 << 20, 4 << 20)] * 3
    assert not report.uncounted


@needs_triton
def test_a_compiled_function_differentiates_through_the_kernel(kernels):
    def program():
        x, y = meta(4096, requires_grad=True), meta(4096, requires_grad=True)
        out = torch.compile(lambda x, y: kernels.twice_added(x, y).exp())(x, y)
        assert [grad.shape for grad in torch.autograd.grad(out, (x, y), meta(4096))] == [(4096,)] * 2

    names = [cost.name for cost in costs(program)]
    assert names == ["add", "exp", "mul"]


@needs_triton
def test_an_autotuned_kernel_in_a_compiled_function_takes_its_first_configuration_that_fits_and_says_so(kernels):
    def program(a, b):
        c = a.new_empty(512, 256)
        kernels.tuned[lambda meta: (512 // meta["BM"], 256 // meta["BN"])](a, b, c, 512, 256, 1024)
        return c

    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(program, fullgraph=True)(meta(512, 1024), meta(1024, 256))
    report = meter.report()
    assert 2 * report.macs == 2 * 512 * 256 * 1024
    assert [kernel.op.call.body.programs for kernel in report.kernels] == [16]
    (assumed,) = report.assumptions
    assert assumed.startswith("the first fitting configuration of an autotuned kernel for product at ")
    assert "test_triton_kernels.py" in assumed


@needs_triton
def test_an_uncounted_kernel_in_a_compiled_function_is_listed(kernels):
    def program(x, lengths):
        out = torch.empty_like(x[:4])
        kernels.ragged[(4,)](x, lengths, out, BLOCK=64)
        return out

    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(program)(meta(99, 64, dtype=torch.float32), meta(4, dtype=torch.int32))
    report = meter.report()
    assert [row.name for row in report.uncounted] == ["ragged"]
    assert "uncounted: the Triton kernel ragged, for a loop whose bounds are read from memory" in report.notes


@needs_triton
def test_nothing_is_left_behind(kernels):
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, Autotuner.run, type(driver).active
    with pytest.raises(TypeError):
        costs(lambda: kernels.add[(10,)](meta(10)))
    assert (JITFunction.run, Autotuner.run, type(driver).active) == before


def test_without_triton_a_program_that_wraps_a_kernel_gets_one_clear_error():
    program = """if True:
        import sys
        sys.modules["triton"] = None
        from torch.library import wrap_triton
        from flopmeter import FlopMeter
        with FlopMeter():
            wrap_triton(lambda: None)
    """
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.strip().splitlines()[-1].startswith("ModuleNotFoundError")


@needs_triton
def test_a_script_that_times_kernels_with_tritons_do_bench_gets_predicted_times():
    """By hand: three passes over 64 MiB at 3.35 TB/s take 60 us."""
    import triton.testing

    with flopmeter.cuda("h100-sxm5-80gb"):
        driver = triton.runtime.driver.active
        x, y = (torch.zeros(2**24, device=driver.get_active_torch_device()) for _ in range(2))
        milliseconds = triton.testing.do_bench(lambda: x + y, warmup=1, rep=1)
        assert driver.utils.get_device_properties(0)["multiprocessor_count"] == 132
        assert driver.get_current_target().arch == 90
    assert 0.060 < milliseconds < 0.085
    assert triton.runtime.driver._active is None
