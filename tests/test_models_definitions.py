"""The built-in models are the published ones: sizes, work and, for attention, numbers."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import models
from flopmeter.models import BUILTINS, bert, diffusion, gpt2, llama, vision

# Tied weights counted once. Image models: `num_params` of torchvision's weights; BERT, GPT-2 and Llama:
# BertForMaskedLM, GPT2LMHeadModel and LlamaForCausalLM of transformers 5.23; U-Nets and DiT: UNet2DConditionModel and
# DiTTransformer2DModel of diffusers 0.42 (the latter with one condition embedder, not one a block, and its positions).
PUBLISHED_PARAMETERS = {
    "encoder-layer": 12_596_224,  # 12 * 1024**2 + 13 * 1024, of which BERT-large has 24
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1558m": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "resnet-50": 25_557_032,
    "vit-b-16": 86_567_656,
    "vit-l-16": 304_326_632,
    "convnext-t": 28_589_128,
    "dit-s-2": 32_963_360,
    "dit-xl-2": 675_129_632,
    "unet": 859_520_964,
    "unet-small": 37_522_628,
}

# 1e9 multiply-adds of one forward pass at 224 and, for DiT, 256 pixels, and the tolerance. `_ops` of torchvision's
# weights; Table 4 of arXiv 2212.09748 for DiT, which saw a little more than the products (closed form below).
PUBLISHED_GMAC = {
    "resnet-50": (4.089, 0.0005),
    "vit-b-16": (17.564, 0.0005),
    "vit-l-16": (61.555, 0.0005),
    "convnext-t": (4.456, 0.0005),
    "dit-s-2": (6.06, 0.006),
    "dit-xl-2": (118.64, 0.02),
}

# FLOPs of one forward pass at the default sizes, as FlopCounterMode counts them in the classes of transformers
# and diffusers named above.
REFERENCE_FLOPS = {
    "bert-base": 121_244_221_440,
    "bert-large": 368_085_827_584,
    "gpt2-124m": 291_648_307_200,
    "gpt2-355m": 826_951_073_792,
    "gpt2-774m": 1_774_570_700_800,
    "gpt2-1558m": 3_506_703_564_800,
    "llama-2-7b": 62_921_270_886_400,
    "llama-3-8b": 158_140_695_838_720,
    "llama-3-70b": 1_314_637_949_698_048,
    "llama-3-405b": 7_169_159_410_483_200,
    "unet": 803_273_441_280,
    "unet-small": 52_801_830_912,
}

TINY: dict[str, Callable[[], tuple[nn.Module, models.Inputs]]] = {
    "encoder layer": lambda: (models.EncoderLayer(32, 4, 64), (torch.randn(2, 6, 32, requires_grad=True),)),
    "bert": lambda: (models.Bert(bert.BertConfig(2, 32, 4, 50, 8)), (tokens(), tokens(vocabulary=2))),
    "gpt2": lambda: (models.GPT2(gpt2.GPT2Config(2, 32, 4, 50, 8)), (tokens(),)),
    "llama": lambda: (models.Llama(llama.LlamaConfig(2, 32, 4, 2, 48, 50)), (tokens(),)),
    "resnet": lambda: (models.ResNet((1, 2), width=8), (torch.randn(2, 3, 32, 32),)),
    "vit": lambda: (models.ViT(vision.ViTConfig(2, 32, 4, patch=8), 32), (torch.randn(2, 3, 32, 32),)),
    "convnext": lambda: (models.ConvNeXt((1, 1), (8, 16)), (torch.randn(2, 3, 32, 32),)),
    "dit": lambda: (models.DiT(diffusion.DiTConfig(2, 32, 4, classes=9), 8), (latent(), steps(), steps())),
    "unet": lambda: (
        models.UNet(diffusion.UNetConfig(32, (1, 2), blocks=1, heads=4, context_width=16)),
        (latent(), steps(), torch.randn(2, 5, 16)),
    ),
}


def tokens(vocabulary: int = 50) -> Tensor:
    return torch.randint(0, vocabulary, (2, 8))


def latent() -> Tensor:
    return torch.randn(2, diffusion.LATENT_CHANNELS, 8, 8)


def steps() -> Tensor:
    return torch.tensor([0, 7])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def forward_flops(name: str, **sizes: int) -> int:
    model, inputs = BUILTINS[name](**sizes)
    return flops(lambda: model(*inputs))


class KernelNames(TorchDispatchMode):
    """The ops that pass, by name, but for views and bare allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ("_unsafe_view", "empty_like"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BUILTINS)
def test_each_builtin_has_the_published_number_of_parameters(name: str) -> None:
    model, _ = BUILTINS[name]()
    assert parameters(model) == PUBLISHED_PARAMETERS[name]


def test_bert_large_has_the_parameters_of_its_config() -> None:
    width, vocabulary = 1024, 30522
    embeddings = (vocabulary + 512 + 2) * width + 2 * width
    layer = 4 * (width * width + width) + 2 * width * 4 * width + 4 * width + width + 2 * 2 * width
    head = width * width + width + 2 * width + vocabulary  # the decoder's weight is the token embedding's
    assert embeddings + 24 * layer + head == PUBLISHED_PARAMETERS["bert-large"]


@pytest.mark.parametrize("name", PUBLISHED_GMAC)
def test_image_models_do_the_published_work(name: str) -> None:
    gmac, tolerance = PUBLISHED_GMAC[name]
    assert forward_flops(name) / 2e9 == pytest.approx(gmac, abs=tolerance)


@pytest.mark.parametrize("name", REFERENCE_FLOPS)
def test_each_builtin_does_the_products_of_its_reference_implementation(name: str) -> None:
    assert forward_flops(name) == REFERENCE_FLOPS[name]


@pytest.mark.parametrize(
    ("name", "layers", "width", "length"),
    [("bert-large", 24, 1024, 512), ("gpt2-124m", 12, 768, 1024), ("gpt2-1558m", 48, 1600, 1024)],
)
def test_transformers_do_two_flop_a_weight_and_token_and_attend_to_all(
    name: str, layers: int, width: int, length: int
) -> None:
    vocabulary = {"bert-large": 30522, "gpt2-124m": 50257, "gpt2-1558m": 50257}[name]
    weights = layers * 12 * width**2 + vocabulary * width + (width**2 if name == "bert-large" else 0)
    attention = layers * 4 * length**2 * width
    assert forward_flops(name, batch=3) == 3 * (2 * length * weights + attention)


def test_llama_3_8b_does_two_flop_a_weight_and_token_and_attends_by_query_heads() -> None:
    length, embedding, norms = 2048, 128256 * 4096, 65 * 4096
    weights = PUBLISHED_PARAMETERS["llama-3-8b"] - embedding - norms
    attention = 32 * 4 * 32 * 128 * length**2
    assert forward_flops("llama-3-8b", seq=length) == 2 * length * weights + attention


def test_dit_xl_2_does_the_work_of_its_closed_form() -> None:
    width, count = 1152, 256
    block = count * 12 * width**2 + 2 * count**2 * width + 6 * width**2
    ends = count * 16 * width + 256 * width + width**2 + 2 * width**2 + count * width * 32
    assert forward_flops("dit-xl-2") == 2 * (28 * block + ends)


def test_the_encoder_layer_runs_the_rows_of_the_paper_and_one_copy() -> None:
    """Table A.1 of arXiv 2007.00072, in order; on meta a dropout is bernoulli_, div_ and mul."""
    dropout = ["bernoulli_", "div_", "mul"]
    softmax = ["mul", "_softmax", *dropout]
    residual = [*dropout, "add", "native_layer_norm"]
    attention = ["mm", "add", "bmm", *softmax, "bmm", "clone", "mm", "add", *residual]
    feed_forward = ["mm", "add", "relu", *dropout, "mm", "add", *residual]
    model, inputs = BUILTINS["encoder-layer"]()
    with KernelNames() as seen:
        model(*inputs)
    assert seen.names == attention + feed_forward


def test_the_encoder_layer_does_the_papers_contractions() -> None:
    """Forward rows as printed, in 1e9; with backward three times as much (335.007 by hand from the sizes)."""
    printed = [25.77, 4.295, 4.295, 8.59, 34.36, 34.36]
    model, inputs = BUILTINS["encoder-layer"]()
    assert flops(lambda: model(*inputs)) / 1e9 == pytest.approx(sum(printed), abs=0.01)
    assert flops(lambda: models.backward(model, inputs)) / 1e9 == pytest.approx(335.007, abs=0.0005)


@torch.no_grad()
def test_the_encoder_layer_computes_what_torchs_does() -> None:
    width, heads, x = 32, 4, torch.randn(2, 6, 32)
    theirs = nn.TransformerEncoderLayer(width, heads, 64, batch_first=True).eval()
    for parameter in theirs.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))  # biases start at zero
    ours = models.EncoderLayer(width, heads, 64).eval()
    their_rows = torch.arange(3 * width).view(3, heads, -1)  # ours read [3, head width, heads]
    rows = their_rows.transpose(1, 2).flatten()
    weights = {
        "attention.qkv_weight": theirs.self_attn.in_proj_weight[rows],
        "attention.qkv_bias": theirs.self_attn.in_proj_bias[rows].unsqueeze(1),
    }
    pairs = {"attention.out": theirs.self_attn.out_proj, "linear1": theirs.linear1, "linear2": theirs.linear2}
    for name, linear in pairs.items():
        weights |= {f"{name}.weight": linear.weight.T, f"{name}.bias": linear.bias}
    for name, norm in {"norm1": theirs.norm1, "norm2": theirs.norm2}.items():
        weights |= {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}
    ours.load_state_dict(weights)
    torch.testing.assert_close(ours(x), theirs(x))


@torch.no_grad()
def test_llama_attention_is_the_sum_over_earlier_tokens_with_rotated_pairs() -> None:
    """Token by token and head by head, each pair of channels as a complex number turned by its position."""
    config = llama.LlamaConfig(layers=1, width=32, heads=4, kv_heads=2, hidden=48, vocabulary=50, rotary_base=100.0)
    attention, x = llama.Attention(config), torch.randn(1, 5, 32)
    half = config.head_width // 2

    def turned(channels: Tensor, position: int) -> Tensor:
        pairs = torch.complex(channels[:half], channels[half:])
        angles = [position * 100.0 ** (-index / half) for index in range(half)]
        turned = pairs * torch.tensor([complex(math.cos(angle), math.sin(angle)) for angle in angles])
        return torch.cat((turned.real, turned.imag))

    heads: list[list[Tensor]] = []
    for position in range(5):
        heads.append([])
        for head in range(4):
            own = slice(8 * head, 8 * head + 8)
            shared = slice(8 * (head // 2), 8 * (head // 2) + 8)  # two query heads to a key head
            query = turned((attention.query.weight @ x[0, position])[own], position)
            keys = [turned((attention.key.weight @ x[0, j])[shared], j) for j in range(position + 1)]
            values = [(attention.value.weight @ x[0, j])[shared] for j in range(position + 1)]
            weights = torch.stack([query @ key / math.sqrt(8) for key in keys]).softmax(0)
            heads[-1].append(weights @ torch.stack(values))
    expected = torch.stack([torch.cat(row) for row in heads]) @ attention.out.weight.T

    cos, sin = llama.rotary_table(5, config.head_width, config.rotary_base, like=x)
    torch.testing.assert_close(attention(x, cos, sin)[0], expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_a_decoder_never_looks_ahead(name: str) -> None:
    model, (tokens,) = TINY[name]()
    before = model(tokens)
    tokens[:, 5] = (tokens[:, 5] + 1) % 50
    after = model(tokens)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@torch.no_grad()
def test_the_next_token_loss_is_the_mean_surprise_at_the_following_token() -> None:
    model, (tokens,) = TINY["gpt2"]()
    probabilities = model(tokens).softmax(-1)
    surprises = [-math.log(probabilities[b, i, tokens[b, i + 1]]) for b in range(2) for i in range(7)]
    assert model.loss(tokens).item() == pytest.approx(sum(surprises) / 14, rel=1e-5)


@torch.no_grad()
def test_a_dit_block_whose_modulation_is_zero_is_the_identity() -> None:
    block, x = diffusion.DiTBlock(32, 4), torch.randn(2, 9, 32)
    nn.init.zeros_(block.modulation.weight)
    nn.init.zeros_(block.modulation.bias)
    assert torch.equal(block(x, torch.randn(2, 32)), x)


@torch.no_grad()
def test_dit_puts_each_patch_back_where_it_was() -> None:
    model, (image, *_) = TINY["dit"]()
    patches = F.unfold(image, model.patch, stride=model.patch)  # [batch, channels * patch * patch, grid * grid]
    channels_last = patches.unflatten(1, (-1, model.patch**2)).permute(0, 3, 2, 1).flatten(2)
    assert torch.equal(model.unpatch(channels_last, grid=4), image)


@pytest.mark.parametrize("name", TINY)
def test_each_family_trains_with_finite_gradients_for_every_parameter(name: str) -> None:
    model, inputs = TINY[name]()
    models.backward(model, inputs)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name


@pytest.mark.parametrize("name", sorted(TINY.keys() - {"encoder layer"}))
def test_training_steps_lower_the_loss(name: str) -> None:
    model, inputs = TINY[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model.train().loss(*inputs).item()
    for _ in range(10):
        models.training_step(model, inputs, optimizer)
    assert model.loss(*inputs).item() < before
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", BUILTINS)
def test_each_builtin_lives_on_meta_in_the_dtype_asked_for(name: str) -> None:
    model, inputs = BUILTINS[name](batch=2, dtype=torch.float16)
    tensors = [*model.parameters(), *inputs]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float16}
    assert {len(tensor) for tensor in inputs} == {2}


@pytest.mark.parametrize("name", BUILTINS)
def test_each_builtin_names_a_batch_one_size_and_a_dtype(name: str) -> None:
    assert tuple(inspect.signature(BUILTINS[name]).parameters) in {
        ("batch", "seq", "dtype"),
        ("batch", "image_size", "dtype"),
    }


@pytest.mark.parametrize(
    "name", ["bert-base", "gpt2-124m", "llama-3-8b", "resnet-50", "vit-b-16", "dit-s-2", "unet-small"]
)
def test_a_builtin_takes_a_training_step_on_meta_in_half_precision(name: str) -> None:
    model, inputs = BUILTINS[name](dtype=torch.bfloat16)
    models.training_step(model, inputs, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("name", ["gpt2-124m", "bert-large"])
def test_a_text_longer_than_the_positions_is_an_error_even_on_meta(name: str) -> None:
    model, inputs = BUILTINS[name](seq=1025)
    with pytest.raises(ValueError, match="positions, the input 1025 tokens"):
        model(*inputs)


@pytest.mark.parametrize(("name", "multiple"), [("vit-l-16", 16), ("dit-xl-2", 16), ("unet", 64)])
@pytest.mark.parametrize("image_size", [0, 72, -64])
def test_an_image_size_that_does_not_divide_is_an_error(name: str, multiple: int, image_size: int) -> None:
    with pytest.raises(ValueError, match=f"multiple of {multiple} pixels, not {image_size}"):
        BUILTINS[name](image_size=image_size)


def test_importing_flopmeter_imports_no_model() -> None:
    program = "import sys, flopmeter; print(any(name.startswith('flopmeter.models') for name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
