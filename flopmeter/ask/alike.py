"""Which layers of a model are alike, so that one of them can stand for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Likeness = tuple[Any, ...]
"""All that decides what a layer costs; layers whose likeness is equal cost the same."""

# Types of attributes that may decide what a module runs. Floats do not: they are rates and factors.
_PLAIN = (bool, int, str, type(None))
_DEPTH = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # attributes that say how many layers there are


def list_of_layers(model: nn.Module) -> str | None:
    """The name of the list, or dictionary, of modules with the most parameters; None where there is none."""
    return next(iter(lists_of_layers(model)), None)


def lists_of_layers(model: nn.Module) -> dict[str, int]:
    """The number of parameters of each list, or dictionary, of modules, those with the most first. Lists inside of
    another one are left out."""
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList | nn.ModuleDict)}
    sizes = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in lists.items()}
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], len(name))):
        if not any(name.startswith(f"{other}.") or other.startswith(f"{name}.") for other in found):
            found[name] = sizes[name]
    return found


def likenesses(layers: Sequence[nn.Module], config: Any = None) -> list[Likeness]:
    """For each layer: its modules, their plain attributes and parameters, and its type by the config of transformers.
    Attributes that number or count the layers are left out."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    types = getattr(text, "layer_types", None) or [None] * len(layers)
    attributes = [_attributes(layer) for layer in layers]
    numbers = {
        name
        for name in set().union(*attributes)
        if all(str(of_layer.get(name, place)) == str(place) for place, of_layer in enumerate(attributes))  # True is 1
    }
    return [
        (kind, _modules(layer), frozenset((name, value) for name, value in own.items() if name not in numbers))
        for kind, layer, own in zip(types, layers, attributes, strict=False)
    ]


def _attributes(layer: nn.Module) -> dict[tuple[str, str], bool | int | str | None]:
    """By the names of modules and attributes."""
    return {
        (path, name): value
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) in _PLAIN and not name.startswith("_") and name not in _DEPTH
    }


def _modules(layer: nn.Module) -> Likeness:
    modules = tuple((path, type(module)) for path, module in layer.named_modules())
    parameters = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in layer.named_parameters()
    )
    return modules, parameters, tuple((name, tuple(each.shape)) for name, each in layer.named_buffers())
