"""Well-known models, defined small, to meter without any other package: `BUILTINS["gpt2-124m"](batch=8)`.

Each entry of BUILTINS is a function of the batch, a size and a dtype that returns a model and its inputs, all on
meta; `backward` and `training_step` run them as they are trained. `import flopmeter` does not import this package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flopmeter.models.bert import BERT_BASE, BERT_LARGE, Bert, BertConfig
from flopmeter.models.diffusion import (
    DIT_S_2,
    DIT_XL_2,
    LATENT_CHANNELS,
    STABLE_DIFFUSION,
    UNET_SMALL,
    DiT,
    DiTConfig,
    UNet,
    UNetConfig,
)
from flopmeter.models.encoder_layer import EncoderLayer
from flopmeter.models.gpt2 import GPT2, GPT2_124M, GPT2_355M, GPT2_774M, GPT2_1558M
from flopmeter.models.llama import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, Llama
from flopmeter.models.vision import VIT_B_16, VIT_L_16, ConvNeXt, ResNet, ViT

Inputs = tuple[Tensor, ...]
Builder = Callable[..., tuple[nn.Module, Inputs]]

LATENT_PIXELS = 8  # image pixels a latent pixel, along each side (the autoencoder of latent diffusion)
TEXT_TOKENS = 77  # context of CLIP's text encoder


@runtime_checkable
class Trainable(Protocol):
    """A model that knows the loss it is trained with, as a scalar function of its inputs."""

    def loss(self, *args: Any, **kwargs: Any) -> Tensor: ...


def backward(model: nn.Module, inputs: Inputs) -> None:
    """Run forward and backward from the model's loss.

    A model without a loss is part of a larger one, so it gets a gradient from outside: its own output, which costs no
    kernel.
    """
    if isinstance(model, Trainable):
        torch.autograd.backward(model.loss(*inputs))
    else:
        output = model(*inputs)
        torch.autograd.backward(output, output.detach())


def training_step(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer) -> None:
    """Forward, backward, optimizer step; the gradients are freed at the end."""
    backward(model, inputs)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _data(*shape: int, dtype: torch.dtype) -> Tensor:
    """A model's input: on meta, where only shape and dtype count."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _weights(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        return make().to(dtype)


def _checked(image_size: int, multiple: int) -> int:
    if image_size <= 0 or image_size % multiple:
        raise ValueError(f"image_size must be a positive multiple of {multiple} pixels, not {image_size}")
    return image_size


def _encoder_layer(batch: int = 8, seq: int = 512, dtype: torch.dtype = torch.float16) -> tuple[nn.Module, Inputs]:
    model = _weights(EncoderLayer, dtype)
    return model, (_data(batch, seq, 1024, dtype=dtype).requires_grad_(),)


def _bert(
    config: BertConfig, batch: int = 1, seq: int = 512, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Inputs]:
    tokens, segments = (_data(batch, seq, dtype=torch.long) for _ in range(2))
    return _weights(lambda: Bert(config), dtype), (tokens, segments)


def _decoder(
    make: Callable[[], nn.Module], batch: int = 1, seq: int = 1024, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Inputs]:
    return _weights(make, dtype), (_data(batch, seq, dtype=torch.long),)


def _classifier(
    make: Callable[[int], nn.Module],
    multiple: int,
    batch: int = 1,
    image_size: int = 224,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[nn.Module, Inputs]:
    size = _checked(image_size, multiple)
    return _weights(lambda: make(size), dtype), (_data(batch, 3, size, size, dtype=dtype),)


def _dit(
    config: DiTConfig, batch: int = 1, image_size: int = 256, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Inputs]:
    size = _checked(image_size, LATENT_PIXELS * config.patch) // LATENT_PIXELS
    latent = _data(batch, LATENT_CHANNELS, size, size, dtype=dtype)
    timestep, label = (_data(batch, dtype=torch.long) for _ in range(2))
    return _weights(lambda: DiT(config, size), dtype), (latent, timestep, label)


def _unet(
    config: UNetConfig, batch: int = 1, image_size: int = 512, dtype: torch.dtype = torch.bfloat16
) -> tuple[nn.Module, Inputs]:
    halvings = len(config.multipliers) - 1
    size = _checked(image_size, LATENT_PIXELS * 2**halvings) // LATENT_PIXELS
    latent = _data(batch, LATENT_CHANNELS, size, size, dtype=dtype)
    context = _data(batch, TEXT_TOKENS, config.context_width, dtype=dtype)
    return _weights(lambda: UNet(config), dtype), (latent, _data(batch, dtype=torch.long), context)


BUILTINS: dict[str, Builder] = {
    "encoder-layer": _encoder_layer,
    "bert-base": partial(_bert, BERT_BASE),
    "bert-large": partial(_bert, BERT_LARGE),
    "gpt2-124m": partial(_decoder, lambda: GPT2(GPT2_124M)),
    "gpt2-355m": partial(_decoder, lambda: GPT2(GPT2_355M)),
    "gpt2-774m": partial(_decoder, lambda: GPT2(GPT2_774M)),
    "gpt2-1558m": partial(_decoder, lambda: GPT2(GPT2_1558M)),
    "llama-2-7b": partial(_decoder, lambda: Llama(LLAMA_2_7B), seq=4096),
    "llama-3-8b": partial(_decoder, lambda: Llama(LLAMA_3_8B), seq=8192),
    "llama-3-70b": partial(_decoder, lambda: Llama(LLAMA_3_70B), seq=8192),
    "llama-3-405b": partial(_decoder, lambda: Llama(LLAMA_3_405B), seq=8192),
    "resnet-50": partial(_classifier, lambda _: ResNet(), 1),
    "vit-b-16": partial(_classifier, lambda size: ViT(VIT_B_16, size), 16),
    "vit-l-16": partial(_classifier, lambda size: ViT(VIT_L_16, size), 16),
    "convnext-t": partial(_classifier, lambda _: ConvNeXt(), 1),
    "dit-s-2": partial(_dit, DIT_S_2),
    "dit-xl-2": partial(_dit, DIT_XL_2),
    "unet": partial(_unet, STABLE_DIFFUSION),
    "unet-small": partial(_unet, UNET_SMALL),
}
