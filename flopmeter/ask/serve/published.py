"""The formats in which weights are published, and what the config of a model says of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class WeightFormat(NamedTuple):
    """How the weights of products are kept."""

    bits: float  # of one weight, its share of a scale included
    product: str | None  # the type in which a device multiplies, if it can; None: weights are unpacked in the kernel
    what: str


def in_groups(size: int, *, has_zeros: bool = False) -> WeightFormat:
    """4 bits, and for each group of that many weights a scale, perhaps with a zero point of 4 bits (GPTQ, AWQ)."""
    scale = "a 16-bit scale and a zero point" if has_zeros else "a 16-bit scale"
    bits = 4 + (16 + 4 * has_zeros) / size
    return WeightFormat(bits, None, f"{scale} for {size} weights, unpacked in the product")


WEIGHTS = {
    "bf16": WeightFormat(16, None, "as the model has them"),
    "fp8": WeightFormat(8, "fp8", "products in fp8, activations quantised in the kernel before"),
    "int8": WeightFormat(8, "int8", "products in int8, activations quantised in the kernel before"),
    "int4": in_groups(128),
    "mxfp4": WeightFormat(4 + 8 / 32, None, "an 8-bit scale for 32 weights (OCP MX), unpacked in the product"),
    "nvfp4": WeightFormat(4 + 8 / 16, "fp4", "an 8-bit scale for 16 numbers, products in fp4, activations alike"),
}
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")  # of a quantization_config
_OF_METHODS = {
    "mxfp4": "mxfp4", "nvfp4": "nvfp4", "fp8": "fp8", "fbgemm_fp8": "fp8", "gptq": "int4", "awq": "int4",
    "auto-round": "int4",
}  # fmt: skip
_OF_GROUPS = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "fp8"}
"""By type and bits of the weights of a group of modules, as compressed-tensors and ModelOpt write it."""
KV_BYTES = {"bf16": 2.0, "fp8": 1.0}  # of an element of the cache
_OF_FP4_GROUPS = {16: "nvfp4", 32: "mxfp4"}  # by the numbers that share a scale


class Quantised(NamedTuple):
    """What a config says of the weights that were published with it."""

    weights: str | None  # of WEIGHTS; None: it says nothing, or something else
    kept: tuple[str, ...]  # modules whose weights are as they were
    form: WeightFormat | None = None  # if it says more of it than WEIGHTS has
    only: tuple[str, ...] = ()  # modules of which alone the weights are so; none: of all
    unknown: str | None = None  # a way of quantising that is none of WEIGHTS
    kv: str | None = None  # the cache, of KV_BYTES; None: it says nothing, or something else
    unknown_kv: str | None = None  # a format of the cache that is none of KV_BYTES
    block: int = 0  # rows and columns of weights that share a scale; 0: it says none
    head: str = "lm_head"  # the path of what scores the vocabulary; it stays as it is, like embeddings and norms

    def format_of(self, weights: str) -> WeightFormat:
        return self.form if self.form is not None and weights == self.weights else WEIGHTS[weights]

    def is_kept(self, module: str) -> bool:
        """Whether the weights of the module of this path, which begins with the model's class, are as they were."""
        if module.partition(".")[2] == self.head:
            return True
        paths = list(_names(module.split(".")[1:]))
        return _names_any(self.kept, paths) or (bool(self.only) and not _names_any(self.only, paths))


def _names(parts: list[str]) -> Iterable[str]:
    """How a config may name a module, or one around it: by the whole path, or by its end. Experts that transformers
    holds together were published one by one."""
    if parts and parts[-1] == "experts":
        parts = [*parts, "0", "gate_proj"]
    for end in range(1, len(parts) + 1):
        yield from (".".join(parts[start:end]) for start in range(end))


def _names_any(patterns: Iterable[str], paths: list[str]) -> bool:
    """Whether one of the patterns, with stars or regular expressions after "re:", is one of the paths."""
    return any(
        re.match(each.removeprefix("re:"), path) if each.startswith("re:") else fnmatchcase(path, each)
        for each in patterns
        for path in paths
    )


NOTHING_KEPT = Quantised(None, ())


def quantised(config: Any) -> Quantised:
    """What the `quantization_config` of a config of transformers says."""
    own = getattr(config, "quantization_config", None) or {}
    facts = own if isinstance(own, dict) else own.to_dict()
    kept = _in_language(next((facts[name] for name in _LEFT_OUT if facts.get(name)), ()))
    cache = _cache_format(facts)
    kv, unknown_kv = (cache, None) if cache in KV_BYTES else (None, cache)
    block = max(facts.get("weight_block_size") or [0])
    return _of_weights(facts, kept)._replace(kv=kv, unknown_kv=unknown_kv, block=block)


def _cache_format(facts: Mapping[str, Any]) -> str | None:
    """The format of the cache, by the scheme of compressed-tensors and ModelOpt, or the name in ModelOpt's own file.
    Engines take it unless they are told another one."""
    if scheme := facts.get("kv_cache_scheme"):
        bits, kind = scheme.get("num_bits"), scheme.get("type", "int")
        return "fp8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits"
    name = facts.get("kv_cache_quant_algo")
    return str(name).lower() if name else None


def _of_weights(facts: Mapping[str, Any], kept: tuple[str, ...]) -> Quantised:
    if facts.get("config_groups"):
        return _of_groups(facts)._replace(kept=kept)
    method = facts.get("quant_method")
    weights, group = _OF_METHODS.get(str(method)), facts.get("group_size") or 0
    if weights == "int4" and facts.get("bits", 4) != 4:
        return Quantised(None, kept, unknown=f"{method} of {facts['bits']} bits")
    has_zeros = facts.get("zero_point") or facts.get("sym") is False
    form = in_groups(group, has_zeros=bool(has_zeros)) if weights == "int4" and group > 0 else None
    return Quantised(weights, kept, form, unknown=method if weights is None else None)


def _of_groups(facts: Mapping[str, Any]) -> Quantised:
    """What groups of modules say, each with how its weights and perhaps its inputs are quantised."""
    groups = list(facts["config_groups"].values())
    found = {_format_of_group(each) for each in groups}
    weights, form = found.pop()
    if weights is None or found:
        return Quantised(None, (), unknown=f"{facts.get('quant_method')} of {len(groups)} groups of modules")
    targets = [name for each in groups for name in each.get("targets") or ()]
    are_paths = all("." in name or name.startswith("re:") for name in targets)  # else the names of classes: "Linear"
    return Quantised(weights, (), form, _in_language(targets) if are_paths else ())


def _format_of_group(group: Mapping[str, Any]) -> tuple[str | None, WeightFormat | None]:
    facts = group.get("weights") or {}
    size, bits, kind = facts.get("group_size") or 0, facts.get("num_bits") or 0, str(facts.get("type", "int"))
    weights = _OF_FP4_GROUPS.get(size) if (kind, bits) == ("float", 4) else _OF_GROUPS.get((kind, bits))
    if weights == "int4":
        return weights, in_groups(size, has_zeros=facts.get("symmetric") is False) if size > 0 else None
    if weights is None or group.get("input_activations"):
        return weights, None
    return weights, WEIGHTS[weights]._replace(product=None, what="unpacked in the product")


def _in_language(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(re.sub(r"language_model\\?\.", "", name) for name in names)
