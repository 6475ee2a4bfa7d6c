"""pynvml (nvidia-ml-py): what scripts read of the driver, answered as torch.cuda answers it in the run.

No GPU runs, so utilization and power are those of an idle one. Memory is that of the allocator's model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flopmeter.run.shims.kernel import named


class NVMLError(Exception):
    """What the driver's library raises."""


class _MemoryInfo(NamedTuple):
    total: int  # bytes, as are the others
    free: int
    used: int


class _HowBusy(NamedTuple):
    gpu: int  # %
    memory: int


def nvmlInit() -> None: ...  # noqa: N802


def nvmlShutdown() -> None: ...  # noqa: N802


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return torch.cuda.device_count()


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    if not 0 <= index < torch.cuda.device_count():
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    return torch.cuda.get_device_name(handle)


def nvmlDeviceGetMemoryInfo(handle: int) -> _MemoryInfo:  # noqa: N802
    free, total = torch.cuda.mem_get_info(handle)
    return _MemoryInfo(total, free, total - free)


def nvmlDeviceGetPowerUsage(handle: int) -> int:  # noqa: N802
    """Milliwatts."""
    return torch.cuda.power_draw(handle)


def nvmlDeviceGetUtilizationRates(handle: int) -> _HowBusy:  # noqa: N802
    return _HowBusy(torch.cuda.utilization(handle), torch.cuda.memory_usage(handle))


MODULES = {
    "pynvml": named(
        NVMLError, nvmlInit, nvmlShutdown, nvmlDeviceGetCount, nvmlDeviceGetHandleByIndex, nvmlDeviceGetName,
        nvmlDeviceGetMemoryInfo, nvmlDeviceGetPowerUsage, nvmlDeviceGetUtilizationRates,
    )
}  # fmt: skip
