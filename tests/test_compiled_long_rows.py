"""Compiled kernels that reduce long rows, beside what an H100 took (torch 2.11, validation/traces/*_compiled)."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter

HOW = pytest.mark.parametrize("how", [True, "rules"])


class Loss(nn.Module):
    def forward(self, logits, words):
        return F.cross_entropy(logits.float(), words)


def slowest(tokens, words, how, *, backward=False):
    """The slowest kernel of the forward or of the backward pass."""
    logits = torch.empty(tokens, words, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with FlopMeter("h100-sxm5-80gb", compile=how, clocks="burst") as meter:
        Loss()(logits, torch.zeros(tokens, dtype=torch.long, device="meta")).backward()
    report = meter.report(mode="compiled" if how == "rules" else None)
    timed = zip(report.kernels, report.timings, strict=True)
    phase = "backward" if backward else "forward"
    return max(timing.seconds for kernel, timing in timed if kernel.ops[0].phase == phase)


@HOW
@pytest.mark.parametrize(
    ("tokens", "words", "microseconds"), [(12288, 50304, 892.0), (8192, 50304, 582.7), (8192, 128256, 1417.3)]
)
def test_the_softmax_of_a_loss_is_bound_by_its_instructions(tokens, words, microseconds, how):
    assert 1e6 * slowest(tokens, words, how) == pytest.approx(microseconds, rel=0.1)


def test_the_gradient_of_a_loss_reads_the_logits_once():
    """2.47 GB in 902 us; the sum of its gradients is that of ones and zeros, for which no logits are needed."""
    assert 1e6 * slowest(12288, 50304, True, backward=True) == pytest.approx(901.6, rel=0.1)


def test_a_compiled_norm_of_long_rows_reads_them_again():
    """Rows of 512 kB, as many at a time as do not fit into an H100's 50 MB: for the result all is read again."""
    norm = nn.LayerNorm(131072, elementwise_affine=False)
    x = torch.empty(4096, 131072, device="meta")
    with FlopMeter("h100-sxm5-80gb", compile=True) as meter, torch.no_grad():
        norm(x)
    (kernel,) = meter.report().kernels
    assert [rows.nbytes for rows in kernel.cost.work.rereads] == [x.numel() * 4]
