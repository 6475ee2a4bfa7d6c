"""Fused attention is priced as the kernel that runs it: flash, memory-efficient or cuDNN, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, meta
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter
from flopmeter.costs import RULES, costs_of, register_cost
from flopmeter.records import ATTENTION, MOVEMENT, AttentionWork, Call
from flopmeter.report.report import Report

aten = torch.ops.aten
BF16, F16 = torch.bfloat16, torch.float16
FLASH, EFFICIENT, CUDNN = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
B, H, S, D = 4, 16, 4096, 128


def heads(*, grad: bool = False) -> Tensor:
    return meta(B, H, S, D, dtype=BF16).requires_grad_(grad)


def attended(backend: SDPBackend, hardware: str, *, train: bool = False) -> Report:
    q, k, v = (heads(grad=train) for _ in range(3))
    with sdpa_kernel(backend), FlopMeter(hardware) as meter:
        out = F.scaled_dot_product_attention(q, k, v)
        if train:
            out.sum().backward()
    return meter.report()


def attention_seconds(report: Report) -> list[float]:
    pairs = zip(report.kernels, report.timings, strict=True)
    return [timing.seconds for kernel, timing in pairs if kernel.cost.op_class == ATTENTION]


@pytest.mark.parametrize(("hardware", "share"), [("h100-sxm5-80gb", 0.629), ("b200-sxm-180gb", 0.629 / 2)])
def test_cudnn_attention_uses_the_newer_instructions_that_flash_does_not(hardware, share):
    """Flash runs on `mma`: 62.9 % of Hopper's rate (arXiv 2402.13499), and Blackwell's SM multiplies twice as much a
    clock by its own instructions. The softmax costs both the same, but Blackwell's backward hides it beside matmuls.
    `mma` draws more power for a FLOP, too: an H100 took 2.0 times as long for 16k causal tokens forward, 1.9 backward
    (torch 2.11)."""
    flash, cudnn = (attention_seconds(attended(backend, hardware, train=True)) for backend in (FLASH, CUDNN))
    forward, backward = (slow / fast for slow, fast in zip(flash, cudnn, strict=True))
    assert 1.2 < forward < 1.25 / share
    assert 1.2 < backward < (2 if "b200" in hardware else 1.25) / share


def test_on_an_a100_cudnn_and_flash_use_the_same_instructions():
    flash, cudnn = (attention_seconds(attended(backend, "a100-sxm4-80gb")) for backend in (FLASH, CUDNN))
    assert cudnn == pytest.approx(flash, rel=1e-6)  # their small results differ


@pytest.mark.parametrize("train", [False, True])
def test_memory_efficient_attention_is_slower_than_flash(train):
    flash, efficient = (
        sum(attention_seconds(attended(backend, "a100-sxm4-80gb", train=train))) for backend in (FLASH, EFFICIENT)
    )
    assert efficient / flash > 1.15


def test_the_attention_of_a_model_is_priced_as_the_device_would_choose_it():
    """sm90 prefers cuDNN; told to use flash it is slower."""
    q, k, v = heads(), heads(), heads()
    with FlopMeter("h100-sxm5-80gb") as meter:
        F.scaled_dot_product_attention(q, k, v)
    assert attention_seconds(meter.report()) == attention_seconds(attended(CUDNN, "h100-sxm5-80gb"))
    assert attention_seconds(meter.report()) < attention_seconds(attended(FLASH, "h100-sxm5-80gb"))


def q_of(layout: str) -> Tensor:
    """[batch, heads, sequence, head dimension], [batch, sequence, heads, ...] or [tokens, heads, ...]."""
    return meta(*{"heads first": (2, 3, 8, 16), "heads third": (2, 8, 3, 16), "packed": (16, 3, 16)}[layout])


ENDS, SEED, LSE = meta(3, dtype=torch.int32), meta(dtype=torch.int64), meta(2, 3, 8)
OTHERS = {
    "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False, "max_q": 8, "max_k": 8, "max_seqlen_q": 8,
    "max_seqlen_k": 8, "logsumexp": LSE, "philox_seed": SEED, "philox_offset": SEED, "rng_state": SEED, "unused": SEED,
    "compute_log_sumexp": True, "compute_logsumexp": True, "custom_mask_type": 0, "bias_requires_grad": False,
    "grad_input_mask": [True, True, True, False],
}  # fmt: skip


def call_of(name: str, layout: str) -> Call:
    """A call of the op by its schema; what is not known by name is left out, lengths are given where q is packed."""
    op, q = getattr(aten, name).default, q_of(layout)
    known = OTHERS | dict.fromkeys(("query", "key", "value", "grad_out", "grad_out_", "out"), q)
    if layout == "packed":
        known |= dict.fromkeys(("cum_seq_q", "cum_seq_k"), ENDS)
    given = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    outputs = (q, q, q) if name.endswith("backward") else (q, LSE)
    return call_by_hand(op, tuple(known.get(each) for each in given), outputs)


SDPA = "_scaled_dot_product"
KERNELS = [
    (name, layout, kernel)
    for kernel, layout, forward, backward in (
        ("flash", "heads first", f"{SDPA}_flash_attention", f"{SDPA}_flash_attention_backward"),
        ("efficient", "heads first", f"{SDPA}_efficient_attention", f"{SDPA}_efficient_attention_backward"),
        ("cudnn", "heads first", f"{SDPA}_cudnn_attention", f"{SDPA}_cudnn_attention_backward"),
        ("cudnn", "heads first", "_cudnn_attention_forward", "_cudnn_attention_backward"),
        ("cudnn", "packed", "_cudnn_attention_forward", "_cudnn_attention_backward"),
        ("flash", "heads third", "_flash_attention_forward", "_flash_attention_backward"),
        ("flash", "packed", "_flash_attention_forward", "_flash_attention_backward"),
        ("efficient", "heads third", "_efficient_attention_forward", "_efficient_attention_backward"),
        ("other", "heads first", f"{SDPA}_flash_attention_for_cpu", f"{SDPA}_flash_attention_for_cpu_backward"),
        (
            "other",
            "heads first",
            f"{SDPA}_fused_attention_overrideable",
            f"{SDPA}_fused_attention_overrideable_backward",
        ),
    )
    for name in (forward, backward)
    if hasattr(aten, name)
]


@pytest.mark.parametrize(("name", "layout", "kernel"), KERNELS, ids=" ".join)
def test_an_attention_op_says_whose_kernel_it_is_and_counts_its_products(name, layout, kernel):
    """Two sequences of 8, 3 heads of 16: two products forward, five backward, behind copies of what lies by heads."""
    *copies, cost = costs_of(call_of(name, layout))
    assert all(copy.op_class == MOVEMENT for copy in copies)
    assert cost.work.backend == kernel
    assert cost.flops == (5 if name.endswith("backward") else 2) * 2 * (2 * 3) * 8 * 8 * 16


@pytest.mark.parametrize(("dtype", "kernel"), [(F16, "flash"), (BF16, "flash"), (torch.float32, "efficient")])
def test_the_fused_attention_of_nn_multihead_attention_is_one_that_takes_the_type(dtype, kernel):
    layer = nn.MultiheadAttention(64, 4, batch_first=True, device="meta", dtype=dtype).eval()
    x = meta(2, 16, 64, dtype=dtype)
    with torch.no_grad(), FlopMeter("a100-sxm4-80gb") as meter:
        layer(x, x, x, need_weights=False)
    assert [each.cost.work.backend for each in meter.report().kernels if isinstance(each.cost.work, AttentionWork)] == [
        kernel
    ]


@pytest.fixture
def no_rule_is_left():
    """The op is gone after the test."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def test_an_attention_op_of_ones_own_may_be_given_as_a_number(no_rule_is_left):
    with torch.library._scoped_library("seam", "DEF") as library:
        library.define("attend(Tensor x) -> Tensor")
        library.impl("attend", torch.empty_like, "Meta")
        register_cost(torch.ops.seam.attend, op_class=ATTENTION)(lambda call: 7)
        with FlopMeter() as meter:
            torch.ops.seam.attend(meta(4))
        (kernel,) = meter.report().kernels
    assert kernel.cost.flops_by_class == ((ATTENTION, 7),)
