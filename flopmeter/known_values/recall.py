"""Constants that a model keeps in buffers, such as a stride from which it computes a padding.

Works around: built on meta before the context, they have lost their values.
Until: models keep what they compute shapes from as Python numbers.

Hugging Face models restore buffers that no checkpoint holds by `model._init_weights(module)`, which is how
`from_pretrained` itself fills them. It is run on a stand-in of the module whose integer buffers are real, so that
neither weights nor version counters are touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.known_values.values import Values, is_discrete, is_small, no_modes

Initializer = Callable[[nn.Module], Any]


def recall_buffers(model: nn.Module, values: Values) -> None:
    """Make the initial values of the model's integer and bool buffers known."""
    for module, initialize in _initializers(model, None):
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        lost = {name: buffer for name, buffer in buffers.items() if _is_lost(module, name, buffer, values)}
        for name, value in _initialized(module, initialize, lost).items() if lost else ():
            values.write(lost[name], value)


def has_initializer(module: nn.Module) -> bool:
    return hasattr(type(module), "_init_weights")


def _initializers(module: nn.Module, inherited: Initializer | None) -> Iterator[tuple[nn.Module, Initializer]]:
    """Each module with the initializer of the innermost model that holds it; models may contain models."""
    initialize: Initializer | None = module._init_weights if has_initializer(module) else inherited  # type: ignore[assignment]
    if initialize is not None:
        yield module, initialize
    for child in module.children():
        yield from _initializers(child, initialize)


def _is_lost(module: nn.Module, name: str, buffer: Tensor, values: Values) -> bool:
    return (
        buffer.is_meta
        and name in module._non_persistent_buffers_set
        and is_discrete(buffer)
        and is_small(buffer)
        and not values.knows(buffer)
    )


def _initialized(module: nn.Module, initialize: Initializer, lost: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values that the initializer writes to the lost buffers."""
    stand_in = copy.copy(module)
    with no_modes(), torch.inference_mode(False), torch.no_grad():  # inference tensors do not count their versions
        real = {name: torch.empty_like(buffer, device="cpu") for name, buffer in lost.items()}
        stand_in._buffers = {**{name: _blank(buffer) for name, buffer in module._buffers.items()}, **real}
        stand_in._parameters = {name: _blank(weight) for name, weight in module._parameters.items()}  # type: ignore[misc]
        versions = {name: value._version for name, value in real.items()}
        try:
            initialize(stand_in)
        except Exception:  # the initializer is the model's code, which may need more than the copy has
            return {}
        return {name: value for name, value in real.items() if value._version != versions[name]}


def _blank(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta")
