"""The model that is planned: how it is made, which of its modules are its layers, and how each can be split."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flopmeter.ask.alike import likenesses, lists_of_layers
from flopmeter.ask.plan.experts import experts_of
from flopmeter.ask.plan.fp8 import in_fp8
from flopmeter.ask.plan.splits import PlanError
from flopmeter.ask.plan.styles import styles_of_transformers
from flopmeter.known_values.twins import on_meta
from flopmeter.meter import FlopMeter
from flopmeter.models import BUILTINS, Trainable
from flopmeter.models.gpt2 import GPT2, GPT2Config
from flopmeter.models.hub_inputs import TargetError, token_ids
from flopmeter.models.hubs import hub_config, model_of
from flopmeter.models.layers import next_token_loss
from flopmeter.models.llama import Llama, LlamaConfig
from flopmeter.torch_names.private import COMPILED_CALL

Loss = Callable[[nn.Module, Tensor], Tensor]  # of a model and token ids [batch, length]: the scalar that is trained
Styles = Mapping[str, Any]  # torch's parallel styles by the names of modules, in which * stands for any part
PROBED_TOKENS = 64  # in a run that only asks which layers run
LEAST_PART = 0.1  # of the layers' parameters, that a list beside theirs must have to be a part of them
ANY_HEADS = 1024  # for a model whose heads are not known: they limit nothing
_BY_CONFIG: dict[type, Callable[[Any], nn.Module]] = {LlamaConfig: Llama, GPT2Config: GPT2}


class Subject(NamedTuple):
    """A language model to split."""

    make: Callable[[], nn.Module]  # the whole model
    name: str
    layers: str  # the list that they are in, by its name in the model, such as 'model.layers'
    kinds: tuple[int, ...]  # of each layer: the first layer that is like it
    heads: int | None  # that tensor parallelism may divide; None: the model has no plan for it
    styles: Styles | None
    loss: Loss
    parameters: int
    trained: int  # of these
    longest: int | None  # tokens of a sequence that its config allows; None: it does not say
    has_experts: bool
    experts: int | None  # of each layer that has some; None: none that can be split over ranks
    is_compiled: bool  # by the program, layer by layer
    fp8: bool = False  # products of linear layers; see fp8.py

    def model(self, layers: list[int] | None = None) -> nn.Module:
        """The model on meta, with only these layers; None: with all."""
        model = _on_meta(self.make) if layers is None else copy.deepcopy(_cut(self.make, self.layers, tuple(layers)))
        if self.fp8:
            in_fp8(self.layers_of(model))
        return model

    def layers_of(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule(self.layers).children())

    def tensor_parallel(self, model: nn.Module) -> Styles:
        """torch's styles for `parallelize_module`."""
        if self.styles is not None:
            return self.styles
        own = getattr(model, "tensor_parallel", None)
        return own() if callable(own) else styles_of_transformers(model)


def subject_of(build: Any, styles: Styles | None = None, loss: Loss | None = None, fp8: bool = False) -> Subject:
    """The model that `build` stands for. Raises PlanError, or TargetError where transformers is missing or knows no
    such type.

    build: the name of a built-in model, 'hf:TYPE', 'hf:CONFIG.json', a config of transformers or of flopmeter.models, a
        module on meta, or a function without arguments that makes the model.
    """
    make = _maker(build)
    model = _on_meta(make)
    train = loss or _loss_of(model)
    layers = _layers_that_run(model, train)
    blocks = list(model.get_submodule(layers).children())
    config = getattr(model, "config", None)
    kinds = likenesses(blocks, config)
    counts = {module.num_experts for module in experts_of(model)}
    subject = Subject(
        make=make,
        name=_named(build, model),
        layers=layers,
        kinds=tuple(kinds.index(kind) for kind in kinds),
        heads=None,
        styles=styles,
        loss=train,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        longest=_first_number(config, _LENGTHS),
        has_experts=any("experts" in name.split(".") for name, _ in model.named_modules()),
        experts=gcd(*counts) or None,
        is_compiled=any(getattr(block, COMPILED_CALL, None) for block in blocks),
        fp8=fp8,
    )
    return subject._replace(
        heads=(_first_number(config, _HEADS) or ANY_HEADS) if subject.tensor_parallel(model) else None
    )


def tokens_of(model: nn.Module, batch: int, length: int) -> Tensor:
    """Token ids on meta. Models of transformers ask whether one of them is padding, so that theirs are known."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    if hasattr(text, "vocab_size"):
        return on_meta(token_ids(config, batch, length))
    return torch.empty(batch, length, dtype=torch.long, device="meta")


def _layers_that_run(model: nn.Module, loss: Loss) -> str:
    """The largest list of layers that run on token ids: next to that of a language model may be one that reads images.
    Raises PlanError where there is none, or where a layer has parts in several lists."""
    sizes = lists_of_layers(model)
    if not sizes:
        raise PlanError(f"{type(model).__name__} has no ModuleList of layers, which plan could split")
    chosen = next(iter(sizes))
    if len(sizes) > 1:
        ran = _lists_that_run(model, sizes, loss)
        chosen = next((name for name in sizes if name in ran), chosen)
    holder, count = chosen.rpartition(".")[0], len(list(model.get_submodule(chosen).children()))
    for name, size in sizes.items():
        is_beside = name != chosen and name.rpartition(".")[0] == holder
        if is_beside and size > LEAST_PART * sizes[chosen] and len(list(model.get_submodule(name).children())) == count:
            raise PlanError(
                f"the layers of {type(model).__name__} are parts in several lists ({chosen}, {name}): plan takes models"
                " that have one list of whole layers"
            )
    return chosen


def _lists_that_run(model: nn.Module, lists: Iterable[str], loss: Loss) -> set[str]:
    """Those of the lists of which a module runs in a forward pass; none where the model does not run."""
    ran = set[str]()
    with ExitStack() as undo:
        for name in lists:
            for module in model.get_submodule(name).children():
                undo.enter_context(module.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
        with suppress(Exception), torch.no_grad(), FlopMeter(routing="balanced", checks="hold"):
            loss(model, tokens_of(model, 1, PROBED_TOKENS))
    return ran


def _maker(build: Any) -> Callable[[], nn.Module]:
    if isinstance(build, str):
        if build.startswith("hf:"):
            return partial(_of_config, _causal(hub_config(build.removeprefix("hf:"))))
        if build in BUILTINS:
            return partial(_builtin, build)
        raise PlanError(f"{build!r} is no model: give {', '.join(BUILTINS)}, hf:TYPE or hf:CONFIG.json")
    for config, make in _BY_CONFIG.items():
        if isinstance(build, config):
            return partial(make, build)
    if hasattr(build, "get_text_config"):
        return partial(_of_config, _causal(copy.deepcopy(build)))
    if isinstance(build, nn.Module):
        return partial(copy.deepcopy, build)
    if callable(build):
        return partial(build)  # which has a hash, as objects that can be called need not
    raise PlanError(
        f"plan takes a model's name, a config, a module or a function that makes the model, not {type(build).__name__}"
    )


def _of_config(config: Any) -> nn.Module:
    """A model with a config of its own, which `_tell_config` changes. Raises TargetError where transformers makes
    none."""
    try:
        model: nn.Module = model_of(copy.deepcopy(config), torch.float32)
    except Exception as error:
        named = next(iter(config.architectures), config.model_type)
        raise TargetError(f"{named} of transformers cannot be built ({in_words(error)})") from error
    return model


def in_words(error: Exception) -> str:
    """An error of somebody else's code in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _builtin(name: str) -> nn.Module:
    model, _ = BUILTINS[name](dtype=torch.float32)
    return model


def _causal(config: Any) -> Any:
    """The language model of the config's type, if the config names no class."""
    if not getattr(config, "architectures", None):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise TargetError(f"transformers has no causal language model of type {config.model_type}")
        config.architectures = [name]
    return _taken_by(config.architectures[0], config)


def _taken_by(architecture: str, config: Any) -> Any:
    """The config, or its part for the language model where the class takes that, as those of Qwen3.5 and Gemma 4."""
    import transformers

    taken = getattr(getattr(transformers, architecture, None), "config_class", None)
    part = config.get_text_config(decoder=True)
    if part is config or type(part) is not taken:
        return config
    part.architectures = [architecture]
    return part


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = make()
    if not isinstance(model, nn.Module):
        raise PlanError(f"the function has to make a torch module; it made a {type(model).__name__}")
    return model


def _named(build: Any, model: nn.Module) -> str:
    name: str = build if isinstance(build, str) else type(model).__name__
    return name.removeprefix("hf:")


@lru_cache(maxsize=1)
def _cut(make: Callable[[], nn.Module], path: str, layers: tuple[int, ...]) -> nn.Module:
    """The model with only these of the layers at that path. To make a hundred takes longer than to meter two."""
    model = _on_meta(make)
    holder, _, name = path.rpartition(".")
    whole = model.get_submodule(path)
    every = list(whole.children())
    setattr(model.get_submodule(holder), name, _like(whole, [copy.deepcopy(every[index]) for index in layers]))
    _tell_config(model, layers)
    return model


def _like(whole: nn.Module, kept: list[nn.Module]) -> nn.Module:
    if isinstance(whole, nn.ModuleDict):
        return nn.ModuleDict({str(place): layer for place, layer in enumerate(kept)})
    return nn.ModuleList(kept)


def _tell_config(model: nn.Module, layers: Sequence[int]) -> None:
    """Tells the config which layers are left: models of transformers go by its numbers and kinds of layers."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        text = config.get_text_config()
        if getattr(text, "layer_types", None):
            _set_kinds(text, [text.layer_types[index] for index in layers])
        if not getattr(text, "hidden_size_per_layer_input", None):  # else inputs of all layers are made at once
            text.num_hidden_layers = len(layers)


def _set_kinds(config: Any, kinds: list[str]) -> None:
    """Sets the kinds of layers, also where the config derives them from other fields, such as Jamba's period."""
    try:
        config.layer_types = kinds
    except AttributeError:  # a property without a setter
        own = type(config)
        name = own.attribute_map.get("layer_types", "layer_types")
        config.__class__ = type(own.__name__, (own,), {name: kinds})


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these fields that the config has."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((number for name in names if isinstance(number := getattr(text, name, None), int)), None)


_HEADS = ("num_key_value_heads", "num_attention_heads", "kv_heads", "heads")  # those of keys and values first
_LENGTHS = ("max_position_embeddings", "positions", "block_size", "max_seq_len")  # the last two: nanoGPT, torchtitan


def _loss_of(model: nn.Module) -> Loss:
    if hasattr(model, "prepare_inputs_for_generation"):
        return _transformers_loss
    if not isinstance(model, Trainable):
        return _logits_loss
    try:
        inspect.signature(model.loss).bind("tokens")
    except TypeError:
        raise PlanError(
            f"{type(model).__name__}.loss does not take token ids alone: plan takes language models (or loss=, a "
            "function of the model and token ids)"
        ) from None
    return _own_loss


def _transformers_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _own_loss(model: Any, tokens: Tensor) -> Tensor:
    return model.loss(tokens)


def _logits_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return next_token_loss(model(tokens), tokens)
