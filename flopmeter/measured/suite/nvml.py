"""Power, clocks and limits of a GPU, asked of the driver's own library (NVML); no package is needed.

Without the library, or for a part of a GPU (MIG), nothing is known, and files say so. AMD's driver has another library,
which is not asked.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any, NamedTuple

import torch

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_TEXT_BYTES = 96  # NVML's longest names


class EnergyCount(NamedTuple):
    """The energy that the board has used so far, at a time. The difference of two such energies over that of their
    times is a mean power."""

    joules: float
    seconds: float  # of a clock that only goes forward

    def watts_since(self, before: EnergyCount) -> float:
        return (self.joules - before.joules) / (self.seconds - before.seconds)


class Gpu:
    """One GPU as NVML sees it; each question is answered with None where the driver does not tell."""

    def __init__(self, library: Any, uuid: str) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        self._is_there = (
            library.nvmlInit_v2() == 0
            and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self._handle)) == 0
        )

    def energy(self) -> EnergyCount | None:
        millijoules = self._asked("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong())
        return None if millijoules is None else EnergyCount(millijoules * 1e-3, time.perf_counter())

    def sm_clock_mhz(self) -> int | None:
        return self._asked("nvmlDeviceGetClockInfo", ctypes.c_uint(), _SM)

    def facts(self) -> dict[str, Any]:
        """The facts that do not change while a suite runs, by their names in the file."""
        milliwatts = self._asked("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint())
        return {
            "power_limit_w": None if milliwatts is None else milliwatts * 1e-3,
            "most_sm_clock_mhz": self._asked("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), _SM),
            "most_memory_clock_mhz": self._asked("nvmlDeviceGetMaxClockInfo", ctypes.c_uint(), _MEMORY),
            "application_sm_clock_mhz": self._asked("nvmlDeviceGetApplicationsClock", ctypes.c_uint(), _SM),
            "driver": self._driver(),
        }

    def _asked(self, function: str, answer: Any, *arguments: int) -> int | None:
        """The answer, which NVML writes into the last argument; it returns 0 where it has one."""
        if not self._is_there or not hasattr(self._library, function):
            return None
        failed = getattr(self._library, function)(self._handle, *arguments, ctypes.byref(answer))
        return None if failed else int(answer.value)

    def _driver(self) -> str | None:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if not self._is_there or self._library.nvmlSystemGetDriverVersion(text, _TEXT_BYTES):
            return None
        return text.value.decode()


def gpu_of_torch() -> Gpu | None:
    """torch's current device; None without NVML."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    return Gpu(library, f"GPU-{torch.cuda.get_device_properties().uuid}")
