"""The config of the causal language model that a target names."""

from __future__ import annotations

import copy
from collections.abc import Collection
from importlib import import_module
from typing import Any

from flopmeter.ask.serve.cache import ServingError
from flopmeter.models.hubs import config_of_llama, hub_config
from flopmeter.models.llama import LLAMAS


def config_of(target: Any) -> Any:
    """A config of transformers that the caller may change. Raises ServingError where the target has none."""
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


def causal_config(given: Any) -> Any:
    """The config of the causal language model, which names its class. Raises ServingError where there is none."""
    if getattr(given, "is_encoder_decoder", False):
        raise ServingError(
            f"{given.model_type} is an encoder and a decoder that reads what it makes, for which there is no step of a"
            " server here: take a causal language model"
        )
    config = _language_of(given)
    needed = ("num_hidden_layers", "hidden_size", "vocab_size")
    missing = [name for name in needed if name not in layer_attributes(config) and not getattr(config, name, None)]
    if missing:
        raise ServingError(
            f"{type(config).__name__}: a config to serve has {', '.join(needed)}; this one lacks {', '.join(missing)}"
        )
    _check_decodes(config)
    if not any("CausalLM" in name or "LMHead" in name for name in getattr(config, "architectures", None) or ()):
        config.architectures = _causal_classes(config, is_part=config is not given)
    return config


def _check_decodes(config: Any) -> None:
    """Raises ServingError for an encoder, also where the config names its class with a head: transformers masks no
    later token in it and keeps no cache, unless the config says that it is a decoder."""
    known = import_module("transformers.models.auto.modeling_auto")
    if config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        otherwise = ", or a config with is_decoder=True" if hasattr(config, "is_decoder") else ""
        raise ServingError(
            f"{config.model_type} is an encoder, which makes no text token by token: take a causal language model"
            + otherwise
        )


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
    if config.model_type in names:
        return [str(names[config.model_type])]
    if is_part and config.model_type in known.MODEL_MAPPING_NAMES:
        return None
    if own := _class_that_takes(config):
        return [own]
    raise ServingError(f"transformers has no causal language model of type {config.model_type!r} to serve")


def _class_that_takes(config: Any) -> str | None:
    """The language model of a config whose type is in none of transformers' lists, such as that of Emu3 or Qwen3-Omni:
    with its head where there is such a class, else the base model."""
    transformers = import_module("transformers")
    classes = vars(import_module(type(config).__module__.replace(".configuration_", ".modeling_")))
    names = [name for name, each in classes.items() if getattr(each, "config_class", None) is type(config)]
    known = [name for name in names if hasattr(transformers, name) and "Encoder" not in name]
    return next((name for ending in ("ForCausalLM", "TextModel") for name in known if name.endswith(ending)), None)


def layer_attributes(config: Any) -> Collection[str]:
    """The attributes in which the layers of a config differ; nothing where transformers has no such configs."""
    return getattr(config, "per_layer_attributes", None) or ()
