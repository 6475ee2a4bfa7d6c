"""Optimizers and gradient clipping: foreach kernels by default, and `fused` and `capturable` allowed, as on CUDA.

Works around: torch's lists of the device types that have these kernels, which lack meta.
Until: tensors without memory can call their device cuda on a torch without CUDA.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from flopmeter.as_cuda.scope import Scope
from flopmeter.torch_names import private


def install(scope: Scope) -> None:
    """Add "meta" to the lists of devices. Each optimizer module has its own reference to the functions that return
    them."""
    lists = {name.attribute for name in private.NAMES[private.FOREACH]}
    modules = [sys.modules[name] for name in _optimizer_modules() if name in sys.modules]
    for module in (private.FOREACH_DEVICES.owner, *modules):
        for name in lists & vars(module).keys():
            scope.patch(module, name, _with_meta(getattr(module, name)))


@functools.cache
def _optimizer_modules() -> tuple[str, ...]:
    return tuple(f"torch.optim.{found.name}" for found in pkgutil.iter_modules(torch.optim.__path__))


def _with_meta(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(devices)  # TorchScript, which compiles torch.distributed.optim, reads the source of the original
    def supported_devices(*args: Any, **kwargs: Any) -> list[str]:
        return [*devices(*args, **kwargs), "meta"]

    return supported_devices
