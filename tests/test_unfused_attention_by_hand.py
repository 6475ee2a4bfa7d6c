"""Attention that no fused kernel of an A100 takes, what keeps it from one, and the call that one would take.

FlashAttention takes no mask, and no causal one where there are more queries than keys; the efficient kernel both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flopmeter import FlopMeter
from flopmeter.torch_names.dispatcher import running_version

DIMENSIONS = "q, k and v have other dimensions than four", "q, k and v as [batch, heads, length, width]"
BACKENDS = "sdpa_kernel or torch.backends.cuda.enable_..._sdp leaves it no fused kernel", "SDPA outside of sdpa_kernel"
WIDTH = "heads are not a multiple of 8 wide", "heads padded to a multiple of 8 (F.pad)"
DENSE, BATCH = (
    ("rows of q, k, v or the mask are not dense", ".contiguous()"),
    ("are not of one batch", "the batch of q"),
)
GROUPED = "kernels that take the mask take no grouped heads", "repeat_interleave on k and v"


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def heads(*leading: int, width: int = 64, of_keys: tuple[int, ...] | None = None) -> tuple[torch.Tensor, ...]:
    """128 queries and 96 keys and values."""
    keys = of_keys or leading
    return meta(*leading, 128, width), meta(*keys, 96, width), meta(*keys, 96, width)


APART = (meta(2, 4, 64, 128).mT, *heads(2, 4)[1:])
SHARED = (0, 96 * 64, 64, 1)  # strides of keys that all of a batch share
MASK = meta(128, 96)
CASES: dict[str, tuple[Any, dict[str, Any], list[tuple[str, str]], str, tuple[int, ...]]] = {
    # q, k and v; options; what keeps it from a kernel and what to do; the kernel; batch and heads of the call
    "five dimensions": (heads(2, 3, 4), {"dropout_p": 0.1}, [DIMENSIONS], "flash", (6, 4)),
    "three dimensions": (heads(4), {"is_causal": True}, [DIMENSIONS], "efficient", (1, 4)),
    "a context": (heads(2, 4), {}, [BACKENDS], "flash", (2, 4)),
    "rows apart": (APART, {}, [DENSE], "flash", (2, 4)),
    "one batch of keys": (heads(2, 4, of_keys=(1, 4)), {}, [BATCH], "flash", (2, 4)),
    "groups under a mask": (
        heads(2, 8, of_keys=(2, 2)), {"attn_mask": MASK, "enable_gqa": True}, [GROUPED], "efficient", (2, 8)
    ),
    "two at once": (heads(2, 3, 4, width=60), {"attn_mask": MASK}, [DIMENSIONS, WIDTH], "efficient", (6, 4)),
}  # fmt: skip
FUSED_FROM_2_15 = ("three dimensions", "groups under a mask")


@pytest.mark.parametrize("name", [name for name in CASES if running_version() < (2, 15) or name not in FUSED_FROM_2_15])
def test_attention_is_told_what_keeps_it_from_a_fused_kernel_and_which_call_one_takes(name: str) -> None:
    qkv, options, reasons, backend, (batch, count) = CASES[name]
    context = sdpa_kernel(SDPBackend.MATH) if name == "a context" else torch.no_grad()
    with FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad(), context:
        scaled_dot_product_attention(*qkv, **options)
    (found,) = meter.report().unfused
    assert (found.heads, found.lengths, found.is_half, found.backend) == (count, (128, 96), True, backend)
    assert (found.dropout_p, found.is_causal) == (options.get("dropout_p", 0.0), options.get("is_causal", False))
    for (why, remedy), said, to_do in zip(
        reasons, found.why.split(", and "), found.remedy.split(", and "), strict=True
    ):
        assert why in said
        assert remedy in to_do
    of_keys = SHARED if name == "one batch of keys" else (count * 96 * 64, 96 * 64, 64, 1)
    assert [(each.shape, each.strides) for each in found.qkv] == [
        ((batch, count, 128, 64), (count * 128 * 64, 128 * 64, 64, 1)), *[((batch, count, 96, 64), of_keys)] * 2
    ]  # fmt: skip
    masks = {"groups under a mask": (128, 96), "two at once": (1, 1, 128, 96)}
    assert (found.mask and found.mask.shape) == masks.get(name)
