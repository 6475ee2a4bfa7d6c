"""Kernels of which only the bytes are known: the report says so where its reader looks first, and why. A kernel that
waits for a lock is none of them."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from written_modules import imported

from flopmeter import FlopMeter

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

PROGRAM_FILE = """
import torch, triton
import triton.language as tl


@triton.jit
def summed(x_ptr, y_ptr, out_ptr, lock_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(x_ptr + at), tl.load(y_ptr + at))
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(out_ptr + at, tl.load(out_ptr + at) + product)
    tl.atomic_xchg(lock_ptr, 0)


@triton.jit
def taken_in_turn(x_ptr, next_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    place = tl.atomic_add(next_ptr, 1)
    while place < n:
        tl.store(out_ptr + place * N + at, tl.exp(tl.load(x_ptr + place * N + at)))
        place = tl.atomic_add(next_ptr, 1)


@triton.jit
def ragged(x_ptr, lengths_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    total = tl.zeros((N,), tl.float32)
    for row in range(tl.load(lengths_ptr + tl.program_id(0))):
        total += tl.load(x_ptr + row * N + at)
    tl.store(out_ptr + tl.program_id(0) * N + at, total)


@torch.library.custom_op("flopmeter_tests::sums", mutates_args=())
def sums(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(len(lengths), x.shape[-1])
    ragged[(len(lengths),)](x, lengths, out, x.shape[-1])
    return out


@sums.register_fake
def _(x, lengths):
    return x.new_empty(len(lengths), x.shape[-1])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return imported(tmp_path_factory.mktemp("uncounted"), "uncounted_program", PROGRAM_FILE)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@needs_triton
def test_a_program_asks_once_for_a_lock_and_its_product_counts(program):
    with FlopMeter("h100-sxm5-80gb") as meter:
        program.summed[(10,)](meta(64, 64), meta(64, 64), meta(64, 64), meta(1, dtype=torch.int32), 64)
    report = meter.report()
    assert report.flops == 10 * (2 * 64**3 + 64 * 64)
    assert not report.uncounted
    assert "far too small" not in str(report)  # an fp32 product, of which autocast is told, too


@needs_triton
def test_a_loop_that_takes_its_work_from_a_counter_is_no_lock(program):
    with FlopMeter("h100-sxm5-80gb") as meter:
        program.taken_in_turn[(10,)](meta(640), meta(1, dtype=torch.int32), meta(640), 10, 64)
    assert "uncounted: the Triton kernel taken_in_turn, for scf.while" in meter.report().notes


@needs_triton
def test_the_first_lines_name_what_is_uncounted_and_the_last_ones_say_why_in_a_custom_op_too(program):
    with FlopMeter("h100-sxm5-80gb") as meter:
        program.sums(meta(99, 64), meta(4, dtype=torch.int32))
    text = str(meter.report())
    caution = "the time may be far too small: of flopmeter_tests::sums(ragged) (1) only the bytes are known"
    assert caution in text[: text.index("\nclass ")]
    assert "uncounted: the Triton kernel ragged, for a loop whose bounds are read from memory" in text
