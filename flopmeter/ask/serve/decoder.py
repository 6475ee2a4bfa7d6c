"""A language model as a server runs it: one rank's share of it, its cache, and the steps of prefill and decoding.

The model is transformers' own, built on meta from its config. What a server adds is put in through transformers' own
interfaces: a cache whose memory is there before the step (new keys and values are written into it, old ones stay where
they are), and attention by flash kernels, which read that cache at its own number of heads. `cache="transformers"`
keeps what transformers does by default: a cache that is copied at each step, and scaled_dot_product_attention.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flopmeter.ask.serve.engine import choose_tokens, pack
from flopmeter.models.hubs import config_of_llama, hub_config, model_of
from flopmeter.models.llama import LLAMAS

CacheKind = Literal["paged", "transformers"]
"""Who holds keys and values: a server, in memory of its own, or transformers' DynamicCache."""

PAGED = "flopmeter_paged"  # the name under which transformers knows the attention below
MOST_ABSORBED_TOKENS = 16  # of a step of decoding with a draft; a longer chunk expands the latents


class ServingError(ValueError):
    """What was asked of a server makes no sense, or its model cannot be run step by step."""


@dataclass(frozen=True)
class Decoder:
    """One rank's share of a causal language model."""

    model: Any  # of transformers, on meta
    config: Any
    cache: CacheKind
    ranks: int

    @property
    def title(self) -> str:
        return type(self.model).__name__

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights, as the model keeps them; tied weights count once."""
        return sum(tensor.nbytes for tensor in _distinct(self.model))

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in _distinct(self.model))

    def kv_bytes(self, tokens: int, element_bytes: float) -> float:
        """What one sequence of so many tokens holds on this rank, in all layers: keys and values of the grouped heads,
        or the latent of multi-head latent attention (of which each rank has all); of a layer with a window no more
        tokens than that.
        """
        config = self.config
        windows = [window_of(config, layer) or tokens for layer in range(config.num_hidden_layers)]
        return sum(min(tokens, window) for window in windows) * kv_width(config, self.cache) * element_bytes

    def metered_kv_bytes(self, tokens: int) -> float:
        """The same as a metered step holds it: in the model's type, whatever the window. Versions of transformers that
        expand latents before they are cached hold the keys and values of all heads."""
        width = kv_width(self.config, "paged" if self._latent_layers else "transformers")
        return float(self.config.num_hidden_layers * tokens * width * self.model.dtype.itemsize)

    @property
    def _latent_layers(self) -> list[Any]:
        """Multi-head latent attentions that cache the latent."""
        return [module for module in self.model.modules() if hasattr(module, "expand_kv")]

    def step(self, batch: int, new: int, cached: int, logits: int = 1) -> Callable[[], None]:
        """A run of `new` tokens of each of `batch` sequences after `cached` ones, whose keys and values are in the
        cache. The vocabulary is scored for the last `logits` tokens."""
        ids = torch.empty(batch, new, dtype=torch.long, device="meta")
        caches = import_module("transformers.cache_utils")

        def run() -> None:
            layer = _held_layer(caches, _paged if self.cache == "paged" else _copied)
            attention = PAGED if self.cache == "paged" else "sdpa"
            self.model.config._attn_implementation = self.config._attn_implementation = attention
            kv = caches.Cache(layers=[layer(cached) for _ in range(self.config.num_hidden_layers)])
            absorbed = self._latent_layers if self.cache == "paged" and new <= MOST_ABSORBED_TOKENS else []
            with torch.no_grad(), _absorbed(absorbed, new):
                out = self.model(input_ids=ids, past_key_values=kv, use_cache=True, logits_to_keep=logits)
                if self.cache == "paged":
                    choose_tokens(out.logits)

        return run


def decoder(target: Any, ranks: int = 1, cache: CacheKind = "paged") -> Decoder:
    """The share of one of `ranks` tensor parallel ranks.

    target: a built-in Llama ('llama-3-8b'), 'hf:CONFIG.json' or 'hf:TYPE', a config of transformers, or a model that
        has one.
    Raises ServingError where the model is no causal language model, or cannot be split over so many ranks.
    """
    if cache not in get_args(CacheKind):
        raise ServingError(f"unknown cache {cache!r}; known: {', '.join(get_args(CacheKind))}")
    config = _config_of(target)
    text = config.get_text_config()
    needed = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
    missing = [name for name in needed if not getattr(text, name, None)]
    if missing:
        raise ServingError(f"{target}: a config to serve has {', '.join(needed)}; this one lacks {', '.join(missing)}")
    if not any("CausalLM" in name or "LMHead" in name for name in getattr(config, "architectures", None) or ()):
        config.architectures = [_causal_class(config)]
    share = _split(config, ranks)
    _register_paged_attention()
    own = Decoder(model_of(share), share.get_text_config(), cache, ranks)
    if cache == "paged":
        pack(own.model)
    if ranks > 1:
        whole = _split(config, 1)
        if _in_layers(own.model, own.config) * ranks > MOST_COPIED * _in_layers(
            model_of(whole), whole.get_text_config()
        ):
            raise ServingError(
                f"{own.title} cannot be split over {ranks} GPUs by its config: a rank keeps too much of it"
            )
    return own


def _config_of(target: Any) -> Any:
    if isinstance(target, str):
        if target in LLAMAS:
            return config_of_llama(LLAMAS[target])
        if not target.startswith("hf:"):
            raise ServingError(
                f"{target!r} cannot be served: give hf:CONFIG.json, hf:TYPE or one of {', '.join(LLAMAS)}"
            )
        return hub_config(target.removeprefix("hf:"))
    config = getattr(target, "config", target)
    if not hasattr(config, "get_text_config"):
        raise ServingError(
            "a server takes hf:CONFIG.json, a config of transformers or a model that has one, not"
            f" {type(target).__name__}"
        )
    return copy.deepcopy(config)


def _causal_class(config: Any) -> str:
    known = import_module("transformers.models.auto.modeling_auto")
    names = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ServingError(
            f"{config.model_type} is an encoder, which makes no text token by token: take a causal language model, or "
            "a config with is_decoder=True"
        )
    if config.model_type not in names:
        raise ServingError(f"transformers has no causal language model of type {config.model_type!r} to serve")
    return str(names[config.model_type])


MOST_COPIED = 1.5  # all ranks together may hold this many times the model: some hold the same norms and heads
_SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size")
"""What tensor parallelism splits: heads, the width of MLPs and of each expert, the vocabulary."""


def _split(config: Any, ranks: int) -> Any:
    share = copy.deepcopy(config)
    text = share.get_text_config()
    if getattr(text, "num_key_value_heads", None) is None:
        text.num_key_value_heads = text.num_attention_heads
    text.head_dim = head_dim(text)
    for name in _SPLIT:
        size = getattr(text, name, None)
        if not size or ranks == 1:
            continue
        if name == "num_key_value_heads":
            setattr(text, name, max(1, size // ranks))  # fewer heads than ranks: several have the same
        elif size % ranks and name != "vocab_size":
            raise ServingError(f"{name} {size} cannot be split over {ranks} GPUs: take a divisor")
        else:
            setattr(text, name, -(-size // ranks))
    if (getattr(text, "pad_token_id", None) or 0) >= text.vocab_size:
        text.pad_token_id = None  # another rank's
    return share


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_width(config: Any, cache: CacheKind) -> int:
    """Elements of one token in the cache of one layer."""
    latent = getattr(config, "kv_lora_rank", None)
    if not latent:
        return 2 * int(config.num_key_value_heads) * head_dim(config)
    if cache == "paged":
        return int(latent + config.qk_rope_head_dim)
    return int(config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))


def window_of(config: Any, layer: int) -> int | None:
    """For how many tokens the layer keeps keys and values; None: for all."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    types = getattr(config, "layer_types", None)
    return int(window) if types is None or types[layer] == "sliding_attention" else None


def _distinct(model: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in model.parameters()}.values())


def _in_layers(model: Any, config: Any) -> int:
    """Parameters without those of the vocabulary."""
    return sum(tensor.numel() for tensor in _distinct(model) if config.vocab_size not in tensor.shape)


def _held_layer(caches: Any, held_with: Callable[[int, Tensor], Tensor]) -> Any:
    class HeldLayer(caches.DynamicLayer):  # type: ignore[misc]
        """A cache of so many tokens; `held_with` puts those of a step beside them."""

        def __init__(self, cached: int) -> None:
            super().__init__()
            self.cached = cached

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return held_with(self.cached, key_states), held_with(self.cached, value_states)

        def get_seq_length(self) -> int:
            return self.cached

    return HeldLayer


def _paged(cached: int, new: Tensor) -> Tensor:
    """Memory for all tokens, laid out as flash kernels read it; a step writes its own."""
    batch, heads, tokens, width = new.shape
    held = new.new_empty(batch, cached + tokens, heads, width).transpose(1, 2)
    held[:, :, cached:].copy_(new)
    return held


@contextlib.contextmanager
def _absorbed(layers: list[Any], new: int) -> Iterator[None]:
    """In these layers attention reads the latents themselves, as one head that all queries share (DeepSeek-V2, arXiv
    2405.04434, section 2.1.2). The projection that would expand each cached latent turns queries into latents and
    results back instead: as many FLOPs as to expand the new tokens alone."""

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


def _in_latents(query: Tensor, key: Tensor) -> Tensor:
    """The queries as wide as the keys: wider than the module has them where it reads latents."""
    return query if query.shape[-1] == key.shape[-1] else query.new_empty(*query.shape[:-1], key.shape[-1])


def _as_values(out: Tensor, module: Any, value: Tensor) -> Tensor:
    """Results [B, new, heads, ...] as wide as the module's values."""
    width = getattr(module, "v_head_dim", value.shape[-1])
    return out[..., :width] if width == value.shape[-1] else out.new_empty(*out.shape[:-1], width)


def _copied(cached: int, new: Tensor) -> Tensor:
    """transformers' own cache: at each step old and new tokens are copied together."""
    batch, heads, _, width = new.shape
    return torch.cat((new.new_empty(batch, heads, cached, width), new), dim=-2) if cached else new


def _register_paged_attention() -> None:
    modeling, masking = import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    modeling.AttentionInterface.register(PAGED, _flash_attention)
    masking.AttentionMaskInterface.register(PAGED, lambda *_, **__: None)


def _flash_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """The flash-attention library's, causal from the bottom right. q [B, heads, new, D], k and v [B, key heads, tokens,
    D]; gives [B, new, heads, D] and no weights."""
    q, k, v = (each.transpose(1, 2) for each in (_in_latents(query, key), key, value))
    window = options.get("sliding_window") or None
    size = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, True, False, scale=options.get("scaling"), **size
    )[0]
    return _as_values(out, module, value), None
