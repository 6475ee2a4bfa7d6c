"""Python code of torch that asks for the device type: fast paths, checkpointing, int8 products, optimizers and gradient
clipping.

Works around: tests of `device.type` for "cuda" or for a list of types, which meta tensors fail.
Until: tensors without memory can call their device cuda on a torch without CUDA.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import private


def install_mha(scope: Emulation) -> None:
    """Let nn.MultiheadAttention and nn.TransformerEncoderLayer take their one-op inference path.

    They accept the devices cpu, cuda and the renamed private backend. The private backend is named "meta" here; torch
    reads that name only for this path and where it accepts meta in any case.
    """
    scope.patch_private(private.THIRD_DEVICE, "meta")

    def mask_is_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        scope.note(
            "nn.TransformerEncoder with a padding mask: padding is computed too (nested tensors do not run here)"
        )
        return False

    scope.kernel("aten::_nested_tensor_from_mask_left_aligned", mask_is_left_aligned, "Meta")


def install_checkpoint(scope: Emulation) -> None:
    """Save and restore CUDA's autocast state around recomputation; meta has none."""
    infer = private.INFER_DEVICE_TYPE.value

    def infer_device_type(*args: Any) -> str:
        device_type: str = infer(*args)
        return "cuda" if device_type == "meta" else device_type

    scope.patch_private(private.INFER_DEVICE_TYPE, infer_device_type)


def install_int8_products(scope: Emulation) -> None:
    """`out_dtype` multiplies int8 matrices as int8 on CUDA, as int32 elsewhere. Eager or traced by the compiler."""
    on_cuda = private.IS_INT_MM.value

    def is_int_mm(op: Any, output_dtype: torch.dtype, args: Sequence[Any]) -> bool:
        is_product = op is torch.ops.aten.mm.default and output_dtype is torch.int32 and len(args) == 2
        if is_product and all(arg.is_meta and arg.dtype is torch.int8 for arg in args):
            return True
        return bool(on_cuda(op, output_dtype, args))

    scope.patch_private(private.IS_INT_MM, is_int_mm)


def install_optimizers(scope: Emulation) -> None:
    """foreach kernels by default, `fused` and `capturable` allowed: add "meta" to the lists of devices that have them.
    Each optimizer module has its own reference to the functions that return these."""
    lists = {name.attribute for name in private.NAMES[private.FOREACH]}
    modules = [sys.modules[name] for name in _optimizer_modules() if name in sys.modules]
    for module in (private.FOREACH_DEVICES.owner, *modules):
        for name in lists & vars(module).keys():
            scope.patch(module, name, _with_meta(getattr(module, name)))


@functools.cache
def _optimizer_modules() -> tuple[str, ...]:
    return tuple(f"torch.optim.{found.name}" for found in pkgutil.iter_modules(torch.optim.__path__))


def _with_meta(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    # TorchScript, which compiles torch.distributed.optim, reads the source of the original, and `torch` in this file.
    @functools.wraps(devices)
    def supported_devices(*args: Any, **kwargs: Any) -> list[str]:
        return [*devices(*args, **kwargs), "meta"]

    return supported_devices
