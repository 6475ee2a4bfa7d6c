"""What holds for every kernel on every device: floors, and which way time goes when a kernel or a device changes."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flopmeter import available_hardware, load_hardware
from flopmeter.costs.contractions.attention import visible_pairs
from flopmeter.records import (
    ATTENTION,
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    REDUCTION,
    SORTING,
    AttentionShape,
    AttentionWork,
    Convolution,
    ConvolutionWork,
    Cost,
    FormulaWork,
    GroupedMatmulWork,
    Mask,
    Matmul,
    MatmulWork,
    Recurrence,
    RecurrentWork,
    Region,
    Reread,
    Switches,
    UnpackingMatmulWork,
    VectorWork,
)
from flopmeter.timing.kernels import price

SWITCHES = Switches(matmul_tf32=False, cudnn_tf32=True, fp16_accumulate=False)
GPUS = [name for name in available_hardware() if load_hardware(name).compute_capability]
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

devices = st.sampled_from(GPUS).map(load_hardware)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
sizes = st.integers(1, 5000)
growth = st.integers(0, 3000)


def product_cost(shape, dtype="fp16", alignment_bytes=16, **more):
    batch, m, n, k = shape
    macs = batch * m * n * k
    item = ITEM_BYTES[dtype]
    fields = {
        "name": "bmm",
        "op_class": CONTRACTION,
        "flops_by_class": ((CONTRACTION, 2 * macs),),
        "reads": (Region(None, item * batch * (m * k + k * n)),),
        "writes": (Region(None, item * batch * m * n),),
        "dtype": dtype,
        "work": MatmulWork((Matmul(*shape),), macs, alignment_bytes),
    }
    return Cost(**(fields | more))


def plain_cost(op_class, flops, nbytes, dtype="fp32", *, rereads=(), **more):
    read, written = Region(None, nbytes // 2), Region(None, nbytes - nbytes // 2)
    return Cost("op", op_class, ((op_class, flops),), (read,), (written,), dtype, VectorWork(rereads), **more)


@st.composite
def products(draw):
    shape = (draw(st.integers(1, 64)), draw(sizes), draw(sizes), draw(sizes))
    return product_cost(shape, draw(dtypes), alignment_bytes=draw(st.sampled_from((2, 4, 8, 16))))


@st.composite
def convolutions(draw):
    groups, positions, channels = (
        draw(st.sampled_from((1, 1, 4, 32))),
        draw(st.integers(1, 60)),
        draw(st.integers(1, 600)),
    )
    images, taps, steps = draw(st.integers(1, 64)), draw(st.sampled_from((1, 3, 7))), draw(st.booleans())
    shape = Convolution(channels, (taps, taps), (positions, positions), steps)
    implicit = (groups, images * positions**2, draw(st.integers(1, 600)), channels * taps**2)
    touched = {
        "reads": (Region(None, images * channels * groups * positions**2),),
        "writes": (Region(None, implicit[1] * implicit[2] * groups),),
    }
    work = ConvolutionWork(Matmul(*implicit), prod(implicit), shape)
    return product_cost(implicit, draw(dtypes), work=work, **touched)


@st.composite
def attentions(draw):
    sequences, key_heads, group = draw(st.integers(1, 64)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    queries, keys, depth = draw(st.sampled_from((1, 7, 300, 4096)) | sizes), draw(sizes), draw(st.integers(1, 300))
    edge = st.none() | st.integers(0, 600)
    mask = Mask(draw(edge), draw(edge), bottom_right=draw(st.booleans()))
    shape = AttentionShape(
        sequences, key_heads * group, key_heads, queries, keys, depth, depth, mask, draw(st.booleans())
    )
    return attention_cost(shape, draw(st.sampled_from(("flash", "efficient", "cudnn", "other"))), draw(dtypes))


def attention_cost(shape, backend="flash", dtype="fp16"):
    matmuls = 5 if shape.is_backward else 2
    scores = (shape.sequences * shape.heads, shape.queries, shape.keys, shape.head_dim)
    macs, pairs = matmuls * prod(scores), shape.queries * shape.keys
    tokens = shape.sequences * (shape.heads * shape.queries + shape.key_heads * shape.keys)
    masked_flops = 2 * macs * (pairs - visible_pairs(shape.queries, shape.keys, shape.mask)) // pairs
    half = Region(None, ITEM_BYTES[dtype] * shape.head_dim * tokens)
    return product_cost(
        scores,
        dtype,
        op_class=ATTENTION,
        flops_by_class=((ATTENTION, 2 * macs),),
        work=AttentionWork(backend, shape, macs, masked_flops, recomputed_flops=0),
        reads=(half,),
        writes=(half,),
    )


@st.composite
def several_products(draw):
    """Kernels of more than one matmul, and those whose weights are narrow."""
    shapes = draw(st.lists(st.builds(Matmul, st.integers(1, 8), sizes, sizes, sizes), min_size=1, max_size=4))
    macs, dtype = sum(map(prod, shapes)), draw(dtypes)
    read = ITEM_BYTES[dtype] * sum(batch * (m * k + k * n) for batch, m, n, k in shapes)
    written = ITEM_BYTES[dtype] * sum(batch * m * n for batch, m, n, _ in shapes)
    keeps = draw(st.sampled_from(("everywhere", "on large devices", "nowhere")))
    steps, inner = draw(st.integers(1, 500)), Matmul(1, *draw(st.tuples(sizes, sizes, sizes)))
    recurrent = RecurrentWork((*shapes, inner), macs + steps * prod(inner), 16, Recurrence(steps, (inner,), keeps))
    work = draw(
        st.sampled_from(
            (
                GroupedMatmulWork(tuple(shapes), macs),
                UnpackingMatmulWork(shapes[0], prod(shapes[0]), draw(st.sampled_from((4, 8)))),
                FormulaWork(macs),
                recurrent,
            )
        )
    )
    touched = {"reads": (Region(None, read),), "writes": (Region(None, written),)}
    return product_cost(shapes[0], dtype, work=work, flops_by_class=((CONTRACTION, 2 * work.macs),), **touched)


@st.composite
def plain_kernels(draw):
    op_class = draw(st.sampled_from((ELEMENTWISE, NORMALIZATION, REDUCTION, MOVEMENT, INDEXING, SORTING)))
    nbytes = draw(st.integers(0, 10**9))
    rows = draw(st.integers(1, 10**5))
    rereads = draw(st.sampled_from(((), (Reread(nbytes, rows, nbytes // rows, 128),))))
    access = draw(st.sampled_from((None, "stream", "strided", "window", "channels", "fused")))
    flops = draw(st.integers(0, 10**11))
    return plain_cost(op_class, flops, nbytes, draw(dtypes), rereads=rereads, access=access)


kernels = st.one_of(products(), several_products(), convolutions(), attentions(), plain_kernels())


def work(cost, device):
    return price(cost, device, SWITCHES).busy.work_seconds


@settings(max_examples=400)
@given(kernels, devices)
def test_nothing_is_faster_than_its_flops_at_the_peak_and_its_bytes_at_the_spec_bandwidth(cost, device):
    assume(cost.bytes)
    floor = cost.bytes / device.bandwidth_bytes_per_s
    if cost.macs:
        peak = device.contraction_peak(SWITCHES.matmul_dtype(cost))
        fastest = max(peak.flop_per_s, peak.sustained_flop_per_s)  # a GeForce clocks above spec
        floor = max(floor, (2 * cost.macs - cost.masked_flops) / fastest)
    assert work(cost, device) >= floor * (1 - 1e-9)


@settings(max_examples=200)
@given(kernels, devices)
def test_both_parts_together_take_no_less_than_the_larger_of_them(cost, device):
    busy = price(cost, device, SWITCHES).busy
    assert busy.work_seconds >= max(busy.compute_seconds, busy.memory_seconds) * (1 - 1e-9)


@settings(max_examples=100)
@given(plain_kernels(), st.integers(1, 4), devices)
def test_each_further_kernel_of_an_op_takes_at_least_as_long_as_the_smallest_of_the_device(cost, more, device):
    launching = replace(cost, work=cost.work._replace(kernels=1 + more))
    one, all_of_them = (price(each, device, SWITCHES).busy.seconds for each in (cost, launching))
    assert all_of_them >= (one + more * device.kernel_floor_seconds) * (1 - 1e-9)


@settings(max_examples=300)
@given(st.tuples(st.integers(1, 32), sizes, sizes, sizes), growth, growth, growth, dtypes, devices)
def test_a_larger_product_takes_no_less(shape, more_m, more_n, more_k, dtype, device):
    batch, m, n, k = shape
    larger = (batch, m + more_m, n + more_n, k + more_k)
    assert work(product_cost(larger, dtype), device) >= work(product_cost(shape, dtype), device) * (1 - 1e-9)


@settings(max_examples=200)
@given(plain_kernels(), st.integers(0, 10**9), st.integers(0, 10**11), devices)
def test_more_bytes_and_more_flops_take_no_less(cost, more_bytes, more_flops, device):
    ((op_class, flops),) = cost.flops_by_class
    larger = replace(
        cost, reads=(*cost.reads, Region(None, more_bytes)), flops_by_class=((op_class, flops + more_flops),)
    )
    assert work(larger, device) >= work(cost, device)


@settings(max_examples=200)
@given(kernels, devices, st.floats(1, 10))
def test_more_bandwidth_takes_no_more(cost, device, factor):
    faster = device.replace(memory_bandwidth_gb_per_s=device.memory_bandwidth_gb_per_s * factor)
    assert work(cost, faster) <= work(cost, device) * (1 + 1e-9)


@settings(max_examples=200)
@given(kernels, devices, st.floats(1, 10))
# Registers bound these kernels, whose rows are not aligned, where the power limit leaves less of a higher peak.
@example(product_cost((1, 85, 2871, 4676), "bf16", alignment_bytes=4), load_hardware("h200-sxm-141gb"), 10.0)
@example(product_cost((1, 4097, 4097, 4097), "bf16", alignment_bytes=2), load_hardware("h100-sxm5-80gb"), 10.0)
def test_higher_peaks_take_no_more(cost, device, factor):
    def scaled(rates):
        return {dtype: rate * factor for dtype, rate in rates.items()}

    faster = device.replace(
        vector_tflop_per_s=scaled(device.vector_tflop_per_s),
        matrix_tflop_per_s=scaled(device.matrix_tflop_per_s),
        emulated_tflop_per_s=scaled(device.emulated_tflop_per_s),
    )
    assert work(cost, faster) <= work(cost, device) * (1 + 1e-9)


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "h200-sxm-141gb", "a100-sxm4-80gb"])
def test_rows_that_are_not_aligned_take_ampere_s_instructions_once_however_they_lie(device):
    """Threads load what TMA cannot, and `mma` multiplies it, whether neighbours lie across the depth or along it."""
    along = product_cost((1, 50257, 768, 8192), "fp32", alignment_bytes=4)
    across = replace(along, work=along.work._replace(across_depth=True))
    took = [price(cost, load_hardware(device), SWITCHES._replace(matmul_tf32=True)).busy for cost in (along, across)]
    assert took[0] == took[1]


@pytest.mark.parametrize("device", available_hardware())
def test_every_device_prices_the_products_that_it_has_a_rate_for(device):
    hardware = load_hardware(device)
    for dtype in ("fp32", "fp16", "bf16"):
        if any(dtype in rates for rates in (hardware.vector_tflop_per_s, hardware.matrix_tflop_per_s)):
            assert 0 < work(product_cost((1, 4096, 4096, 4096), dtype), hardware) < 10
