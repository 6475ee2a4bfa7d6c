"""pynvml (nvidia-ml-py): what scripts read of the driver, answered as torch.cuda answers it in the run.

No GPU runs, so utilization and power are those of an idle one. Memory is that of the allocator's model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class nvidia_smi:  # noqa: N801
    """pynvml.smi, which versions before 12 have: all that is known of the GPUs, whatever the filter asks for."""

    @staticmethod
    def getInstance() -> nvidia_smi:  # noqa: N802
        return nvidia_smi()

    def DeviceQuery(self, filter: object = None) -> dict[str, list[dict[str, Any]]]:  # noqa: N802
        return {"gpu": [_as_smi_tells(nvmlDeviceGetHandleByIndex(index)) for index in range(nvmlDeviceGetCount())]}


def _as_smi_tells(handle: int) -> dict[str, Any]:
    memory, busy = nvmlDeviceGetMemoryInfo(handle), nvmlDeviceGetUtilizationRates(handle)
    return {
        "product_name": nvmlDeviceGetName(handle),
        "fb_memory_usage": {name: nbytes / 2**20 for name, nbytes in memory._asdict().items()} | {"unit": "MiB"},
        "utilization": {"gpu_util": busy.gpu, "memory_util": busy.memory, "unit": "%"},
        "power_readings": {"power_draw": nvmlDeviceGetPowerUsage(handle) / 1000, "unit": "W"},
    }


MODULES = {
    "pynvml": named(
        NVMLError, nvmlInit, nvmlShutdown, nvmlDeviceGetCount, nvmlDeviceGetHandleByIndex, nvmlDeviceGetName,
        nvmlDeviceGetMemoryInfo, nvmlDeviceGetPowerUsage, nvmlDeviceGetUtilizationRates,
    ),
    "pynvml.smi": named(nvidia_smi),
}  # fmt: skip
