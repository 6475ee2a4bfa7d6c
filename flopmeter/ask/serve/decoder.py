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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from flopmeter.ask.alike import lists_of_layers
from flopmeter.ask.serve.cache import CacheKind, KeptLayer, ServingError, empty_cache, filled_cache, kept_in
from flopmeter.ask.serve.engine import choose_tokens, pack
from flopmeter.ask.serve.headed import Headed
from flopmeter.ask.serve.language_config import causal_config, config_of
from flopmeter.ask.serve.linear_attention import MOST_STEPPED_TOKENS, with_kernels
from flopmeter.ask.serve.paged_attention import PAGED, reading_latents, register_paged_attention
from flopmeter.ask.serve.picked_experts import pick_experts
from flopmeter.ask.serve.shorter import Shorter
from flopmeter.ask.serve.spread_experts import SpreadExperts, spread_experts
from flopmeter.ask.serve.tensor_parallel import (
    MOST_COPIED,
    Summed,
    counting_runs,
    distinct_parameters,
    keep_width_of_heads,
    numbers_in_layers,
    running,
    split_config,
    summed_in_blocks,
    unsplit_block,
)
from flopmeter.known_values.assumptions import DataDependentError
from flopmeter.launch.grouped_matmul import in_one_kernel, is_grouped
from flopmeter.meter import FlopMeter
from flopmeter.models.hub_inputs import TargetError
from flopmeter.models.hubs import model_of
from flopmeter.records import Kernel
from flopmeter.records.dtypes import name_of
from flopmeter.torch_names.operators import aten

MOST_DECODED_TOKENS = 16  # of each sequence in a step of decoding, with a draft; more are a chunk of a prompt


@dataclass(frozen=True, eq=False)
class Decoder:
    """One rank's share of a causal language model."""

    model: Any  # of transformers, on meta
    config: Any
    cache: CacheKind
    ranks: int
    summed: tuple[Summed, ...] = ()  # by the ranks
    part_of: str | None = None  # the type of a model of images or sound, of which this is the language model
    spread: tuple[SpreadExperts, ...] = ()  # of each layer whose experts are spread over GPUs
    shorter: Shorter[Decoder] | None = (
        None  # models with fewer layers, whose steps tell those of all; None: of such a model
    )

    @property
    def title(self) -> str:
        return type(self._language).__name__

    @property
    def _language(self) -> Any:
        return self.model.language if isinstance(self.model, Headed) else self.model

    @functools.cached_property
    def head(self) -> str:
        """The path of the module that scores the vocabulary."""
        own = self.model.get_output_embeddings()
        return next(name for name, module in self.model.named_modules() if module is own)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of this rank's weights, as the model keeps them; tied weights count once."""
        return sum(tensor.nbytes for tensor in distinct_parameters(self.model))

    @functools.cached_property
    def all_reduces(self) -> tuple[int, ...]:
        """Of a step, each with how many numbers of a token the ranks add up."""
        blocks = {each.block for each in self.summed}
        with counting_runs(self.model, blocks) as runs:
            self._first_step(empty_cache(self.config, self.cache))
        return tuple(each.size for each in self.summed for _ in range(max(1, runs[each.block])))

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

    @property
    def picks(self) -> list[int]:
        """How many experts of a layer a token picks, each number once; configs have many names for it."""
        if self.spread:
            return sorted({each.picks for each in self.spread})
        return sorted({kernel.op.call.outputs[0].shape[0] for kernel in self._after_a_step[2] if is_grouped(kernel)})

    @property
    def idle_parts(self) -> dict[str, int]:
        """Bytes of modules with lists of layers of which a step runs none, as of those that read images, by path."""
        top = type(self.model).__name__
        ran = {kernel.op.module for kernel in self._after_a_step[2]}

        def runs(path: str) -> bool:
            return any(module.startswith(f"{top}.{path}.") for module in ran)

        idle = dict.fromkeys(
            next(path for path in _and_around(name) if not runs(path))
            for name in lists_of_layers(self.model)
            if not runs(name)
        )
        return {path: sum(each.nbytes for each in self.model.get_submodule(path).parameters()) for path in idle}

    @functools.cached_property
    def _after_a_step(self) -> tuple[tuple[KeptLayer, ...], Any, Sequence[Kernel]]:
        """What each layer keeps, as a step of one token shows, the cache after it (models that run layers in a loop
        add a layer to it for each turn), and the step's kernels."""
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
        return kept, cache, kernels

    def _first_step(self, cache: Any, new: int = 1) -> Sequence[Kernel]:
        what = f"{self.title} of transformers does not run as a server runs it"
        at: list[str] = []  # the modules that are running, where the model is split
        if self.ranks > 1:
            what += f" when it is split over {self.ranks} GPUs by its config"
        with _in_one_line(what, at), running(self.model, at) if self.ranks > 1 else contextlib.nullcontext():
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
        of_device = (each for each in kernels if any(spec.device != "cpu" for spec in each.op.call.inputs))
        stops = sum(kernel.cost.blocks_host for kernel in of_device)  # what is sent there stops nobody for long
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
        """The attention that transformers chooses for the model by itself."""
        return "sdpa" if getattr(self._language, "_supports_sdpa", True) else "eager"

    @property
    def _latent_layers(self) -> list[Any]:
        """Layers of multi-head latent attention that cache the latent."""
        return [module for module in self.model.modules() if hasattr(module, "expand_kv")]

    def step(self, batch: int, new: int, cached: int, logits: int = 1) -> Callable[[], None]:
        """A run of `new` tokens of each of `batch` sequences after `cached` ones, whose keys and values are in the
        cache. The vocabulary is scored for the last `logits` tokens."""
        kept, stepped, _ = self._after_a_step  # in any case: it refuses what no server runs
        cache = filled_cache(kept, stepped, batch, cached) if cached else empty_cache(self.config, self.cache)
        return lambda: self._run(cache, batch, new, logits)

    def _run(self, cache: Any, batch: int, new: int, logits: int) -> None:
        is_paged = self.cache == "paged"
        ids = torch.empty(batch, new, dtype=torch.long, device="meta")
        for config in (self.model.config, self.config):
            config._attn_implementation = PAGED if is_paged else self._own_attention
        on_latents = self._latent_layers if is_paged and new <= MOST_DECODED_TOKENS else []
        with torch.no_grad(), reading_latents(on_latents, new), with_kernels(self.model):
            out = self.model(input_ids=ids, use_cache=True, logits_to_keep=logits, **{self._cache_argument: cache})
            if is_paged:
                choose_tokens(out.logits)


def _and_around(path: str) -> Iterator[str]:
    """The paths of the modules around that of the path, the outermost first, and its own."""
    names = path.split(".")
    yield from (".".join(names[:depth]) for depth in range(1, len(names) + 1))


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
    given = config_of(target)
    config = causal_config(given)
    part_of = given.model_type if config is not given else None

    def build(config: Any) -> Decoder:
        return _decoder(copy.deepcopy(config), ranks, cache, expert_ranks, part_of)

    own = build(config)
    return replace(own, shorter=Shorter(own, config, build))


def _decoder(config: Any, ranks: int, cache: CacheKind, expert_ranks: int, part_of: str | None) -> Decoder:
    empty_cache(config, cache)  # refuses what cannot be served
    share = split_config(config, ranks)
    register_paged_attention()
    named = next(iter(config.architectures or ()), config.model_type)
    with _in_one_line(f"{named} of transformers cannot be built" + f" for one of {ranks} GPUs" * (ranks > 1)):
        model = _built(share)
        whole = model if ranks == 1 else _built(split_config(config, 1))
    own = Decoder(model, share, cache, ranks, part_of=part_of)
    if ranks > 1:
        keep_width_of_heads(model, whole)
        if kept := unsplit_block(model, whole):
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
    if numbers_in_layers(model, share) * ranks > MOST_COPIED * numbers_in_layers(whole, config):
        raise ServingError(f"{own.title} cannot be split over {ranks} GPUs by its config: a rank keeps too much of it")
    return replace(own, summed=summed_in_blocks(model, whole, config.hidden_size))


@contextlib.contextmanager
def _in_one_line(what: str, at: Sequence[str] = ()) -> Iterator[None]:
    """Errors of transformers become one line. `at`: the modules that are running; a split model runs in some."""
    try:
        yield
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ServingError | TargetError | DataDependentError):
            raise
        why = f"({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        if isinstance(error, TypeError):
            why += ": its config may leave out a value that it needs, as the defaults of some types do"
        if at:
            what = f"{what}: {at[-1]} is not split with the rest"
            why += ": take gpus=1 (--gpus 1), or spread experts (expert_parallel=True, --expert-parallel)"
        raise ServingError(f"{what} {why}") from error


def _built(config: Any) -> Any:
    model = model_of(config)
    return Headed(model) if model.get_output_embeddings() is None else model
