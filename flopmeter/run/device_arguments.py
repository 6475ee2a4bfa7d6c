"""The functions of torch that take a device by keyword."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flopmeter.torch_names.private import all_schemas

_OWN = ("to", "cuda", "type", "pin_memory", "is_pinned", "Generator")  # flopmeter.run.device has a patch for each


def functions_with_device() -> Iterator[tuple[Any, str]]:
    """The functions of torch and the methods of its tensors that have a keyword `device`."""
    names = {op.partition(".")[0] for op in _ops_with_device()}
    for name in sorted((names | {"tensor", "as_tensor", "asarray", "sparse_coo_tensor", "range"}) - set(_OWN)):
        if callable(getattr(torch, name, None)) and not name.startswith("_"):
            yield torch, name
        if hasattr(Tensor, name) and not name.startswith("_"):
            yield Tensor, name
    yield Tensor, "new_tensor"
    yield torch.fft, "fftfreq"
    yield torch.fft, "rfftfreq"
    yield torch.nested, "nested_tensor"
    yield torch.nested, "as_nested_tensor"


def _ops_with_device() -> Iterator[str]:
    for schema in all_schemas():
        if schema.name.startswith("aten::") and any(argument.name == "device" for argument in schema.arguments):
            yield schema.name.removeprefix("aten::")
