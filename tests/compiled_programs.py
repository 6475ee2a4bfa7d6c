"""Some sixty small programs for torch.compile: encoders, decoders, experts, convolutional nets, diffusion models,
recurrences, adapters, flex_attention, optimizers and losses; inference and training; fp32, bf16 and autocast; on three
generations of GPU.

Models of Hugging Face need transformers; no weights are loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.optim import Optimizer

from flopmeter.models.diffusion import DiT, DiTConfig, UNet, UNetConfig
from flopmeter.models.vision import ConvNeXt, ResNet, ViT, ViTConfig

DEVICES = ("a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-5090")  # compute capability 8.0, 9.0, 12.0
PRECISIONS = ("fp32", "bf16", "autocast")
BATCH, LENGTH, WIDTH, HEADS, WORDS = 8, 256, 512, 8, 8192
Prepare = Callable[[Any], Any]  # torch.compile


@dataclass(frozen=True)
class Program:
    """`make()` builds it on meta and gives what runs it, which calls `prepare(what)` where a script compiles."""

    name: str
    device: str
    make: Callable[[], Callable[[Prepare], None]]
    warms_up: bool = False  # its first run makes what later ones find, such as an optimizer's state


def programs() -> list[Program]:
    """All, each on a device and in a precision of its own, so that every pair of them comes up several times."""
    steps = list(_optimizers())
    makers = [*_functions(), *steps, *_models()]
    return [
        Program(
            f"{name}-{'training' if trains else 'inference'}-{precision}",
            DEVICES[(number // len(PRECISIONS)) % len(DEVICES)],
            functools.partial(_made, make, trains, precision),
            warms_up=(name, make, trains) in steps,
        )
        for number, (name, make, trains) in enumerate(makers)
        for precision in (PRECISIONS[number % len(PRECISIONS)],)
    ]


Made = tuple[Callable[..., Any], dict[str, Any] | tuple[Any, ...]]
Maker = tuple[str, Callable[[], Made], bool]


def _made(make: Callable[[], Made], trains: bool, precision: str) -> Callable[[Prepare], None]:
    torch.set_default_dtype(torch.bfloat16 if precision == "bf16" else torch.float32)
    try:
        with torch.device("meta"):
            function, inputs = make()
    finally:
        torch.set_default_dtype(torch.float32)
    if isinstance(function, nn.Module):
        function.to("meta").train(trains)

    def run(prepare: Prepare) -> None:
        if isinstance(function, _Step):
            function.run(prepare)
            return
        args, named = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs)
        with torch.set_grad_enabled(trains), torch.autocast("cuda", torch.bfloat16, enabled=precision == "autocast"):
            out = prepare(function)(*args, **named)
        if trains:
            out = _main(out)
            out.backward(torch.empty_like(out))

    return run


def _main(out: Any) -> Tensor:
    """The loss, where a model of Hugging Face was given labels; else its first result."""
    tensor: Tensor = out if isinstance(out, Tensor) else out[0]
    return tensor


# --- models


def _tokens() -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH))


def _hugging_face(kind: str, model: str, **sizes: Any) -> Callable[[], Made]:
    def make() -> Made:
        transformers = pytest.importorskip("transformers")
        common = {
            "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
            "intermediate_size": 4 * WIDTH, "max_position_embeddings": 512, "pad_token_id": 0, "use_cache": False,
        }  # fmt: skip
        config = transformers.AutoConfig.for_model(kind, **{**common, **sizes})
        config.torch_dtype = torch.get_default_dtype()
        made = getattr(transformers, model)(config)
        inputs: dict[str, Any] = {"return_dict": False}
        if getattr(made, "main_input_name", "input_ids") == "pixel_values":
            size = sizes.get("image_size", 64)
            return made, {**inputs, "pixel_values": torch.randn(BATCH, 3, size, size)}
        inputs["input_ids"] = _tokens()
        if kind in ("t5", "bart"):
            inputs["decoder_input_ids"] = _tokens()
        if model.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
            inputs["labels"] = _tokens()
        return made, inputs

    return make


_ENCODERS = {
    "bert": "BertForMaskedLM", "distilbert": "DistilBertForMaskedLM", "albert": "AlbertForMaskedLM",
    "electra": "ElectraModel", "mpnet": "MPNetModel", "modernbert": "ModernBertModel", "deberta-v2": "DebertaV2Model",
}  # fmt: skip
_DECODERS = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM", "gemma2": "Gemma2ForCausalLM", "phi3": "Phi3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM", "opt": "OPTForCausalLM", "bloom": "BloomForCausalLM", "olmo2": "Olmo2ForCausalLM",
}  # fmt: skip


def _models() -> Iterator[Maker]:
    few: dict[str, Any] = {"num_key_value_heads": HEADS // 2, "head_dim": WIDTH // HEADS}
    for number, (kind, model) in enumerate({**_ENCODERS, **_DECODERS}.items()):
        sizes: dict[str, Any] = few if kind in ("llama", "qwen2", "qwen3", "mistral", "gemma2") else {}
        if kind in ("deberta-v2", "gpt2"):  # these look for padding in the ids, which nobody knows
            sizes = {"pad_token_id": None}
        trains = number % 3 != 0 and kind not in ("deberta-v2",)
        yield kind, _hugging_face(kind, model, **sizes), trains
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    yield "mixtral", _hugging_face("mixtral", "MixtralForCausalLM", **few, **experts), False
    yield "qwen3_moe", _hugging_face("qwen3_moe", "Qwen3MoeForCausalLM", **few, **experts), False
    yield "vit", _hugging_face("vit", "ViTModel", image_size=64, patch_size=8), True
    yield "resnet-hf", _hugging_face("resnet", "ResNetModel", depths=[1, 1, 1, 1]), True
    yield "t5", _hugging_face("t5", "T5ForConditionalGeneration", d_model=WIDTH, num_layers=2, num_heads=HEADS), True
    images = lambda size=64: (torch.randn(BATCH, 3, size, size),)  # noqa: E731
    for trains in (False, True):
        yield "resnet", lambda: (ResNet((1, 1, 1, 1)), images()), trains
        yield "convnext", lambda: (ConvNeXt((1, 1), (96, 192)), images()), trains
        yield "vit-own", lambda: (ViT(ViTConfig(2, WIDTH, HEADS, patch=8), 64), images()), trains
        yield "dense-net", lambda: (DenseNet(), images()), trains
        yield "mobile-net", lambda: (MobileNet(), images()), trains
        yield "dit", lambda: (DiT(DiTConfig(2, WIDTH, HEADS), 16), _noised(16)), trains
        yield "lstm", lambda: (Lstm(), (torch.randn(16, BATCH, WIDTH),)), trains
        yield "scan", lambda: (Scan(), (torch.randn(BATCH, 32, WIDTH),)), trains
    yield (
        "u-net",
        lambda: (UNet(UNetConfig(64, (1, 2), 1, 4, 96)), (*_noised(16)[:2], torch.randn(BATCH, 16, 96))),
        True,
    )
    yield "segmentation", lambda: (Segmentation(), images()), True
    tokens = lambda: (torch.randn(BATCH, LENGTH, WIDTH), _tokens()[0])  # noqa: E731
    for trains in (False, True):
        yield "documents", lambda: (Documents(), tokens()), trains
    yield "adapter", lambda: (nn.Sequential(Adapter(), nn.SiLU(), Adapter()), tokens()[:1]), True
    yield "int8-weights", lambda: (Int8(), (torch.randn(BATCH, WIDTH),)), False
    yield "grouped-experts", lambda: (Experts(), (torch.randn(BATCH * LENGTH, WIDTH),)), True


def _noised(size: int) -> tuple[Tensor, ...]:
    return torch.randn(BATCH, 4, size, size), torch.randint(1000, (BATCH,)), torch.randint(1000, (BATCH,))


class DenseNet(nn.Module):
    """Each layer reads all that came before it."""

    def __init__(self, growth: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        sizes = [64 + growth * layer for layer in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes)
        self.convs = nn.ModuleList(nn.Conv2d(size, growth, 3, padding=1, bias=False) for size in sizes)
        self.head = nn.Linear(sizes[-1] + growth, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat((x, conv(F.relu(norm(x)))), 1)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class MobileNet(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, and depthwise convolutions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        wide = 4 * width
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.expand, self.deep = (
            nn.Conv2d(width, wide, 1, bias=False),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False),
        )
        self.squeeze, self.excite = nn.Conv2d(wide, width, 1), nn.Conv2d(width, wide, 1)
        self.shrink, self.head = nn.Conv2d(wide, width, 1, bias=False), nn.Linear(width, 100)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in (width, wide, wide, width))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.norms
        x = F.silu(first(self.stem(x)))
        y = F.silu(third(self.deep(F.silu(second(self.expand(x))))))
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        out: Tensor = self.head((x + last(self.shrink(y))).mean((2, 3)))
        return out


class Segmentation(nn.Module):
    """A small U-Net of convolutions, group norms and bilinear steps up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up, self.norm = nn.Conv2d(3 * width, width, 3, padding=1), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.down(x))
        y = F.leaky_relu(self.deep(F.avg_pool2d(x, 2)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return F.leaky_relu(self.norm(self.up(torch.cat((x, y), 1))))


class Lstm(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x.new_zeros(x.shape[1:])
        for step in self.into(x).unbind(0):
            i, f, g, o = (step + self.back(state)).chunk(4, -1)
            cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
            state = torch.sigmoid(o) * torch.tanh(cell)
        return state


class Scan(nn.Module):
    """A selective state space, step by step, with its gate (arXiv 2312.00752, algorithm 2)."""

    def __init__(self, width: int = WIDTH, states: int = 16) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.choose, self.decay = nn.Linear(width, 2 * states + 1), nn.Parameter(torch.rand(width, states))
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.into(x).chunk(2, -1)
        write, read, step = self.choose(x).split((self.states, self.states, 1), -1)
        kept = torch.exp(-F.softplus(step).unsqueeze(-1) * torch.exp(self.decay))
        added = (F.softplus(step) * x).unsqueeze(-1) * write.unsqueeze(-2)
        state, seen = torch.zeros_like(added[:, 0]), []
        for place in range(x.size(1)):
            state = kept[:, place] * state + added[:, place]
            seen.append((state * read[:, place].unsqueeze(-2)).sum(-1))
        out: Tensor = self.out(torch.stack(seen, 1) * F.silu(gate))
        return out


class Documents(nn.Module):
    """A block whose attention (flex_attention) sees earlier tokens of the same document, and is gated."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.RMSNorm(width), nn.Linear(width, 4 * width, False), nn.Linear(width, width)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        document = (tokens == 0).cumsum(0)

        def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (document[query] == document[key])

        mask = create_block_mask(visible, None, None, len(tokens), len(tokens), device=x.device)
        *heads, gate = (
            each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.into(self.norm(x)).chunk(4, -1)
        )
        out: Any = flex_attention(*heads, block_mask=mask)
        return x + self.out((out * torch.sigmoid(gate)).transpose(1, 2).flatten(2))


class Adapter(nn.Module):
    """A layer that does not learn, and two small ones that do."""

    def __init__(self, width: int = WIDTH, rank: int = 16) -> None:
        super().__init__()
        self.base, self.down, self.up = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, width), (width, rank), (rank, width))
        )
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(F.dropout(self.down(x), 0.1, self.training))


class Int8(nn.Module):
    """Weights of 8 bits, with a scale for each row."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(4 * width, width, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.weight.to(x.dtype)) * self.scale)


class Experts(nn.Module):
    """Two of eight experts for each token, sorted by expert, in grouped matmuls."""

    def __init__(self, width: int = WIDTH, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, *sizes)) for sizes in ((width, 2 * width), (width, width))
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = torch.topk(torch.softmax(self.router(x).float(), -1), 2)
        order = chosen.flatten().argsort(stable=True)
        numbers = torch.histc(chosen.float(), self.up.size(0), 0, self.up.size(0) - 1)
        ends = numbers.cumsum(0).to(torch.int32)
        up, gate = F.grouped_mm(x[order // 2].bfloat16(), self.up.bfloat16(), offs=ends).chunk(2, -1)
        seen = F.grouped_mm(up * F.silu(gate), self.down.bfloat16(), offs=ends)
        return torch.zeros_like(x).index_add(0, order // 2, (seen * weight.flatten()[order, None]).to(x.dtype))


# --- functions: losses, norms, masks


def _functions() -> Iterator[Maker]:
    logits = lambda: torch.randn(2048, WORDS, requires_grad=True)  # noqa: E731
    names = lambda: torch.randint(WORDS, (2048,))  # noqa: E731
    rows = lambda: torch.randn(2048, WIDTH, requires_grad=True)  # noqa: E731
    yield "cross-entropy", lambda: (F.cross_entropy, (logits(), names())), True
    yield "smoothed", lambda: (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), (logits(), names())), True
    yield "distillation", lambda: (_distillation, (logits(), logits())), True
    yield "contrastive", lambda: (_contrastive, (rows(), rows())), True
    yield "focal", lambda: (_focal, (logits(), torch.rand(2048, WORDS))), True
    yield "huber", lambda: (F.smooth_l1_loss, (rows(), torch.randn(2048, WIDTH))), True
    yield "rotary", lambda: (_rotary, (torch.randn(BATCH, HEADS, LENGTH, 64, requires_grad=True),)), True
    yield "top-k", lambda: (_top_k, (torch.randn(64, WORDS),)), False
    yield "dropout", lambda: (lambda x: F.dropout(F.gelu(x), 0.1) + x, (rows(),)), True
    yield "masked-softmax", lambda: (_masked, (torch.randn(BATCH, HEADS, LENGTH, LENGTH, requires_grad=True),)), True


def _distillation(x: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x / 2, -1), F.softmax(teacher.detach() / 2, -1), reduction="batchmean")


def _contrastive(x: Tensor, y: Tensor) -> Tensor:
    alike = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T / 0.07
    places = torch.arange(len(x), device=x.device)
    return (F.cross_entropy(alike, places) + F.cross_entropy(alike.T, places)) / 2


def _focal(x: Tensor, y: Tensor) -> Tensor:
    chance = torch.sigmoid(x)
    right = chance * y + (1 - chance) * (1 - y)
    return (F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - right) ** 2).mean()


def _rotary(x: Tensor) -> Tensor:
    angles = torch.outer(
        torch.arange(x.size(-2), device=x.device), 10000 ** (-torch.arange(0, 1, 1 / 32, device=x.device))
    )
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


def _top_k(x: Tensor) -> Tensor:
    highest, _ = torch.topk(x, 50)
    return torch.softmax(torch.where(x < highest[:, -1:], float("-inf"), x), -1).cumsum(-1)


def _masked(x: Tensor) -> Tensor:
    visible = torch.ones(x.size(-2), x.size(-1), dtype=torch.bool, device=x.device).tril()
    return torch.softmax(x.masked_fill(~visible, float("-inf")), -1)


# --- optimizers


class _Step:
    """A compiled step of an optimizer, on the weights of two blocks."""

    def __init__(self, make: Callable[[Any], Optimizer]) -> None:
        shapes = ((WORDS, WIDTH), *((4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,), (WIDTH, WIDTH)) * 2)
        self._weights = [nn.Parameter(torch.randn(*shape)) for shape in shapes]
        self._optimizer = make(self._weights)

    def run(self, prepare: Prepare) -> None:
        for weight in self._weights:
            weight.grad = torch.empty_like(weight)
        prepare(self._optimizer.step)()


def _optimizers() -> Iterator[Maker]:
    for name, kind, options in (
        ("adamw", torch.optim.AdamW, {}),
        ("adam-capturable", torch.optim.Adam, {"amsgrad": True}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", torch.optim.RMSprop, {"centered": True}),
        ("nadam", torch.optim.NAdam, {}),
        ("adamax", torch.optim.Adamax, {}),
    ):
        yield name, _step_of(kind, options), False


def _step_of(kind: type[Optimizer], options: dict[str, Any]) -> Callable[[], Made]:
    def make() -> Made:
        step: Any = _Step(lambda weights: kind(weights, **options))
        return step, ()

    return make
