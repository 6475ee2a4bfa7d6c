"""What a server keeps of earlier tokens: transformers' own cache layers say of which kind each layer's memory is.

That memory is there before a step. A paged cache is one piece, into which a step writes its own keys and values; the
cache of transformers' generate() is copied at each step. The states of linear attention are written in place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

CacheKind = Literal["paged", "transformers"]
"""Who holds keys and values: a server, in memory of its own, or transformers' DynamicCache."""

WINDOW = "flopmeter_window"
"""An attribute of the keys that a layer with a window holds in pages: its tokens, for attention that is not told."""


class ServingError(ValueError):
    """What was asked of a server makes no sense, or its model cannot be run step by step."""


class KeptState(NamedTuple):
    """A state of linear attention, which is as large after one token as after many."""

    held_in: Literal["conv_states", "recurrent_states"]  # of a layer of transformers' cache
    place: int  # in there
    shape: tuple[int, ...]  # of one sequence
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class KeptLayer(NamedTuple):
    """What one layer keeps of a sequence."""

    elements: int  # of one token: keys and values of the grouped heads, or a latent; 0: it reads another layer's
    most_tokens: float = math.inf  # those of a window
    most_old: float = math.inf  # earlier tokens that a metered step reads
    states: tuple[KeptState, ...] = ()


def empty_cache(config: Any, kind: CacheKind) -> Any:
    """A cache of transformers for the model of `config`, of which each layer holds no token yet.

    Raises ServingError where a layer keeps something else than keys, values and the states of linear attention.
    """
    caches = import_module("transformers.cache_utils")
    held = _held_layer(caches.DynamicLayer, has_chunks=bool(getattr(config, "attention_chunk_size", None)))
    with_keys = (caches.DynamicLayer, caches.DynamicSlidingWindowLayer)
    of_states = getattr(caches, "LinearAttentionLayer", ())  # newer than the others
    layers = []
    try:
        own_layers = caches.DynamicCache(config=config).layers
    except KeyError as error:
        raise ServingError(f"{config.model_type}: transformers has no cache for its layers of type {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ServingError(f"{config.model_type}: transformers makes no cache for this config ({why})") from error
    for own in own_layers:
        if type(own) in with_keys:
            layers.append(held(kind, own))
        elif type(own).__name__ == "DummyLayer":  # reads what another layer keeps
            layers.append(own)
        elif isinstance(own, of_states):
            layers.append(_held_states(of_states, held if isinstance(own, with_keys) else None)(kind, own))
        else:
            raise ServingError(
                f"{config.model_type} has layers that keep more than keys and values ({type(own).__name__} of"
                " transformers), as sparse attention does: it cannot be served here; meter a step of it with FlopMeter"
            )
    return caches.Cache(layers=layers)


def filled_cache(kept: Sequence[KeptLayer], stepped: Any, batch: int, cached: int) -> Any:
    """A cache with `cached` tokens of each of `batch` sequences. `kept`: what a layer keeps of a sequence; `stepped`:
    an `empty_cache` after a step."""
    cache = copy.deepcopy(stepped)
    for layer, of_layer in zip(cache.layers, kept, strict=True):
        if hasattr(layer, "kept"):
            layer.fill(cached)
        for state in of_layer.states:
            getattr(layer, state.held_in)[state.place] = torch.empty(
                batch, *state.shape, dtype=state.dtype, device="meta"
            )
            layer.has_previous_state[state.place] = True
    return cache


def kept_in(cache: Any) -> tuple[KeptLayer, ...]:
    """What each layer keeps of a sequence, from an `empty_cache` after a step of one sequence."""
    return tuple(
        getattr(layer, "kept", KeptLayer(0))._replace(
            states=tuple(
                KeptState(name, place, tuple(state.shape[1:]), state.dtype)
                for name in ("conv_states", "recurrent_states")
                for place, state in getattr(layer, name, {}).items()
                if state is not None
            )
        )
        for layer in cache.layers
    )


def _held_states(base: Any, with_keys: Any | None) -> Any:
    """A class of layers with states; if `with_keys` is given, with keys and values as well."""

    class HeldStates(*((base,) if with_keys is None else (with_keys, base))):  # type: ignore[misc]
        """States that a step reads and writes where they are; kernels see what was there before new tokens."""

        def __init__(self, kind: CacheKind, own: Any) -> None:
            if with_keys is not None:
                with_keys.__init__(self, kind, own)
            base.__init__(self, number_of_states=own.number_of_states)

        def update_conv_state(
            self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
        ) -> Tensor:
            size = conv_kernel_size or conv_states.shape[-1]
            if not self.has_previous_state[state_idx]:
                self.conv_states[state_idx] = conv_states.new_empty(*conv_states.shape[:-1], size)
                self.has_previous_state[state_idx] = True
            new = min(size, conv_states.shape[-1])
            self.conv_states[state_idx][..., -new:].copy_(conv_states[..., -new:])
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
            held = self.recurrent_states[state_idx]
            if held is None:
                self.recurrent_states[state_idx] = recurrent_states
            elif held is not recurrent_states:  # else the kernel has written into it
                held.copy_(recurrent_states)
            return recurrent_states

    return HeldStates


def _held_layer(base: Any, *, has_chunks: bool) -> Any:
    class HeldLayer(base):  # type: ignore[misc]
        """Keys and values of `cached` tokens of each sequence. If paged, a kernel gets all of them and the window."""

        def __init__(self, kind: CacheKind, own: Any) -> None:
            base.__init__(self)
            self.cached, self.old, self.is_paged = 0, 0, kind == "paged"
            most, most_old = getattr(own, "sliding_window", math.inf), math.inf
            if not self.is_paged:
                most_old = most - 1  # transformers' own: each step brings the last token of the window
            elif has_chunks:
                most_old = most  # kernels have no argument for chunks: at most one whole chunk is read
            self.kept = KeptLayer(0, most, most_old)
            self.window = None if has_chunks or most == math.inf else int(most)

        def fill(self, cached: int) -> None:
            self.cached, self.old = cached, int(min(cached, self.kept.most_old))

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            elements = sum(each.shape[1] * each.shape[3] for each in (key_states, value_states))
            self.kept = self.kept._replace(elements=elements)
            hold = _paged if self.is_paged else _copied
            self.keys, self.values = hold(self.old, key_states), hold(self.old, value_states)
            if self.is_paged:
                setattr(self.keys, WINDOW, self.window)
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
