"""Which scaled matmuls torch refuses on a device: its kernels for finer scales exist for some generations only.

By aten/src/ATen/native/cuda/ScaledBlas.cpp and GroupedBlas.cpp of torch 2.10 and later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.records import Call, Kernel, TensorSpec
from flopmeter.torch_names.operators import aten

_GROUPED = aten.present("_scaled_grouped_mm", "_scaled_grouped_mm_v2")
_SCALED = (*_GROUPED, *aten.present("_scaled_mm", "_scaled_mm_v2"))
_HOPPER, _BLACKWELL = 9, 10  # majors


def check_scales(kernels: Iterable[Kernel], hardware: Hardware) -> None:
    """Raises HardwareError at the first one that torch has no kernel for. Other vendors' devices are not checked."""
    if hardware.compute_capability is None:
        return
    for kernel in kernels:
        call = kernel.op.call
        if call.func.overloadpacket in _SCALED:
            _check(call, hardware.name, hardware.compute_capability[0])


def _check(call: Call, device: str, major: int) -> None:
    scales = [*_specs(call.argument("scale_a")), *_specs(call.argument("scale_b"))]
    is_grouped = call.func.overloadpacket in _GROUPED
    if is_grouped and major not in (_HOPPER, _BLACKWELL):
        raise HardwareError(f"{device}: torch has {call.name} for compute capability 9.0 and 10.0 only")
    if any(scale.dtype is torch.float8_e8m0fnu for scale in scales) and major < _BLACKWELL:
        raise HardwareError(f"{device}: MX scales (float8_e8m0fnu) need compute capability 10.0 or more")
    if not is_grouped and any(_is_of_blocks(scale) for scale in scales) and major != _HOPPER:
        raise HardwareError(f"{device}: torch has fp32 scales of blocks of 128 for compute capability 9.0 only")


def _is_of_blocks(scale: TensorSpec) -> bool:
    """Whether a scale is for blocks: one for rows has one column."""
    return scale.dtype is torch.float32 and len(scale.shape) == 2 and min(scale.shape) > 1


def _specs(value: Any) -> tuple[TensorSpec, ...]:
    return (value,) if isinstance(value, TensorSpec) else tuple(value)
