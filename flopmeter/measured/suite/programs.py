"""The ten programs of the suite: small enough for any card, each of another kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.measured.suite.cases import Case, CaseRun, Maker, UnknownCaseError, torch_dtype
from flopmeter.models import BUILTINS, backward
from flopmeter.models.llama import Llama, LlamaConfig, rotary_table, rotate

PROGRAMS: dict[str, Callable[..., CaseRun]] = {}
"""How a program is made: a function of the Maker and the case's inputs but its dtype."""

LLAMA_1B = LlamaConfig(22, 2048, heads=32, kv_heads=4, hidden=5632, vocabulary=32000, rotary_base=10_000.0)
IDS = 1000  # token ids are random below this, in any vocabulary here
SEGMENTS = 2  # of BERT's second input


class Recurrent(nn.Module):
    """x [batch, length, width] through layers of an LSTM -> same shape."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def _llama(batch: int, seq: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return _small_llama(layers).to(dtype), (torch.empty(batch, seq, dtype=torch.long, device="meta"),)


def _small_llama(layers: int) -> Llama:
    config = LlamaConfig(**{**vars(LLAMA_1B), "layers": layers})
    with torch.device("meta"):
        return Llama(config)


def _lstm(batch: int, seq: int, layers: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...]]:
    width = 1024
    with torch.device("meta"):
        return Recurrent(width, layers).to(dtype), (torch.empty(batch, seq, width, dtype=dtype),)


MODELS: dict[str, Callable[..., tuple[nn.Module, tuple[Tensor, ...]]]] = {**BUILTINS, "llama-1b": _llama, "lstm": _lstm}


def _program(build: Callable[..., CaseRun]) -> Callable[..., CaseRun]:
    PROGRAMS[build.__name__.removeprefix("_")] = build
    return build


@_program
def _inference(make: Maker, model: str, batch: int, mode: str = "eager", layout: str = "nchw", **sizes: int) -> CaseRun:
    module, inputs = _ready(make, model, layout, batch=batch, **sizes)
    module.eval()
    # On meta it is the prediction's mode that says what torch.compile makes of it.
    called = torch.compile(module) if mode == "compiled" and make.device != "meta" else module

    def run() -> object:
        with torch.inference_mode():
            return called(*inputs)

    return run


@_program
def _training(
    make: Maker, model: str, optimizer: str, batch: int, autocast: str, layout: str = "nchw", **sizes: int
) -> CaseRun:
    """Forward, backward, optimizer step; without a loss scaler, which changes no kernel that takes time."""
    module, inputs = _ready(make, model, layout, batch=batch, **sizes)
    step = _OPTIMIZERS[optimizer](module.train().parameters())

    def run() -> object:
        with torch.enable_grad():
            if autocast:
                device = "cpu" if make.device == "cpu" else "cuda"
                with torch.autocast(device, torch_dtype(autocast)):
                    loss = module.loss(*inputs)
                loss.backward()
            else:
                backward(module, inputs)
            step.step()
            step.zero_grad(set_to_none=True)
            return None

    return run


@_program
def _optimizer(make: Maker, model: str, optimizer: str) -> CaseRun:
    """Only the optimizer's step, of a model that has gradients."""
    module, _ = _ready(make, model, "nchw", batch=1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    step = _OPTIMIZERS[optimizer](module.parameters())

    def run() -> object:
        step.step()
        return None

    return run


@_program
def _decode(make: Maker, batch: int, cached: int, layers: int) -> CaseRun:
    """One more token of each sequence, over the keys and values of `cached` earlier ones."""
    llama = _filled(make, _small_llama(layers).to(make.dtype))
    config = LLAMA_1B
    tokens = make.ids(batch, 1, below=IDS)
    shape = (batch, config.kv_heads, cached + 1, config.head_width)
    caches = [(make.weight(*shape), make.weight(*shape)) for _ in range(layers)]

    def run() -> object:
        with torch.inference_mode():
            x = llama.token(tokens)
            cos, sin = (table[-1:] for table in rotary_table(cached + 1, config.head_width, config.rotary_base, like=x))
            for block, (keys, values) in zip(llama.blocks, caches, strict=True):
                x = x + _attend(block.attention, block.norm1(x), keys, values, cos, sin)
                x = x + block.mlp(block.norm2(x))
            return llama.head(llama.norm(x)).argmax(-1)

    return run


def _attend(attention: Any, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The last place of keys and values [batch, heads, length, width] is the new token's."""
    q = attention.query(x).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
    k = attention.key(x).unflatten(-1, (attention.kv_heads, -1)).transpose(1, 2)
    v = attention.value(x).unflatten(-1, (attention.kv_heads, -1)).transpose(1, 2)
    keys[:, :, -1:] = rotate(k, cos, sin)
    values[:, :, -1:] = v
    context = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, enable_gqa=True)
    return attention.out(context.transpose(1, 2).flatten(2))


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "fused-adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


def _ready(make: Maker, name: str, layout: str, **sizes: int) -> tuple[Any, tuple[Tensor, ...]]:
    """The model and its inputs on the Maker's device. Raises UnknownCaseError for a model that is not here."""
    if name not in MODELS:
        raise UnknownCaseError(f"no model of the suite is named {name!r}")
    module, inputs = MODELS[name](dtype=make.dtype, **sizes)
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    filled = tuple(
        make.activation(*x.shape, order=order)
        if x.is_floating_point()
        else make.ids(*x.shape, below=SEGMENTS if place else IDS)
        for place, x in enumerate(inputs)
    )
    if layout == "nhwc":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return _filled(make, module), filled


def _filled(make: Maker, module: nn.Module) -> Any:
    """The model with weights of the usual magnitude, so that no value overflows."""
    if make.device != "meta":
        module = module.to_empty(device=make.device)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.normal_(std=0.02) if tensor.ndim > 1 and tensor.is_floating_point() else tensor.fill_(1)
    return module


# --- which are measured --------------------------------------------------------------------------------------------


def program_cases(half: str) -> list[Case]:
    """The programs for a GPU, which compute in `half`."""
    inference, training = {"dtype": half}, {"autocast": half, "dtype": "fp32"}
    return [
        _case("inference", model="bert-base", batch=8, seq=384, **inference),
        _case("inference", model="bert-base", batch=8, seq=384, mode="compiled", **inference),
        _case("inference", model="vit-b-16", batch=32, image_size=224, **inference),
        _case("inference", model="resnet-50", batch=32, image_size=224, layout="nhwc", **inference),
        _case("inference", model="llama-1b", batch=1, seq=1024, layers=22, **inference),
        _case("decode", batch=8, cached=1023, layers=22, **inference),
        _case("inference", model="lstm", batch=64, seq=128, layers=2, **inference),
        _case("training", model="gpt2-124m", optimizer="fused-adamw", batch=4, seq=512, **training),
        _case("training", model="resnet-50", optimizer="sgd", batch=32, image_size=224, **training),
        _case("optimizer", model="gpt2-124m", optimizer="adamw", dtype="fp32"),
    ]


def cpu_program_cases() -> list[Case]:
    """Programs of the same kinds in fp32, small enough for one core."""
    fp32 = {"dtype": "fp32"}
    return [
        _case("inference", model="bert-base", batch=1, seq=128, **fp32),
        _case("inference", model="bert-base", batch=1, seq=128, mode="compiled", **fp32),
        _case("inference", model="vit-b-16", batch=1, image_size=224, **fp32),
        _case("inference", model="resnet-50", batch=1, image_size=224, layout="nhwc", **fp32),
        _case("inference", model="llama-1b", batch=1, seq=128, layers=4, **fp32),
        _case("decode", batch=1, cached=1023, layers=4, **fp32),
        _case("inference", model="lstm", batch=8, seq=16, layers=2, **fp32),
        _case("training", model="gpt2-124m", optimizer="adamw", batch=1, seq=64, autocast="", **fp32),
        _case("training", model="resnet-50", optimizer="sgd", batch=1, image_size=224, autocast="", **fp32),
        _case("optimizer", model="gpt2-124m", optimizer="adamw", **fp32),
    ]


def _case(kind: str, **inputs: Any) -> Case:
    return Case(kind, inputs, "sustained")
