"""Programs as they were when they were measured, where today's libraries launch other kernels.

The GPT-2 of build-nanogpt (Andrej Karpathy, github.com/karpathy/build-nanogpt, MIT), with attention written out as it
was before its commit 7ee630c and fused as it was after. The decoder of gpt-fast, and its linear layers with weights of
8 and 4 bits (github.com/pytorch-labs/gpt-fast). Attention as transformers 4.3x (2023) wrote it out in
BERT, GPT-2 and OPT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, is_fused: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.is_fused = heads, is_fused
        self.bias: Tensor
        self.register_buffer("bias", torch.tril(torch.ones(positions, positions)).view(1, 1, positions, positions))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        if self.is_fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        projected: Tensor = self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))
        return projected


class Block(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, is_fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, positions, is_fused)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return y


class NanoGPT(nn.Module):
    """tokens and targets [batch, length] -> the loss."""

    def __init__(self, vocabulary: int, *, is_fused: bool, positions: int = 1024) -> None:
        super().__init__()
        width, heads, layers = 768, 12, 12
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Block(width, heads, positions, is_fused) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed: Tensor = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight
        return normed


class CachedAttention(nn.Module):
    """One matmul for queries, keys and values; a cache of fixed length, all of which each query is compared with."""

    def __init__(self, width: int, heads: int, positions: int) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = heads
        self.keys: Tensor
        self.values: Tensor
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(1, heads, positions, width // heads, dtype=torch.bfloat16))

    def forward(self, x: Tensor, turns: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1) for part in self.wqkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in (_turned(q, turns), _turned(k, turns), v))
        self.keys[:, :, positions] = k
        self.values[:, :, positions] = v
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=visible)
        projected: Tensor = self.wo(y.transpose(1, 2).reshape(batch, length, width))
        return projected


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs, in fp32; turns [length, head / 2, 2] holds cosines and sines."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cosine, sine = turns[None, :, None].unbind(-1)
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1)
    return turned.flatten(3).type_as(x)


class GptFastBlock(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, positions: int) -> None:
        super().__init__()
        self.attention = CachedAttention(width, heads, positions)
        self.w1, self.w3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, x: Tensor, turns: Tensor, visible: Tensor, positions: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns, visible, positions)
        y = self.ffn_norm(x)
        z: Tensor = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return z


class GptFastLlama(nn.Module):
    """Llama-2-7B in bf16, on meta: tokens [1, length] at positions [length] -> logits of the last."""

    def __init__(self, cached: int) -> None:
        super().__init__()
        width, heads, inner, layers, vocabulary = 4096, 32, 11008, 32, 32000
        self.embeddings, self.norm = nn.Embedding(vocabulary, width), RMSNorm(width)
        self.layers = nn.ModuleList(GptFastBlock(width, heads, inner, cached) for _ in range(layers))
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.turns: Tensor
        self.mask: Tensor
        self.register_buffer("turns", torch.empty(2048, width // heads // 2, 2))
        self.register_buffer("mask", torch.ones(cached, cached, dtype=torch.bool).tril())

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x, turns, visible = self.embeddings(tokens), self.turns[positions], self.mask[None, None, positions]
        for layer in self.layers:
            x = layer(x, turns, visible, positions)
        logits: Tensor = self.output(self.norm(x))[:, -1]
        return logits


def next_token(model: nn.Module, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """A token and the probabilities that it is drawn by, of the 200 most likely ones (generate.py's defaults)."""
    logits = model(tokens, positions) / 0.8
    least_likely = torch.topk(logits, 200)[0][..., -1:]
    probabilities = torch.softmax(torch.where(logits < least_likely, -math.inf, logits), -1)
    drawn = probabilities / torch.empty_like(probabilities).exponential_(1)
    return drawn.argmax(-1, keepdim=True).to(torch.int32), probabilities


class Int8Linear(nn.Module):
    """Weights of 8 bits, and a scale for each output."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight: Tensor
        self.scales: Tensor
        self.register_buffer("weight", torch.empty(outputs, inputs, dtype=torch.int8))
        self.register_buffer("scales", torch.empty(outputs, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


class Int4Linear(nn.Module):
    """Weights of 4 bits, and a scale and a zero for each output and each group of 32 inputs."""

    GROUP = 32

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight: Tensor
        self.scales_and_zeros: Tensor
        self.register_buffer("weight", torch.empty(outputs // 8, inputs // (8 * 16), 32, 4, dtype=torch.int32))
        groups = (inputs // self.GROUP, outputs, 2)
        self.register_buffer("scales_and_zeros", torch.empty(groups, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.aten._weight_int4pack_mm(rows, self.weight, self.GROUP, self.scales_and_zeros)
        return y.view(*x.shape[:-1], self.outputs)


def quantise(model: nn.Module, layer: type[Int8Linear | Int4Linear]) -> None:
    """Replace every linear layer of a model on meta, in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            with torch.device("meta"):
                setattr(model, name, layer(child.in_features, child.out_features))
        else:
            quantise(child, layer)


@contextmanager
def attention_of_2023() -> Iterator[None]:
    """In here transformers' eager attention has the kernels that it had in 4.3x. It masked scores even where no mask
    was given, and divided them after the product; OPT scaled its queries, and kept scores above the least number."""
    with ExitStack() as replaced:
        for model, attention in (("bert", _of_bert), ("gpt2", _of_gpt2), ("opt", _of_opt)):
            module = import_module(f"transformers.models.{model}.modeling_{model}")
            replaced.enter_context(mock.patch.object(module, "eager_attention_forward", attention))
        yield


def _of_bert(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return _context(module, scores + scores.new_zeros(len(q), 1, 1, k.shape[2]), v, **options)


def _of_gpt2(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    is_visible = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    scores = torch.where(is_visible, scores, scores.new_full((), torch.finfo(scores.dtype).min))
    return _context(module, scores, v, **options)


def _of_opt(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2)
    scores = scores + scores.new_zeros(len(q), 1, q.shape[2], k.shape[2])
    scores = torch.max(scores, scores.new_full((), torch.finfo(scores.dtype).min))
    return _context(module, scores, v, **options)


def _context(module: nn.Module, scores: Tensor, v: Tensor, dropout: float = 0.0, **_: Any) -> tuple[Tensor, Tensor]:
    weights = F.dropout(F.softmax(scores, dim=-1), dropout, module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights
