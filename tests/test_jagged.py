"""Jagged tensors (torch.nested): their attention, their gradients, and a script that makes them."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import FlopMeter

HEADS, HEAD = 4, 64
WIDTH = HEADS * HEAD


def heads(x):
    return x.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)


def attend(layer, x, **options):
    """Self-attention, whose q, k and v are slices of one product."""
    return F.scaled_dot_product_attention(*map(heads, layer(x).chunk(3, -1)), **options)


def layer_and_sequences(dtype, lengths, device="meta"):
    layer = nn.Linear(WIDTH, 3 * WIDTH, device=device, dtype=dtype)
    parts = [torch.empty(length, WIDTH, device=device, dtype=dtype) for length in lengths]
    return layer, torch.nested.nested_tensor(parts, layout=torch.jagged)


@pytest.mark.parametrize(
    ("hardware", "dtype", "kernel"),
    [
        ("a100-sxm4-80gb", torch.bfloat16, "_flash_attention_forward"),
        ("h100-sxm5-80gb", torch.bfloat16, "_flash_attention_forward"),
        ("h100-sxm5-80gb", torch.float32, "_efficient_attention_forward"),
        ("t4", torch.float16, "_efficient_attention_forward"),
    ],
)
def test_jagged_attention_takes_flash_where_it_can_and_else_the_memory_efficient_kernel(hardware, dtype, kernel):
    """The order in torch.nested: flash, memory-efficient, math, cuDNN; flash is for 16 bits on Ampere and later."""
    with FlopMeter(hardware) as meter, torch.no_grad():
        attend(*layer_and_sequences(dtype, (17, 33, 128)))
    (attention,) = (each for each in meter.report().kernels if each.cost.op_class == "attention (fused)")
    assert attention.cost.name == kernel


def test_sequences_of_one_length_cost_the_products_of_a_dense_batch():
    macs = []
    for jagged in (True, False):
        with FlopMeter("a100-sxm4-80gb") as meter:
            layer, x = layer_and_sequences(torch.bfloat16, (64,) * 3)
            if jagged:
                attend(layer, x, is_causal=True).values().sum().backward()
            else:
                x = torch.empty(3, 64, WIDTH, device="meta", dtype=torch.bfloat16)
                attend(layer, x, is_causal=True).sum().backward()
        macs.append(meter.report().macs)
    assert macs[0] == macs[1] > 0


def test_views_that_a_backward_pass_makes_are_not_taken_for_recomputation():
    with FlopMeter("h100-sxm5-80gb") as meter:
        layer, x = layer_and_sequences(torch.bfloat16, (17, 33))
        attend(layer, x).values().sum().backward()
    report = meter.report()
    assert "recompute" in {op.phase for op in meter.trace.ops}
    assert not any("checkpointing" in advice.remedy for advice in report.advice)


def train():
    layer = nn.Linear(WIDTH, 3 * WIDTH).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        parts = [torch.randn(length, WIDTH, device="cuda") for length in (17, 33)]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        assert (x.device.type, x.is_cuda) == ("cuda", True)
        attend(layer, x).values().sum().backward()
        optimizer.step()


def test_a_script_trains_on_jagged_tensors():
    with flopmeter.cuda("a100-sxm4-80gb", steps=3) as device:
        train()
    step = device.report().step
    assert step.macs > 2 * (17 + 33) * WIDTH * 3 * WIDTH
    assert not step.uncounted


def test_each_sequence_meets_its_own_keys_only():
    """Two products of 2 FLOP for each pair of tokens of one sequence, and width."""
    lengths = (17, 33, 128)
    with FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad():
        attend(*layer_and_sequences(torch.bfloat16, lengths))
    report = meter.report()
    (attention,) = (each.cost for each in report.kernels if each.cost.op_class == "attention (fused)")
    assert attention.flops == sum(length**2 for length in lengths) * 4 * WIDTH
    assert not any("as long as the longest" in told for told in report.assumptions)


def test_the_first_jagged_tensor_of_a_process_costs_what_each_costs():
    """On a GPU too torch makes a tensor on meta with the first one, which launches nothing."""
    program = """
import torch
from flopmeter import FlopMeter
def names():
    with FlopMeter("a100-sxm4-80gb") as meter:
        parts = [torch.empty(length, 4, 64, device="meta") for length in (17, 33)]
        torch.nested.nested_tensor(parts, layout=torch.jagged).sin()
    return [kernel.cost.name for kernel in meter.report().kernels]
with torch.inference_mode():
    first = names()
assert first == names(), first
parts = [torch.ones(2, 3)]
torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True).sin().values().sum().backward()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_jagged_attention_needs_nothing_that_only_other_programs_import():
    """torch.nested names torch.utils.flop_counter for tensors on meta, which nothing here imports."""
    program = """
import torch
from flopmeter import FlopMeter
with FlopMeter("a100-sxm4-80gb") as meter:
    parts = [torch.empty(length, 4, 64, device="meta", dtype=torch.bfloat16) for length in (17, 33)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_attention_of_jagged_tensors_on_the_cpu_says_no_more_than_without_a_meter():
    """torch tells why a kernel cannot run only where it has none left."""
    parts = [torch.randn(length, HEADS, HEAD) for length in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    outside = F.scaled_dot_product_attention(q, q, q).values()
    with FlopMeter("h100-sxm5-80gb"), warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = F.scaled_dot_product_attention(q, q, q).values()
    assert torch.equal(inside, outside)


def test_padding_and_its_gradient_move_what_they_read_and_write():
    """Of 5 + 9 + 17 rows a padded tensor of 3 x 17; fp32, with four offsets of 8 bytes. The gradient goes back."""
    layer, x = layer_and_sequences(torch.float32, (5, 9, 17))
    with FlopMeter("a100-sxm4-80gb") as meter:
        layer(x).to_padded_tensor(0.0).square().sum().backward()
    rows, padded, offsets = 31 * 3 * WIDTH * 4, 51 * 3 * WIDTH * 4, 4 * 8
    moved = {
        each.cost.name: (each.cost.bytes_read, each.cost.bytes_written)
        for each in meter.report().kernels
        if "jagged" in each.cost.name
    }
    assert moved == {
        "_jagged_to_padded_dense_forward": (rows + offsets, padded),
        "_padded_dense_to_jagged_forward": (rows + offsets, rows),
    }
    assert layer.weight.grad is not None


def test_rows_go_back_into_a_jagged_tensor_where_their_number_is_told():
    """On a CPU it follows from the offsets too."""
    back = torch.ops.aten._padded_dense_to_jagged_forward
    offsets, padded = torch.tensor([0, 3, 7]), torch.randn(2, 4, 8)
    with FlopMeter("a100-sxm4-80gb"):
        on_meta = padded.to("meta"), [offsets.to("meta")]
        told = back(*on_meta, 7)
        assert told.shape == back(padded, [offsets]).shape
        with pytest.raises(NotImplementedError, match="tell how many rows there are"):
            back(*on_meta)
