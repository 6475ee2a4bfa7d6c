"""Models of other packages, built on meta from their config: Hugging Face transformers and timm, where installed.

Weights are never needed. A config is a file, the default of its type, or that of a model of the hub, which comes from
the cache of huggingface_hub or, if it is not there, from the network.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from torch import Tensor, nn

from flopmeter.models.hub_inputs import TargetError, inputs_of
from flopmeter.models.llama import LlamaConfig

NETWORK_PATIENCE_SECONDS = 5.0
_LABELLED = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")  # their loss takes token ids


Built = tuple[nn.Module, dict[str, Any]]


def huggingface(name: str) -> Callable[..., Built]:
    """A builder of the model of a config: NAME is the path of a config.json or of its folder, a model type such as
    'llama', or the id of a model of the hub such as 'Qwen/Qwen3-8B'.

    The class is the one that the config names (`architectures`), else the base model of its type. Raises
    TargetError where transformers is missing or the config is none that it knows.
    """
    config = hub_config(name)

    def build(batch: int = 1, seq: int | None = None, dtype: torch.dtype | None = None, train: bool = False) -> Built:
        model = model_of(config, dtype)
        inputs = inputs_of(model, config, batch, seq, dtype or _own_dtype(config))
        if train and type(model).__name__.endswith(_LABELLED):
            inputs["labels"] = inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"].clone()
        return model, inputs

    return build


def config_of_llama(own: LlamaConfig) -> Any:
    """The same model as a config of transformers. Raises TargetError where that is missing."""
    return _installed("transformers").LlamaConfig(
        num_hidden_layers=own.layers,
        hidden_size=own.width,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        intermediate_size=own.hidden,
        vocab_size=own.vocabulary,
        rms_norm_eps=own.norm_epsilon,
        max_position_embeddings=131072,  # as Llama 3.1; the built-in models take any length
        dtype="bfloat16",
    )


def model_of(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model on meta, in its config's type or in bf16."""
    with torch.device("meta"):
        model = _model_class(_installed("transformers"), config)(config)
    return model.to("meta", dtype or _own_dtype(config))  # some parameters ignore the device context


def timm_model(name: str) -> Callable[..., tuple[nn.Module, Tensor]]:
    """A builder of the timm model of that name. Raises TargetError where timm is missing or knows no such model."""
    _let_torchvision_load()
    timm = _installed("timm")
    if not timm.is_model(name):
        raise TargetError(f"timm has no model named {name!r}; near to it: {_near(name, timm.list_models())}")

    def build(
        batch: int = 1, image_size: int | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[nn.Module, Tensor]:
        with torch.device("meta"):
            model = _timm_of_size(timm, name, image_size)
        channels, height, width = model.default_cfg["input_size"]
        if image_size is not None:
            height = width = image_size
        return model.to(dtype), torch.empty(batch, channels, height, width, dtype=dtype, device="meta")

    return build


def _timm_of_size(timm: Any, name: str, image_size: int | None) -> Any:
    """A transformer is built for one size. A convolutional net takes any size, and no argument for it."""
    if image_size is not None:
        try:
            return timm.create_model(name, pretrained=False, img_size=image_size)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
    return timm.create_model(name, pretrained=False)


def _installed(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else package
        why = "is not installed" if missing == package else f"cannot be imported ({error})"
        raise TargetError(f"{package} {why}: pip install {missing.partition('.')[0]}") from error


# Ops whose shapes torchvision registers when it is imported.
_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _let_torchvision_load() -> None:
    """Declare torchvision's own ops where its library of them cannot be loaded.

    timm imports torchvision, and on Linux PyPI's torchvision is built for CUDA: beside a CPU build of torch its ops
    are missing and its import fails, although no image model calls one.
    """
    try:
        import_module("torchvision")
    except ImportError:  # timm's own import tells
        return
    except RuntimeError as error:
        if "operator torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        for schema in _TORCHVISION_OPS:
            library.define(schema)
        _declared.append(library)


_declared: list[torch.library.Library] = []  # an op exists as long as the library that declares it


def _near(name: str, known: Any) -> str:
    return ", ".join(difflib.get_close_matches(name, list(known), n=3, cutoff=0.3)) or "nothing"


def hub_config(name: str) -> Any:
    """The config of a path, a type or a hub id. Raises TargetError as `huggingface` does."""
    types = _installed("transformers").CONFIG_MAPPING
    if Path(name, "config.json").is_file():
        name = str(Path(name, "config.json"))
    if not name.endswith(".json"):
        if name in types:
            return _made(name, types[name])
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            raise TargetError(
                f"transformers knows no model type {name!r}; near to it: {_near(name, types.keys())} "
                "(or give a config.json, or OWNER/NAME of the hub)"
            )
        name = _file_of_the_hub(name)
    try:
        values = json.loads(Path(name).read_text(encoding="utf-8"), object_hook=_special_float)
        model_type = values["model_type"]
    except OSError as error:
        raise TargetError(f"{name} cannot be read: {error.strerror}") from error
    except KeyError:
        raise TargetError(f'{name} is no model config: it lacks "model_type", such as "llama"') from None
    except (ValueError, TypeError) as error:
        raise TargetError(f"{name} is no model config ({type(error).__name__}: {error})") from error
    kind = types[model_type] if model_type in types else _config_class(values)
    if kind is None:
        raise TargetError(f"{name}: transformers knows no model type {model_type!r}; a newer version may")
    return _made(name, lambda: kind.from_dict({**values, "model_type": kind.model_type}))


def _config_class(values: dict[str, Any]) -> Any:
    """The config class of the first architecture that transformers has; None where it has none of them. Some models
    name a type of their own and a known architecture, by which engines go: Kimi K2 that of DeepSeek-V3."""
    transformers = _installed("transformers")
    classes = (getattr(transformers, name, None) for name in values.get("architectures") or ())
    known = (getattr(own, "config_class", None) for own in classes)
    return next((own for own in known if own is not None), None)


def _made(name: str, make: Callable[[], Any]) -> Any:
    """Whatever a check of transformers raises becomes one line."""
    try:
        return make()
    except Exception as error:
        raise TargetError(
            f"{name}: transformers refuses this config ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


def _special_float(values: dict[str, Any]) -> Any:
    """transformers 5 saves an infinite number as {"__float__": "Infinity"}, which JSON has no other word for."""
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _file_of_the_hub(name: str) -> str:
    """The file of the config of a model of the hub: from the cache, else from the network."""
    hub = _installed("huggingface_hub")
    cached = hub.try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return cached
    try:
        if not hub.constants.HF_HUB_OFFLINE:  # the download would try for half a minute where there is no network
            urlopen(hub.constants.ENDPOINT, timeout=NETWORK_PATIENCE_SECONDS).close()
        return hub.hf_hub_download(name, "config.json")
    except OSError as error:
        raise TargetError(
            f"the config of {name} is not in the cache, and the hub does not give it ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}): save its config.json and give hf:config.json"
        ) from error


def _model_class(transformers: Any, config: Any) -> Callable[[Any], nn.Module]:
    """The class of the first architecture that the config names, else the base model's."""
    for architecture in getattr(config, "architectures", None) or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)._from_config
    return transformers.AutoModel.from_config


def _own_dtype(config: Any) -> torch.dtype:
    own = getattr(config, "dtype", None)
    return own if isinstance(own, torch.dtype) else torch.bfloat16
