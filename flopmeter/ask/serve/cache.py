"""What a server keeps of earlier tokens: transformers' own cache layers say of which kind each layer's memory is.

That memory is there before a step. A paged cache is one piece, into which a step writes its own keys and values; the
cache of transformers' generate() is copied at each step.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CacheKind = Literal["paged", "transformers"]
"""Who holds keys and values: a server, in memory of its own, or transformers' DynamicCache."""


class ServingError(ValueError):
    """What was asked of a server makes no sense, or its model cannot be run step by step."""


class KeptLayer(NamedTuple):
    """What one layer keeps of a sequence."""

    elements: int  # of one token: keys and values of the grouped heads, or a latent; 0: it reads another layer's
    most_tokens: float = math.inf  # those of a window
    most_old: float = math.inf  # that a metered step has in front of its own


def cache_of(config: Any, cached: int, kind: CacheKind) -> Any:
    """A cache of transformers for the model of `config` that has `cached` tokens of each sequence.

    Raises ServingError where a layer keeps something else than keys and values, such as the state of linear attention.
    """
    caches = import_module("transformers.cache_utils")
    held = _held_layer(caches.DynamicLayer, has_chunks=bool(getattr(config, "attention_chunk_size", None)))
    known = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer)
    layers = []
    for own in caches.DynamicCache(config=config).layers:
        if type(own) in known:
            layers.append(held(cached, kind, own))
        elif type(own).__name__ == "DummyLayer":  # reads what another layer keeps
            layers.append(own)
        else:
            raise ServingError(
                f"{config.model_type} has layers that keep more than keys and values ({type(own).__name__} of"
                " transformers), as linear or sparse attention does: it cannot be served here; meter a step of it with"
                " FlopMeter"
            )
    return caches.Cache(layers=layers)


def kept_in(cache: Any) -> tuple[KeptLayer, ...]:
    """What each layer keeps, from a cache of `cache_of` after a step."""
    return tuple(getattr(layer, "kept", KeptLayer(0)) for layer in cache.layers)


def _held_layer(base: Any, *, has_chunks: bool) -> Any:
    class HeldLayer(base):  # type: ignore[misc]
        """So many tokens of each sequence. Paged, kernels see all and are told of a window."""

        def __init__(self, cached: int, kind: CacheKind, own: Any) -> None:
            super().__init__()
            self.cached, self.is_paged = cached, kind == "paged"
            most, most_old = getattr(own, "sliding_window", math.inf), math.inf
            if not self.is_paged:
                most_old = most - 1  # transformers' own: each step brings the last token of the window
            elif has_chunks:
                most_old = most  # no kernel is told of chunks: at most a whole one is read
            self.kept, self.old = KeptLayer(0, most, most_old), int(min(cached, most_old))

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            elements = sum(each.shape[1] * each.shape[3] for each in (key_states, value_states))
            self.kept = self.kept._replace(elements=elements)
            hold = _paged if self.is_paged else _copied
            self.keys, self.values = hold(self.old, key_states), hold(self.old, value_states)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self.cached

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.old + query_length, self.cached - self.old

    return HeldLayer


def _paged(cached: int, new: Tensor) -> Tensor:
    """Memory for all tokens, laid out as flash kernels read it; a step writes its own."""
    batch, heads, tokens, width = new.shape
    held = new.new_empty(batch, cached + tokens, heads, width).transpose(1, 2)
    held[:, :, cached:].copy_(new)
    return held


def _copied(cached: int, new: Tensor) -> Tensor:
    """transformers' own cache: at each step old and new tokens are copied together."""
    batch, heads, _, width = new.shape
    return torch.cat((new.new_empty(batch, heads, cached, width), new), dim=-2) if cached else new
