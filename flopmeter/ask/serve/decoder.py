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
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, get_args

import torch
from torch import Tensor, nn

from flopmeter.ask.serve.cache import CacheKind, KeptLayer, ServingError, empty_cache, filled_cache, kept_in
from flopmeter.ask.serve.engine import choose_tokens, pack
from flopmeter.ask.serve.headed import Headed
from flopmeter.ask.serve.linear_attention import MOST_STEPPED_TOKENS, with_kernels
from flopmeter.ask.serve.picked_experts import pick_experts
from flopmeter.ask.serve.spread_experts import SpreadExperts, spread_experts
from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.launch.grouped_matmul import in_one_kernel
from flopmeter.meter import FlopMeter
from flopmeter.models.hub_inputs import TargetError
from flopmeter.models.hubs import config_of_llama, hub_config, model_of
from flopmeter.models.llama import LLAMAS
from flopmeter.records import Kernel
from flopmeter.records.dtypes import name_of
from flopmeter.torch_names.operators import aten

PAGED = "flopmeter_paged"  # the name under which transformers knows the attention below
MOST_DECODED_TOKENS = 16  # of each sequence in a step of decoding, with a draft; more are a chunk of a prompt


@dataclass(frozen=True)
class Decoder:
    """One rank's share of a causal language model."""

    model: Any  # of transformers, on meta
    config: Any
    cache: CacheKind
    ranks: int
    all_reduces: tuple[int, ...] = ()  # in a step: how many numbers of each token
    part_of: str | None = None  # the type of a model of images or sound, of which this is the language model
    spread: tuple[SpreadExperts, ...] = ()  # of each layer whose experts are spread over GPUs

    @property
    def title(self) -> str:
        return type(self._language).__name__

    @property
    def _language(self) -> Any:
        return self.model.language if isinstance(self.model, Headed) else self.model

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights, as the model keeps them; tied weights count once."""
        return sum(tensor.nbytes for tensor in _distinct(self.model))

    def kv_bytes(self, tokens: int, element_bytes: float) -> float:
        """Bytes that a sequence of that many tokens holds on this rank, in all layers. A layer with a window holds no
        more tokens than the window. Every rank holds latents whole. States have a type of their own."""
        elements = sum(min(tokens, layer.most_tokens) * layer.elements for layer in self._kept)
        return elements * element_bytes + (self.state_bytes if tokens else 0)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes that a sequence of any length holds on this rank besides keys and values."""
        return sum(state.nbytes for layer in self._kept for state in layer.states)

    @property
    def state_dtypes(self) -> list[str]:
        return sorted({name_of(state.dtype) for layer in self._kept for state in layer.states})

    def metered_kv_bytes(self, cached: int, new: int) -> float:
        """The same during a metered step of `new` tokens, in the model's type."""
        elements = sum((min(cached, layer.most_old) + new) * layer.elements for layer in self._kept)
        return float(elements * self.model.dtype.itemsize) + self.state_bytes

    @property
    def _kept(self) -> tuple[KeptLayer, ...]:
        return self._after_a_step[0]

    @functools.cached_property
    def _after_a_step(self) -> tuple[tuple[KeptLayer, ...], Any]:
        """What each layer keeps, as a step of one token shows, and the cache after it: models that run layers in a loop
        add a layer to it for each turn."""
        cache = empty_cache(self.config, self.cache)
        try:
            kernels = self._first_step(cache)
        except ServingError:
            if self.cache == "paged" and replace(self, cache="transformers")._runs():
                raise ServingError(self._no_kernels) from None
            raise
        kept = kept_in(cache)
        self._check(kept, kernels)
        has_states = any(layer.states for layer in kept)
        if has_states:
            self._check_blocks()
        elif getattr(self._language, "_is_stateful", False):
            raise ServingError(f"{self.title} of transformers keeps states beside its cache: it cannot be served here")
        return kept, cache

    def _first_step(self, cache: Any, new: int = 1) -> Sequence[Kernel]:
        split = f" when it is split over {self.ranks} GPUs by its config" * (self.ranks > 1)
        with _in_one_line(f"{self.title} of transformers does not run as a server runs it{split}"):
            with FlopMeter(routing="independent", checks="hold") as meter:
                self._run(cache, 1, new, 1)
        return in_one_kernel(meter.report().kernels)

    def _runs(self) -> bool:
        with contextlib.suppress(ServingError):
            return bool(self._first_step(empty_cache(self.config, self.cache)))
        return False

    @property
    def _no_kernels(self) -> str:
        return (
            f"transformers takes no other kernels for the attention of {self.title}, so that a paged cache cannot be"
            " read: take cache='transformers' (--cache transformers)"
        )

    def _check(self, kept: Sequence[KeptLayer], kernels: Sequence[Kernel]) -> None:
        """Raises ServingError where a step is not that of a server."""
        if not any(layer.elements or layer.states for layer in kept):
            raise ServingError(f"{self.title} keeps nothing in the cache that it is given: it cannot be served")
        has_kernel = any(kernel.op.packet is aten._flash_attention_forward for kernel in kernels)
        if self.cache == "paged" and any(layer.elements for layer in kept) and not has_kernel:
            raise ServingError(self._no_kernels)
        if self.cache == "paged" and any(map(_runs_all_experts, kernels)):
            raise ServingError(
                f"a step of {self.title} of transformers runs every expert on every token, which no server does: it"
                " cannot be served"
            )
        stops = sum(kernel.cost.blocks_host for kernel in kernels)
        if stops > self.config.num_hidden_layers:
            raise ServingError(
                f"a step of {self.title} of transformers stops the host {stops} times, as where experts run one after"
                " another, which no server does: it cannot be served"
            )

    def _check_blocks(self) -> None:
        """Raises ServingError where a prompt runs token by token."""
        few, more = 2 * MOST_STEPPED_TOKENS, 3 * MOST_STEPPED_TOKENS
        kernels = [len(self._first_step(empty_cache(self.config, self.cache), new)) for new in (few, more)]
        if kernels[1] - kernels[0] >= more - few:
            raise ServingError(
                f"transformers writes the linear attention of {self.title} out token by token, and no kernel that"
                " servers have for it is known here: it cannot be served"
            )

    @functools.cached_property
    def _cache_argument(self) -> str:
        """Models without attention have a name of their own for it; transformers 5.24 has a shorter one."""
        known = inspect.signature(self._language.forward).parameters
        for name in ("cache_params", "cache", "past_key_values"):
            if name in known:
                return name
        raise ServingError(f"{self.title} of transformers takes no cache that a server could hold: it cannot be served")

    @property
    def _own_attention(self) -> str:
        """The one that transformers takes for the model by itself."""
        return "sdpa" if getattr(self._language, "_supports_sdpa", True) else "eager"

    @property
    def _latent_layers(self) -> list[Any]:
        """Layers of multi-head latent attention that cache the latent."""
        return [module for module in self.model.modules() if hasattr(module, "expand_kv")]

    def step(self, batch: int, new: int, cached: int, logits: int = 1) -> Callable[[], None]:
        """A run of `new` tokens of each of `batch` sequences after `cached` ones, whose keys and values are in the
        cache. The vocabulary is scored for the last `logits` tokens."""
        kept, stepped = self._after_a_step  # in any case: it refuses what no server runs
        cache = filled_cache(kept, stepped, batch, cached) if cached else empty_cache(self.config, self.cache)
        return lambda: self._run(cache, batch, new, logits)

    def _run(self, cache: Any, batch: int, new: int, logits: int) -> None:
        is_paged = self.cache == "paged"
        ids = torch.empty(batch, new, dtype=torch.long, device="meta")
        for config in (self.model.config, self.config):
            config._attn_implementation = PAGED if is_paged else self._own_attention
        absorbed = self._latent_layers if is_paged and new <= MOST_DECODED_TOKENS else []
        with torch.no_grad(), _absorbed(absorbed, new), with_kernels(self.model):
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=logits, **{self._cache_argument: cache})
            if is_paged:
                choose_tokens(out.logits)


def _runs_all_experts(kernel: Kernel) -> bool:
    """Whether it multiplies by the weights of several experts, [experts, ...], whether a token picked them or not."""
    return kernel.op.packet is aten.bmm and kernel.op.module.rpartition(".")[2] == "experts"


def decoder(target: Any, ranks: int = 1, cache: CacheKind = "paged", expert_ranks: int = 1) -> Decoder:
    """The share of one of `ranks` tensor parallel ranks; or of `expert_ranks` over which experts are spread.

    target: a built-in Llama ('llama-3-8b'), 'hf:CONFIG.json' or 'hf:TYPE', a config of transformers, or a model that
        has one.
    Raises ServingError where the model is no causal language model, or cannot be split over that many ranks.
    """
    if cache not in get_args(CacheKind):
        raise ServingError(f"unknown cache {cache!r}; known: {', '.join(get_args(CacheKind))}")
    given = _config_of(target)
    config = _causal(given)
    empty_cache(config, cache)  # refuses what cannot be served
    share = _split(config, ranks)
    _register_paged_attention()
    named = next(iter(config.architectures or ()), config.model_type)
    with _in_one_line(f"{named} of transformers cannot be built" + f" for one of {ranks} GPUs" * (ranks > 1)):
        model = _built(share)
        whole = model if ranks == 1 else _built(_split(config, 1))
    own = Decoder(model, share, cache, ranks, part_of=given.model_type if config is not given else None)
    if ranks > 1:
        _keep_width_of_heads(model, whole)
        if kept := _not_split(model, whole):
            raise ServingError(
                f"{own.title} cannot be split over {ranks} GPUs by its config: each would keep all of {kept}"
            )
    if cache == "paged":
        pack(own.model)
        pick_experts(own.model)
    if expert_ranks > 1:
        return replace(own, spread=spread_experts(own.model, expert_ranks, own.title))
    if ranks == 1:
        return own
    if _in_layers(model, share) * ranks > MOST_COPIED * _in_layers(whole, config):
        raise ServingError(f"{own.title} cannot be split over {ranks} GPUs by its config: a rank keeps too much of it")
    return replace(own, all_reduces=_sums(model, whole, config.hidden_size))


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Errors of transformers become one line."""
    try:
        yield
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ServingError | TargetError | DataDependentError):
            raise
        why = f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if isinstance(error, TypeError):
            why += ": its config may leave out a value that it needs, as the defaults of some types do"
        raise ServingError(f"{what} {why}") from error


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


def _causal(given: Any) -> Any:
    """The config of the causal language model, which names its class. Raises ServingError where there is none."""
    if getattr(given, "is_encoder_decoder", False):
        raise ServingError(
            f"{given.model_type} is an encoder and a decoder that reads what it makes, for which there is no step of a"
            " server here: take a causal language model"
        )
    config = _language_of(given)
    needed = ("num_hidden_layers", "hidden_size", "vocab_size")
    missing = [name for name in needed if name not in _by_layer(config) and not getattr(config, name, None)]
    if missing:
        raise ServingError(
            f"{type(config).__name__}: a config to serve has {', '.join(needed)}; this one lacks {', '.join(missing)}"
        )
    if not any("CausalLM" in name or "LMHead" in name for name in getattr(config, "architectures", None) or ()):
        config.architectures = _causal_classes(config, is_part=config is not given)
    return config


def _language_of(config: Any) -> Any:
    """The config of the language model, where the model takes images or sound as well."""
    language = config.get_text_config(decoder=True)
    if language is not config:
        for name in ("dtype", "quantization_config", "tie_word_embeddings"):
            if getattr(language, name, None) is None and getattr(config, name, None) is not None:
                setattr(language, name, getattr(config, name))
        language.architectures = None
    return language


def _causal_classes(config: Any, is_part: bool) -> list[str] | None:
    """The class of the language model; None for a part of another model that only has the base model."""
    known = import_module("transformers.models.auto.modeling_auto")
    names = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ServingError(
            f"{config.model_type} is an encoder, which makes no text token by token: take a causal language model, or "
            "a config with is_decoder=True"
        )
    if config.model_type in names:
        return [str(names[config.model_type])]
    if is_part and config.model_type in known.MODEL_MAPPING_NAMES:
        return None
    raise ServingError(f"transformers has no causal language model of type {config.model_type!r} to serve")


def _built(config: Any) -> Any:
    model = model_of(config)
    return model if config.architectures else Headed(model)


MOST_UNSPLIT = 0.05  # of a layer without its experts: small projections lie whole on each rank in engines too
MOST_COPIED = 1.5  # all ranks together may hold this many times the model: some hold the same norms and heads
_SPLIT = (
    "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size",
    "vocab_size_per_layer_input",
    "intermediate_size_mlp", "shared_intermediate_size", "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size", "dense_intermediate_size", "prefix_dense_intermediate_size",
    "linear_num_heads", "linear_num_key_heads", "linear_num_value_heads",
    "num_heads", "mamba_n_heads", "mamba_num_heads", "mamba_n_groups", "n_groups", "mamba_d_ssm",
    "mamba_expand", "expand",
)  # fmt: skip
"""What tensor parallelism splits: heads, the width of MLPs, of each expert and of state spaces, the vocabulary."""
_SHARED = ("num_key_value_heads", "mamba_n_groups", "n_groups")  # fewer of them than ranks: several ranks have the same
_FACTORS = ("mamba_expand", "expand")  # of the width: they need not stay whole


class _Factor(float):
    """A factor with which a whole number becomes a whole number again."""

    def __mul__(self, size: float) -> float:
        product = float(self) * size
        return int(product) if isinstance(size, int) and product.is_integer() else product

    __rmul__ = __mul__


def _split(config: Any, ranks: int) -> Any:
    share = copy.deepcopy(config)
    if ranks == 1:
        return share
    by_layer = _by_layer(share)
    has_heads = getattr(share, "num_attention_heads", None) is not None
    if has_heads and "num_key_value_heads" not in by_layer and getattr(share, "num_key_value_heads", None) is None:
        share.num_key_value_heads = share.num_attention_heads
    if has_heads and "head_dim" not in by_layer and not getattr(share, "head_dim", None):
        share.head_dim = share.hidden_size // share.num_attention_heads
    if by_layer:
        share.per_layer_config = {
            place: {name: _share(name, getattr(layer, name), ranks) for name in by_layer}
            for place, layer in enumerate(share.per_layer_config)
        }
    for name in _SPLIT:
        if name not in by_layer and getattr(share, name, None):
            size = _share(name, getattr(share, name), ranks)
            if isinstance(size, float):
                vars(share)[name] = size  # past a check that it is whole
            else:
                setattr(share, name, size)
    if (getattr(share, "pad_token_id", None) or 0) >= share.vocab_size:
        share.pad_token_id = None  # another rank's
    return share


def _by_layer(config: Any) -> Collection[str]:
    """The attributes in which the layers of a config differ; nothing where transformers has no such configs."""
    return getattr(config, "per_layer_attributes", None) or ()


def _share(name: str, size: Any, ranks: int) -> Any:
    """A rank's share of a size of the config, which may be one for each layer; all of it where it is not split."""
    if name not in _SPLIT or not size:
        return size
    if isinstance(size, list):
        return [_share(name, each, ranks) for each in size]
    if name in _SHARED and ranks % size == 0:
        return 1
    if name in _FACTORS and size % ranks:
        return _Factor(size / ranks)
    if size % ranks and not name.startswith("vocab_size"):
        raise ServingError(f"{name} {size} cannot be split over {ranks} GPUs: take a divisor")
    return -(-size // ranks)


def _distinct(model: Any) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in model.parameters()}.values())


def _in_layers(model: Any, config: Any) -> int:
    """Parameters without those of the vocabulary."""
    return sum(tensor.numel() for tensor in _distinct(model) if config.vocab_size not in tensor.shape)


_BLOCK = re.compile(r".*?\.\d+\.[^.]+")  # the path of a block of a layer, at the start of a parameter's


def _keep_width_of_heads(model: Any, whole: Any) -> None:
    """Restores the width of heads. Attention whose heads are as wide as the hidden size over their number, whatever the
    config says, came out with wider heads where there are fewer of them."""
    for own, all_of_it in zip(model.modules(), whole.modules(), strict=True):
        width, wide = getattr(all_of_it, "head_dim", None), getattr(own, "head_dim", None)
        projections: list[Any] = [getattr(own, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        if width == wide or not all(type(each) is nn.Linear for each in projections):
            continue
        derived = {name: value for name, value in vars(all_of_it).items() if isinstance(value, int | float)}
        vars(own).update({name: value for name, value in derived.items() if not name.startswith("num_")})
        for layer in projections[:3]:
            layer.out_features = layer.out_features * width // wide
        projections[3].in_features = projections[3].in_features * width // wide
        for layer in projections:
            layer.weight = nn.Parameter(layer.weight.new_empty(layer.out_features, layer.in_features))
            if layer.bias is not None:
                layer.bias = nn.Parameter(layer.bias.new_empty(layer.out_features))


def _not_split(model: Any, whole: Any) -> str | None:
    """The first block of a layer, such as its attention or its MLP, in which each rank keeps every matrix whole. A
    block of one matrix, such as a router, may be whole."""
    sizes, layers = Counter[str](), Counter[str]()
    are_whole: dict[str, list[bool]] = {}
    for (name, own), all_of_it in zip(model.named_parameters(), whole.parameters(), strict=True):
        if own.ndim == 2 and (match := _BLOCK.match(name)):
            block = match.group()
            sizes[block] += own.numel()
            layers[_layer_of(block)] += own.numel()
            are_whole.setdefault(block, []).append(own.shape == all_of_it.shape)
    for block, each in are_whole.items():
        if len(each) > 1 and all(each) and sizes[block] > MOST_UNSPLIT * layers[_layer_of(block)]:
            return block
    return None


def _layer_of(block: str) -> str:
    return block.rpartition(".")[0]


def _sums(model: Any, whole: Any, width: int) -> tuple[int, ...]:
    """How many numbers of a token each sum has of which ranks have a part: one as wide as the model for each block of a
    layer with weights whose columns the ranks share, such as attention and MLP; and one of its own for a projection to
    another width, whose result the block goes on with, such as `x_proj` of Mamba (as in vLLM's MambaMixer)."""
    sums = dict[tuple[str, int], None]()
    for (name, own), all_of_it in zip(model.named_parameters(), whole.parameters(), strict=True):
        if own.ndim > 1 and own.shape[-1] < all_of_it.shape[-1] and (match := _BLOCK.match(name)):
            sums[match.group(), own.shape[0] if own.ndim == 2 else width] = None
    return tuple(size for _, size in sums)


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
    """The queries as wide as the keys: where the module reads latents, they are wider than it has them."""
    return query if query.shape[-1] == key.shape[-1] else query.new_empty(*query.shape[:-1], key.shape[-1])


def _as_values(out: Tensor, module: Any, value: Tensor) -> Tensor:
    """Results [B, new, heads, ...] as wide as the module's values."""
    width = getattr(module, "v_head_dim", value.shape[-1])
    return out[..., :width] if width == value.shape[-1] else out.new_empty(*out.shape[:-1], width)


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
