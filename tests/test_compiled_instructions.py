"""Compiled kernels that are bound by their instructions, beside what an H100 took (torch 2.11, validation/traces)."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter
from flopmeter.torch_names.dispatcher import running_version

autocast = partial(torch.autocast, "meta", torch.float16)
BF16 = {"device": "meta", "dtype": torch.bfloat16}


def microseconds(function, *inputs, device="h100-sxm5-80gb"):
    with FlopMeter(device, clocks="burst") as meter, torch.no_grad():
        torch.compile(function)(*inputs)
    (kernel,) = meter.report().timings
    return 1e6 * kernel.seconds


def rotate(x, frequencies):
    """A Llama's queries, of 32 heads of 64, as transformers turns them."""
    angles = torch.outer(torch.arange(2048, device=x.device).float(), frequencies)
    angles = torch.cat((angles, angles), -1)
    x = x.view(4, 2048, 32, 64).transpose(1, 2)
    turned = torch.cat((-x[..., 32:], x[..., :32]), -1)
    return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


@pytest.mark.parametrize(("rows", "width", "measured"), [(12288, 3072, 62.8), (8192, 4096, 55.0)])
def test_a_gelu_takes_what_an_h100_took(rows, width, measured):
    assert microseconds(F.gelu, torch.empty(rows, width, **BF16)) == pytest.approx(measured, rel=0.1)


def test_a_sigmoid_that_a_kernel_needs_twice_is_computed_once():
    """218 us (h100_llama_train_compiled), of which the bytes are 210: the gradients of both factors of silu(x) * y need
    the sigmoid, whose machine code has 11 of all 43 instructions of an element."""

    def gradients(gradient, gate, up):
        return torch.ops.aten.silu_backward(gradient * up, gate), gradient * F.silu(gate)

    inputs = [torch.empty(8192, 8192, **BF16) for _ in range(3)]
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(gradients)(*inputs)
    (kernel,) = meter.report().kernels
    assert kernel.cost.work.instructions / inputs[0].numel() == pytest.approx(43.1, rel=0.1)


def test_rotary_embeddings_compute_cosines_for_each_head():
    """58.7 us, of which 22 would be the memory's; h100_llama_train_compiled."""
    x, frequencies = torch.empty(8192, 2048, **BF16), torch.empty(32, device="meta")
    assert microseconds(rotate, x, frequencies) == pytest.approx(58.7, rel=0.1)


def test_a_kernel_of_cheap_ops_is_bound_by_its_bytes():
    """403 MB at .91 of 3.35 TB/s; the same where it also multiplies and adds a few times."""
    x, y = (torch.empty(8192, 8192, **BF16) for _ in range(2))
    plain = microseconds(torch.add, x, y)
    assert plain == pytest.approx(403 / (0.91 * 3.35), rel=0.05)
    assert microseconds(lambda x, y: (x + y) * 2 + 1, x, y) == pytest.approx(plain, rel=0.03)


class Norms(nn.Module):
    """What a ResNet-50 does between convolutions at inference; `norms` of two branches meet in a sum."""

    def __init__(self, channels, norms):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels, device="meta") for _ in range(norms))

    def forward(self, *images):
        return sum(norm(each) for norm, each in zip(self.norms, images, strict=True)).relu()


# Where torch writes `rsqrt` (one instruction) in place of a root and its reciprocal (18), these kernels are faster.
before_2_15 = pytest.mark.skipif(running_version() >= (2, 15), reason="what was measured had other instructions")


@before_2_15
@pytest.mark.parametrize(
    ("channels", "side", "norms", "measured"),
    [(64, 112, 1, 150.0), (256, 28, 1, 38.0), (256, 56, 2, 307.9), (512, 28, 2, 155.9), (1024, 14, 2, 81.2)],
)
def test_a_batch_norm_computes_its_roots_for_each_element(channels, side, norms, measured):
    """128 images in fp16 and channels-last (h100_resnet50_infer_compiled). Those of two branches have so many registers
    that an SM holds fewer threads, or two elements a thread instead of eight: up to a fifth slower."""
    images = [torch.empty(128, channels, side, side, dtype=torch.float16, device="meta") for _ in range(norms)]
    images = [each.to(memory_format=torch.channels_last) for each in images]
    model = Norms(channels, norms).eval()
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter, torch.no_grad(), autocast():
        torch.compile(model)(*images)
    rel = 0.22 if norms == 2 else 0.06
    assert 1e6 * max(each.seconds for each in meter.report().timings) == pytest.approx(measured, rel=rel)


@pytest.mark.parametrize(
    ("channels", "side", "measured"),
    [(64, 112, 184.8), (512, 28, 82.7), (64, 56, 54.9), (1024, 14, 38.7), (128, 28, 31.9), (256, 14, 17.9)],
)
def test_statistics_of_a_batch_norm_wait_for_each_of_their_steps(channels, side, measured):
    """256 images in bf16 and channels-last (h100_resnet50_compiled), whose bytes alone would take 9 to 135 us: by these
    the smallest would be half as long as they are."""
    images = torch.empty(256, channels, side, side, **BF16).to(memory_format=torch.channels_last)
    norm = nn.BatchNorm2d(channels, device="meta")
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter, torch.no_grad(), autocast():
        torch.compile(norm)(images)
    first, *_ = (
        each.seconds
        for kernel, each in zip(meter.report().kernels, meter.report().timings, strict=True)
        if images.nbytes <= kernel.cost.bytes < 1.5 * images.nbytes
    )
    assert 1e6 * first == pytest.approx(measured, rel=0.3)


@before_2_15
def test_a_mean_over_positions_in_channels_last_combines_each_element_with_those_of_other_threads():
    """44.7 us, of which the bytes would be 17; 128 images of 7 x 7 (h100_resnet50_infer_compiled)."""
    images = [torch.empty(128, 2048, 7, 7, dtype=torch.float16, device="meta") for _ in range(2)]
    images = [each.to(memory_format=torch.channels_last) for each in images]
    norm = nn.BatchNorm2d(2048, device="meta").eval()
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter, torch.no_grad(), autocast():
        torch.compile(lambda image, other: (norm(image) + other).relu().mean((-1, -2)))(*images)
    assert 1e6 * max(each.seconds for each in meter.report().timings) == pytest.approx(44.7, rel=0.3)


# Of a thread for an element, by the table of flopmeter/costs/instructions.py: `exp` and a division 9 each, a load, a
# store and any other op 1; of a mean and a variance 4 where registers hold the rows and else 18, of a maximum and a sum
# of exponentials 12 and 32. What is the same for a row, or for all rows, counts once, which is next to nothing;
# what registers hold is loaded once, also where two loops need it.
EXP_SUM = 1 + 9 + 1  # the sum is stored once a row
SOFTMAX = 1 + 1 + 9 + 9 + 1  # an element that is loaded less the maximum, its exponential over their sum
COUNTED = {
    "a function": (lambda x: x.exp(), [(64, 1024)], 1 + 9 + 1),
    "two loops, of which the first reduces": (lambda x: (x - x.amax(-1, True)).exp(), [(64, 1024)], 2 + 1 + 9 + 1),
    "rows in registers": (lambda x: x.exp().sum(-1), [(64, 1024)], EXP_SUM),
    "rows that are filled up to a power of two": (lambda x: x.exp().sum(-1), [(64, 1000)], EXP_SUM * 1.024),
    "rows that are looped over": (lambda x: x.exp().sum(-1), [(64, 5000)], EXP_SUM),
    "columns in registers": (lambda x: x.exp().sum(0), [(64, 65536)], EXP_SUM + 6 * 2),  # doubled six times
    "columns that are filled up": (lambda x: x.exp().sum(0), [(48, 65536)], (EXP_SUM + 6 * 2) * 64 / 48),
    "columns that are looped over": (lambda x: x.exp().sum(0), [(128, 65536)], EXP_SUM),
    "a function of the row": (lambda x, y: (x * y.exp()[:, None]).sum(-1), [(64, 1024), (64,)], 3),
    "a function of the column": (lambda x, y: (x * y.exp()).sum(-1), [(64, 1024), (1024,)], 3),
    "rows that are looked up": (lambda x, y: x[y.long()].exp().sum(-1), [(64, 1024), (64,)], EXP_SUM),
    "one loop for a mean and a variance": (lambda x: x.var(-1), [(64, 1024)], 1 + 4 + (9 + 1) / 1024),
    "the same in a loop over the row": (lambda x: x.var(-1), [(64, 5000)], 1 + 18 + (9 + 1) / 5000),
    "softmax": (lambda x: x.softmax(-1), [(64, 1024)], 12 + SOFTMAX),
    "softmax of long rows": (lambda x: x.softmax(-1), [(64, 5000)], 1 + 32 + SOFTMAX),
}


@pytest.mark.parametrize("case", COUNTED)
def test_a_compiled_kernel_runs_the_instructions_of_its_loops(case):
    function, shapes, of_element = COUNTED[case]
    inputs = [torch.empty(shape, device="meta") for shape in shapes]
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        torch.compile(function)(*inputs)
    (kernel,) = meter.report().kernels
    assert kernel.cost.work.instructions == pytest.approx(of_element * inputs[0].numel(), rel=1e-6)
