"""Fake quantization on meta tensors: results as on the CPU, kernels as CUDA's sources launch them, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of

aten = torch.ops.aten
GRID = (-128, 127)


def learnable(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    if scale.numel() == 1:
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, *GRID)
    return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 0, *GRID)


def observe(x: Tensor, channels: int, axis: int = 0, *, symmetric: bool = False) -> Tensor:
    on = torch.ones(1, dtype=torch.int64, device=x.device)
    low, high, scale = (torch.ones(channels, device=x.device) for _ in range(3))
    zero = torch.zeros(channels, dtype=torch.int32, device=x.device)
    return torch.fused_moving_avg_obs_fake_quant(
        x, on, on, low, high, scale, zero, 0.01, *GRID, axis, channels > 1, symmetric
    )


def of_tensor(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, *GRID)


def of_tensor_on_the_device(x: Tensor) -> Tensor:
    scale, zero = torch.ones(1, device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero, *GRID)


def of_channels(x: Tensor) -> Tensor:
    scale, zero = torch.ones(4, device=x.device), torch.zeros(4, dtype=torch.int32, device=x.device)
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 0, *GRID)


def of_channels_between_steps(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_channel_affine(x, *(torch.ones(4, device=x.device) for _ in range(2)), 0, *GRID)


def learned_of_tensor(x: Tensor) -> Tensor:
    return learnable(x, *(torch.ones(1, device=x.device, requires_grad=True) for _ in range(2)))


def learned_of_channels(x: Tensor) -> Tensor:
    return learnable(x, *(torch.ones(4, device=x.device, requires_grad=True) for _ in range(2)))


# (FLOPs, bytes read, bytes written) of each kernel, of 4 channels of 6 numbers in fp32; a mask has one byte a number.
X, MASK, C = 96, 24, 16
ASK = (0, 4, 4)
PASS = (5 * 24, X, X + MASK)
ENDS = ((0, C, 8), ASK, ASK)  # the least and the largest zero point, which the host looks at
BY_CHANNEL = ((4 * 24, X + 2 * C, MASK), (6 * 24, X + 2 * C, X))
ROUND = ((4, C, C), (0, C, C))
AVERAGE, FIT = (6, 4 * 4 + 8, 8), (9, 2 * 4 + 8, 8)
FORWARD = {
    of_tensor: (PASS,),
    of_tensor_on_the_device: ((5 * 24, X + 4 + 4 + 8, X + MASK),),
    of_channels: (*ENDS, *BY_CHANNEL),
    of_channels_between_steps: BY_CHANNEL,
    learned_of_tensor: (ASK, ASK, PASS),
    learned_of_channels: (*ROUND, (0, C, C), *ENDS, *BY_CHANNEL),
    lambda x: observe(x, 1): ((0, X, 8), AVERAGE, FIT, (5 * 24, X + 4 + 4 + 8, X + MASK)),
    lambda x: observe(x, 1, symmetric=True): (
        (0, X, 8), AVERAGE, (13, 2 * 4 + 8, 8), (5 * 24, X + 4 + 4 + 8, X + MASK)
    ),
    lambda x: observe(x, 4): (
        (0, X, 2 * C), (4 * 6, 4 * C + 8, 2 * C), (4 * 9, 2 * C + 8, 2 * C), (0, 8, 8), *ENDS, *BY_CHANNEL
    ),
}  # fmt: skip
SUMS = ((24, X, 4),) * 2
BACKWARD = {
    learned_of_tensor: (ASK, ASK, (10 * 24, 2 * X, 3 * X), *SUMS),
    learned_of_channels: (*ROUND, *ENDS, (11 * 24, 2 * X + 2 * C, 3 * X), *((24, X, C),) * 2),
}


def kernels(program) -> list[tuple[int, int, int]]:
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        program()
    costs = [kernel.cost for kernel in kernels_of(meter.trace)]
    quantizing = [cost for cost in costs if "fake_quant" in cost.name or "obs_fq" in cost.name]
    assert all(
        cost.blocks_host == (cost.bytes_read == cost.bytes_written <= 8) for cost in quantizing if not cost.flops
    )
    return [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in quantizing]


@pytest.mark.parametrize("quantize", FORWARD)
def test_fake_quantization_launches_the_kernels_of_cuda(quantize):
    x = torch.empty(4, 6, device="meta")
    assert kernels(lambda: quantize(x)) == [*FORWARD[quantize]]


def test_what_observes_a_tensor_writes_its_numbers_and_a_byte_for_each():
    x = torch.empty(40, 60, device="meta")
    assert kernels(lambda: observe(x, 1))[-1] == (5 * 2400, 4 * 2400 + 4 + 4 + 8, (4 + 1) * 2400)


@pytest.mark.parametrize("quantize", BACKWARD)
def test_gradients_of_scales_and_zero_points_are_summed_from_one_number_each(quantize):
    x, gradient = (torch.empty(4, 6, device="meta") for _ in range(2))
    out = []
    with FlopMeter("h100-sxm5-80gb"):
        out.append(quantize(x.requires_grad_()))
    assert kernels(lambda: out[0].backward(gradient)) == [*BACKWARD[quantize]]


def test_gradients_of_the_numbers_are_those_that_the_mask_lets_through():
    x = torch.empty(4, 6, device="meta", requires_grad=True)
    with FlopMeter("h100-sxm5-80gb") as meter:
        of_tensor(x).backward(torch.empty(4, 6, device="meta"))
    masked = [kernel.cost for kernel in kernels_of(meter.trace) if kernel.cost.name == "mul"]
    assert [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in masked] == [(24, X + MASK, X)]


@pytest.mark.parametrize("quantize", FORWARD)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_results_and_gradients_have_the_shapes_and_strides_that_they_have_on_the_cpu(quantize, layout):
    found = []
    for device in ("cpu", "meta"):
        x = torch.ones(4, 3, 2, 2, device=device).to(memory_format=layout).requires_grad_()
        with FlopMeter("h100-sxm5-80gb"):
            out = quantize(x)
            out.sum().backward()
        found.append([(each.shape, each.stride(), each.dtype) for each in (out, x.grad)])
    assert found[0] == found[1]


def test_channels_that_do_not_come_first_are_copied_into_rows_and_what_has_gaps_into_one_piece():
    def copies(x: Tensor, channels: int, axis: int) -> int:
        return kernels(lambda: observe(x, channels, axis)).count((0, x.nbytes, x.nbytes))

    x = torch.empty(4, 3, 2, 2, device="meta")
    last = x.to(memory_format=torch.channels_last)
    assert [copies(x, 4, 0), copies(x, 3, 1), copies(last, 4, 0), copies(last, 3, 1)] == [0, 1, 1, 2]
    matrix, sequences = torch.empty(4, 4, device="meta"), torch.empty(4, 3, 2, device="meta")
    assert [copies(matrix, 4, 1), copies(sequences, 3, 1)] == [0, 1]  # only `if (x.dim() != 2)` are there axes to move


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
def test_a_network_prepared_for_quantization_trains_with_every_kernel_counted():
    quantization = pytest.importorskip("torch.ao.quantization", reason="deprecated in favour of torchao")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    model = quantization.prepare_qat(model).to("meta")
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        model(torch.empty(2, 3, 8, 8, device="meta")).sum().backward()
    report = meter.report()
    assert not report.uncounted
    quantized = [row for row in report.rows("op") if "obs_fq" in row.name]
    # Outputs of both layers, 5 a number; weights, 10; ranges and grids of 12 symmetric channels and of two tensors.
    numbers = 5 * (2 * 8 * 36 + 2 * 4) + 10 * (8 * 27 + 4 * 288)
    assert sum(row.flops for row in quantized) == numbers + 12 * (6 + 13) + 2 * (6 + 9)
