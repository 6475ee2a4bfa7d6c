"""Python code of torch that asks for the device type: fast paths, checkpointing.

Works around: tests of `device.type` for "cuda" or for a list of types, which meta tensors fail.
Until: tensors without memory can call their device cuda on a torch without CUDA.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flopmeter.as_cuda.scope import Scope
from flopmeter.torch_names import private


def install_mha(scope: Scope) -> None:
    """Let nn.MultiheadAttention and nn.TransformerEncoderLayer take their one-op inference path.

    They accept the devices cpu, cuda and the renamed private backend. The private backend is named "meta" here; torch
    reads that name only for this path and where it accepts meta in any case.
    """
    scope.patch_private(private.THIRD_DEVICE, "meta")

    def mask_is_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        scope.note("nn.TransformerEncoder with a padding mask: its values are not known, so no padding was left out")
        return False

    scope.kernel("aten::_nested_tensor_from_mask_left_aligned", mask_is_left_aligned, "Meta")


def install_checkpoint(scope: Scope) -> None:
    """Save and restore CUDA's autocast state around recomputation; meta has none."""
    infer = private.INFER_DEVICE_TYPE.value

    def infer_device_type(*args: Any) -> str:
        device_type: str = infer(*args)
        return "cuda" if device_type == "meta" else device_type

    scope.patch_private(private.INFER_DEVICE_TYPE, infer_device_type)
