"""Attention of transformers as a server runs it: a flash kernel that reads the cache where it lies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from flopmeter.ask.serve.cache import WINDOW

PAGED = "flopmeter_paged"  # the name under which transformers knows the attention below


def register_paged_attention() -> None:
    """Make PAGED a kind of attention that a config of transformers can name. It needs no mask."""
    modeling, masking = import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(PAGED, _flash_attention)
    masking.AttentionMaskInterface.register(PAGED, lambda *_, **__: None)


def _flash_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """The flash-attention library's, causal from the bottom right. q [B, heads, new, D], k and v [B, key heads, tokens,
    D]; gives [B, new, heads, D] and no weights. Some models only tell their mask of a window, as Moshi does."""
    q, k, v = (each.transpose(1, 2) for each in (_in_latents(query, key), key, value))
    window = options.get("sliding_window") or getattr(key, WINDOW, None)
    size = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=options.get("scaling"), **size
    )[0]
    return _as_values(out, module, value), None


def _in_latents(query: Tensor, key: Tensor) -> Tensor:
    """The queries as wide as the keys, which are wider than the module's own where it reads latents."""
    return query if query.shape[-1] == key.shape[-1] else query.new_empty(*query.shape[:-1], key.shape[-1])


def _as_values(out: Tensor, module: Any, value: Tensor) -> Tensor:
    """Results [B, new, heads, ...] as wide as the module's values."""
    width = getattr(module, "v_head_dim", value.shape[-1])
    return out[..., :width] if width == value.shape[-1] else out.new_empty(*out.shape[:-1], width)


@contextlib.contextmanager
def reading_latents(layers: list[Any], new: int) -> Iterator[None]:
    """In this context attention of these layers reads the latents themselves, as one head that all queries share
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). The projection that would expand each cached latent turns queries
    into latents and results back instead: as many FLOPs as to expand the new tokens alone."""

    def latents(layer: Any, nope: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        layer.kv_b_proj(nope[:, :, -new:])
        key = nope.new_empty(*nope.shape[:-1], nope.shape[-1] + rope.shape[-1])
        return key, key[..., : nope.shape[-1]]

    for layer in layers:
        layer.expand_kv = functools.partial(latents, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.expand_kv
