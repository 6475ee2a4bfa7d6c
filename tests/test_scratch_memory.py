"""Memory that ops ask torch's allocator for, beside the tensors that they return."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand

import flopmeter
from flopmeter import FlopMeter
from flopmeter.timing import scratch

MIB = 2**20
BF16 = torch.bfloat16


def empty(*shape, **options):
    return torch.empty(*shape, device="meta", dtype=BF16, **options)


def beside_tensors(device, program):
    """Bytes at the allocator's peak that belong to no tensor. All tensors here are whole blocks of 512 bytes."""
    with FlopMeter(device) as meter:
        program()
    memory = meter.report().memory
    return memory.allocated_bytes - memory.peak_bytes


@pytest.fixture
def kept(monkeypatch):
    """Torch before 2.15 keeps workspaces."""
    monkeypatch.setattr(scratch, "running_version", lambda: (2, 14))


@pytest.mark.parametrize(
    ("device", "workspace"),
    [
        ("a100-sxm4-80gb", 8 * MIB + 128 * 1024),
        ("h100-sxm5-80gb", 32 * MIB),
        ("b200-sxm-180gb", 32 * MIB),
        ("mi300x", 0),
    ],
)
def test_products_ask_for_a_workspace_once_for_each_thread(kept, device, workspace):
    """:4096:2:16:8 KiB, on Hopper and Blackwell :4096:8; the backward pass runs in a thread of its own."""
    x, w = empty(512, 512), empty(512, 512, requires_grad=True)
    assert beside_tensors(device, lambda: x @ w @ w) == workspace
    assert beside_tensors(device, lambda: (x @ w).backward(x)) == 2 * workspace
    assert beside_tensors(device, lambda: x + x) == 0


def test_a_workspace_is_there_from_the_start_of_a_second_run(kept):
    """In the first it fits into the memory that the loader gave back. With less room all of it is given back before the
    matrices ask for the last 2 MiB."""

    def program():
        torch.empty(64 * MIB, dtype=torch.uint8, device="meta").add_(1)
        x = empty(512, 512)
        x @ x

    with FlopMeter("h100-sxm5-80gb") as meter:
        program()
    memory, small = meter.report().memory, 2 * MIB  # the least segment, for matrices of half a MiB
    assert (memory.reserved_bytes, memory.steady_reserved_bytes) == (64 * MIB + small, (64 + 32) * MIB + small)
    assert [memory.fits_in(room * MIB, allocator=True) for room in (95, 96)] == [False, True]


def test_another_stream_has_a_workspace_of_its_own(kept):
    program = """
x = torch.empty(512, 512, device="cuda", dtype=torch.bfloat16)
x @ x
with torch.cuda.stream(torch.cuda.Stream()):
    x @ x
"""
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        exec(program)
    assert device.report().step.memory.allocated_bytes == 2 * 32 * MIB + 2 * 512 * 1024  # one result at a time


def test_since_torch_2_15_a_product_gives_its_workspace_back(monkeypatch):
    monkeypatch.setattr(scratch, "running_version", lambda: (2, 15))
    x = empty(512, 512)
    assert beside_tensors("h100-sxm5-80gb", lambda: x @ x @ x) == 32 * MIB
    later = beside_tensors("h100-sxm5-80gb", lambda: (x @ x, empty(64 * MIB)[:1].add_(1)))
    assert later == 0  # the peak is where no product runs


def test_a_script_is_told_the_same_as_the_report(kept):
    program = """
x = torch.empty(512, 512, device="cuda", dtype=torch.bfloat16)
y = x @ x
told = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
"""
    names = {"torch": torch}
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        exec(program, names)
    memory = device.report().step.memory
    most, now, reserved = names["told"]
    assert most == now == memory.allocated_bytes == 32 * MIB + 2 * 512 * 1024
    assert reserved == memory.reserved_bytes


def test_the_backward_pass_of_flash_attention_sums_in_fp32(kept):
    """2 sequences of 200 queries, in blocks of 128: 256; 8 heads of 72, rounded to 96, and a number a row. Two heads of
    keys: their gradients are written for all eight heads first."""
    q, k, v = (empty(2, heads, 200, 72, requires_grad=True) for heads in (8, 2, 2))
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    (scratch_bytes,) = (each.nbytes for each in scratch.scratch_of(meter.trace, len(meter.trace.ops), meter.hardware))
    of_q = 4 * 2 * 256 * 8 * (96 + 1)
    of_k_and_v = 2 * 2 * 200 * 8 * 72 * 2
    assert scratch_bytes == of_q + of_k_and_v


@pytest.mark.parametrize(
    ("q", "k", "starts", "rows"),
    [
        ((2, 100, 8, 40), (2, 300, 2, 40), None, 2 * 128),  # [batch, tokens, heads, size]: whole blocks of 128 queries
        ((150, 8, 40), (500, 2, 40), [0, 50, 150], 150 + 128 * 2),  # packed: two sequences
    ],
)
def test_the_librarys_own_backward_pass_sums_each_layout_by_its_own_heads_and_queries(q, k, starts, rows):
    """A gradient of q of 64 columns for 40 and a number a row in fp32; k and v for eight heads where two are given."""
    queries, keys = empty(*q), empty(*k)
    lengths = None if starts is None else torch.tensor(starts, dtype=torch.int32, device="meta")
    sizes = (lengths, lengths, max(q[0], 100), max(k[0], 300))
    state = torch.zeros(2, dtype=torch.uint64, device="meta")
    args = (queries, queries, keys, keys, queries, empty(*q[:-2]), *sizes, 0.0, True, state, state)
    call = call_by_hand(torch.ops.aten._flash_attention_backward.default, args, (queries, keys, keys))
    tokens = keys.numel() // (2 * 40)
    assert scratch._flash_backward_bytes(call) == 4 * rows * 8 * (64 + 1) + 2 * tokens * 8 * 40 * 2
